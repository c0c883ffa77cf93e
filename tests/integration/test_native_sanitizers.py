"""The kernels under the sanitizers: no byte beyond what a call was given, no undefined step, no race between threads.

The programs are in ``tests/native``; they check results as well. Compiling them is most of the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "inference_svc" / "kernels"
NATIVE = ROOT / "tests" / "native"

MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0")
RACES = ("-fsanitize=thread", "-O1")
"""Optimized, because these programs run long; the others compile long."""
FLAGS = (MEMORY, RACES)
COMPILER = os.environ.get("CXX", "g++")
POOL = ("pool.cpp", "isa.cpp")
LINEARS = (*POOL, *(path.name for name in ("linear*.cpp", "rowwise*.cpp") for path in sorted(KERNELS.glob(name))))
ATTENTION = (*POOL, *(path.name for path in sorted(KERNELS.glob("attention*.cpp"))))
FORWARD = tuple(path.name for path in sorted(KERNELS.glob("*.cpp")) if path.stem not in ("module", "capi"))
ROWWISE = ("isa.cpp", *(path.name for path in sorted(KERNELS.glob("rowwise*.cpp"))))

pytestmark = pytest.mark.timeout(900)


def _run(command: list[str], **env: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr


class Builds:
    """Programs of ``tests/native`` over some of the kernels; a file is compiled once for each kind of check."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[Path, tuple[str, ...]], Path] = {}

    def program(self, name: str, sources: tuple[str, ...], flags: tuple[str, ...]) -> str:
        """The path of the program, which is built anew."""
        paths = [NATIVE / f"{name}.cpp", *(KERNELS / source for source in sources)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(self._compiled, paths, repeat(flags)))
        program = self._folder / f"{name}-{FLAGS.index(flags)}"
        _run([COMPILER, *flags, *map(str, objects), "-pthread", "-o", str(program)])
        return str(program)

    def _compiled(self, source: Path, flags: tuple[str, ...]) -> Path:
        if (source, flags) not in self._made:
            made = self._folder / f"{source.stem}-{FLAGS.index(flags)}.o"
            options = ["-std=c++17", "-g", "-w", "-I.", "-ffp-contract=off", *flags]
            _run([COMPILER, *options, "-c", str(source), "-o", str(made)])
            self._made[source, flags] = made
        return self._made[source, flags]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("native"))


@pytest.fixture(autouse=True, scope="module")
def _sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip, and say so, where nothing can be compiled with them."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"NOT CHECKED: the kernels' memory and races; there is no C++ compiler {COMPILER}")
    folder = tmp_path_factory.mktemp("sanitizers")
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    for flags in FLAGS:
        command = [COMPILER, *flags, str(source), "-o", str(folder / "empty")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or subprocess.run([folder / "empty"], check=False).returncode:
            pytest.skip(f"NOT CHECKED: the kernels' memory and races; {COMPILER} {flags[0]} does not work here")


def test_threads_share_a_pool_without_races(builds: Builds) -> None:
    """A chunk run twice or a result read early would show as a race of the plain counters in the program."""
    _run([builds.program("pool_test", POOL, RACES)])


def test_a_pool_frees_what_it_holds_and_survives_a_fork(builds: Builds) -> None:
    """A child that waited for its parent's threads would hang here."""
    _run([builds.program("pool_test", POOL, MEMORY), "fork"])


def test_linears_stay_within_their_memory(builds: Builds) -> None:
    """Odd shapes in buffers of exactly their size, every variant this machine can run."""
    _run([builds.program("linear_test", LINEARS, MEMORY)])


@pytest.mark.parametrize("flags", FLAGS, ids=["memory", "races"])
def test_attention_stays_within_its_memory_and_threads(builds: Builds, flags: tuple[str, ...]) -> None:
    """Odd shapes, prefixes at the end of the arena and scratch of exactly its size, every variant."""
    _run([builds.program("attention_test", ATTENTION, flags)])


def test_attention_is_cut_into_blocks_that_fit(builds: Builds) -> None:
    """Every output in one block, no block with more scores than the scratch holds, and together what reads the same."""
    _run([builds.program("attention_cut_test", (), MEMORY)])


def test_rows_stay_within_their_memory(builds: Builds) -> None:
    """Odd widths in buffers of exactly their size, every variant."""
    _run([builds.program("rowwise_test", ROWWISE, MEMORY)])


@pytest.mark.parametrize("flags", FLAGS, ids=["memory", "races"])
def test_forwards_stay_within_their_memory_and_threads(builds: Builds, flags: tuple[str, ...]) -> None:
    """Blocks of rows and shared outputs, odd widths, the last layer alone: equal bits, every variant."""
    _run([builds.program("forward_test", FORWARD, flags)])
