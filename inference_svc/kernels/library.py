"""The native kernels as a loaded library, or why there are none.

Invariants and semantics: loaded once per process, with ctypes, which releases the GIL in every call. A build made from
other headers is refused, never misread. ``KEV_KERNELS`` names the variant to use (``avx512_bf16_vnni``, ``avx2``,
``portable``) or switches the kernels off (``off``); unset, the best variant that the CPU can run is used.

Not here: what the calls do (``kernels.h``), their structures (``layout``), tensors (``packed``, ``ops``).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Self

from common.errors import ConfigError, InvariantError
from inference_svc.kernels.layout import check_layout

VARIANTS = ("avx512_bf16_vnni", "avx2", "portable")
"""Best first."""

_SWITCH = "KEV_KERNELS"
ABI_VERSION = 2
"""As ``kev_abi_version``: changes whenever a signature, a structure or the packed layout does."""
_REINSTALL = "install Kev again where a C++ compiler is at hand"


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded build of the kernels."""

    calls: ctypes.CDLL
    variant: str

    def check(self, status: int) -> None:
        """Take the status that a call returned.

        Raises:
            InvariantError: the call refused its arguments and did nothing.
        """
        if status:
            raise InvariantError(f"the native kernels refused a call: {self.calls.kev_status_text(status).decode()}")


class Pool:
    """Threads that share each call they are given to; the calling thread is one of them.

    Closed by ``close``, by leaving ``with``, or when it is collected.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        """Start ``num_threads - 1`` threads.

        Raises:
            MemoryError: the system gives no more threads.
        """
        self.library = library
        self.address: int = library.calls.kev_pool_create(num_threads)
        if not self.address:
            raise MemoryError(
                f"the system gives no {num_threads} threads to the native kernels; lower core.num_threads"
            )
        self.close = weakref.finalize(self, library.calls.kev_pool_destroy, self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def kernels() -> Library | str:
    """The library, or one clause that says why there is none.

    Raises:
        ConfigError: ``KEV_KERNELS`` names no variant, or one that this machine cannot run.
        InvariantError: the library was built from another version of Kev.
    """
    wanted = os.environ.get(_SWITCH, "")
    if wanted and wanted not in ("off", *VARIANTS):
        raise ConfigError(f"{_SWITCH}={wanted} names no variant of the kernels; use off, {', '.join(VARIANTS)}")
    if wanted == "off":
        return f"they are switched off by {_SWITCH}=off"
    path = _built()
    if path is None:
        return f"they are not built; {_REINSTALL}"
    try:
        calls = ctypes.CDLL(str(path))
    except OSError as error:
        return f"they cannot be loaded ({error}); {_REINSTALL}"
    return Library(calls, _prepare(calls, wanted))


def _built() -> Path | None:
    paths = (Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _prepare(calls: ctypes.CDLL, wanted: str) -> str:
    """Check and declare the library's functions; the variant in use."""
    version = calls.kev_abi_version()
    if version != ABI_VERSION:
        raise InvariantError(f"the native kernels have ABI {version}, not {ABI_VERSION}; {_REINSTALL}")
    check_layout(calls)
    declare(calls)
    if wanted and calls.kev_isa_select(wanted.encode()):
        raise ConfigError(f"{_SWITCH}={wanted}: this machine cannot run that variant; unset it for the best one")
    return str(calls.kev_isa_name().decode())


def declare(calls: ctypes.CDLL) -> None:
    """Give ctypes the signatures of ``capi.h`` and of the executor."""
    whole, count, pointer, number, text = (
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_float,
        ctypes.c_char_p,
    )
    signatures = {
        "kev_status_text": (text, whole),
        "kev_isa_name": (text,),
        "kev_isa_select": (whole, text),
        "kev_pool_create": (pointer, whole),
        "kev_pool_destroy": (None, pointer),
        "kev_pool_threads": (whole, pointer),
        "kev_packed_bytes": (count, whole, count, count),
        "kev_linear_scratch_bytes": (count, whole, count, count),
        "kev_prefer_huge_pages": (None, pointer, count),
        "kev_pack_rows": (whole, pointer, whole, pointer, whole, *[count] * 5, *[pointer] * 3),
        "kev_unpack_rows": (whole, pointer, pointer, count, count, pointer, count),
        "kev_linear": (whole, *[pointer] * 3, count, count, pointer, pointer, count, pointer),
        "kev_linear_argmax": (whole, *[pointer] * 3, count, count, pointer, number, *[pointer] * 3),
        "kev_executor_create": (pointer, pointer, pointer, count, count),
        "kev_executor_destroy": (None, pointer),
        "kev_executor_bytes": (count, pointer),
        "kev_executor_times": (whole, pointer, pointer, count),
        "kev_executor_run": (whole, pointer, pointer),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
