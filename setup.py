"""The native kernels, as part of the build; everything else is in ``pyproject.toml``.

Invariants and semantics: one shared library without ``-march``: each file that needs an instruction set turns it on for
itself, and the CPU chooses at run time. Without a C++ compiler the install succeeds and Kev runs on torch alone. No
flag may let the compiler reorder or fuse sums: the order of a sum is the promise that the kernels make.

Not here: loading it (``inference_svc.kernels.library``).
"""

from pathlib import Path

from setuptools import Extension, setup

ROOM = Path("inference_svc/kernels")

FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # gcc 12 says so of its own AVX-512 header (GCC bug 105593).
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]

setup(
    ext_modules=[
        Extension(
            "inference_svc.kernels._native",
            sources=sorted(map(str, ROOM.glob("*.cpp"))),
            depends=sorted(map(str, ROOM.glob("*.h"))),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
