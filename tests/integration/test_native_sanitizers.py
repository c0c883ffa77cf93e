"""The kernels under the sanitizers: no byte beyond what a call was given, no undefined step, no race between threads.

The programs are in ``tests/native``; they check results as well. Compiling them is most of the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "inference_svc" / "kernels"
NATIVE = ROOT / "tests" / "native"

MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-fsanitize=thread",)
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


def _built(folder: Path, program: str, sources: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """A program of ``tests/native`` over some of the kernels."""
    compile_one = [COMPILER, "-std=c++17", "-O0", "-g", "-w", "-I.", "-ffp-contract=off", *flags]
    paths = [NATIVE / f"{program}.cpp", *(KERNELS / name for name in sources)]
    objects = [folder / f"{path.stem}.o" for path in paths]
    commands = [[*compile_one, "-c", str(path), "-o", str(made)] for path, made in zip(paths, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(_run, commands))
    _run([*compile_one, *map(str, objects), "-pthread", "-o", str(folder / program)])
    return folder / program


@pytest.fixture(autouse=True, scope="module")
def _sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip, and say so, where nothing can be compiled with them."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"NOT CHECKED: the kernels' memory and races; there is no C++ compiler {COMPILER}")
    folder = tmp_path_factory.mktemp("sanitizers")
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    for flags in (MEMORY, RACES):
        command = [COMPILER, *flags, str(source), "-o", str(folder / "empty")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or subprocess.run([folder / "empty"], check=False).returncode:
            pytest.skip(f"NOT CHECKED: the kernels' memory and races; {COMPILER} {flags[0]} does not work here")


def test_threads_share_a_pool_without_races(tmp_path: Path) -> None:
    """A chunk run twice or a result read early would show as a race of the plain counters in the program."""
    _run([str(_built(tmp_path, "pool_test", POOL, RACES))])


def test_a_pool_frees_what_it_holds_and_survives_a_fork(tmp_path: Path) -> None:
    """A child that waited for its parent's threads would hang here."""
    _run([str(_built(tmp_path, "pool_test", POOL, MEMORY)), "fork"])


def test_linears_stay_within_their_memory(tmp_path: Path) -> None:
    """Odd shapes in buffers of exactly their size, every variant this machine can run."""
    _run([str(_built(tmp_path, "linear_test", LINEARS, MEMORY))])


@pytest.mark.parametrize("flags", [MEMORY, RACES], ids=["memory", "races"])
def test_attention_stays_within_its_memory_and_threads(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Odd shapes, prefixes at the end of the arena and scratch of exactly its size, every variant."""
    _run([str(_built(tmp_path, "attention_test", ATTENTION, flags))])


def test_rows_stay_within_their_memory(tmp_path: Path) -> None:
    """Odd widths in buffers of exactly their size, every variant."""
    _run([str(_built(tmp_path, "rowwise_test", ROWWISE, MEMORY))])


@pytest.mark.parametrize("flags", [MEMORY, RACES], ids=["memory", "races"])
def test_forwards_stay_within_their_memory_and_threads(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Blocks of rows and shared outputs, odd widths, the last layer alone: equal bits, every variant."""
    _run([str(_built(tmp_path, "forward_test", FORWARD, flags))])
