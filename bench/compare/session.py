"""Opens the processes of some systems on one model, and seats the systems.

Invariants and semantics: every process is loaded once, one after the other, and held stopped until its turn; all end
when the session does. A peer that is not installed, not offered or broken keeps its seat with the reason.

Not here: turns (``rounds``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.compare.catalogue import System, Worker, available_cores
from bench.compare.install import is_installed
from bench.compare.models import ModelFiles
from bench.compare.peer_process import PeerProcess
from bench.compare.readings import Status
from bench.compare.rounds import Seat
from bench.compare.wire import Failed, Loaded, LoadOrder

_LOAD_LIMIT_S = 1_800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What processes are loaded for."""

    max_slots: int
    max_context: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    player: PeerProcess | None
    status: Status
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Systems at the table."""

    seats: tuple[Seat, ...]
    versions: dict[str, dict[str, str]]
    """By the name of the process."""


@contextmanager
def open_session(
    systems: Sequence[System], model: ModelFiles, shape: Shape, cache: Path, tell: Callable[[str], None]
) -> Iterator[Session]:
    """Load what the systems need."""
    versions: dict[str, dict[str, str]] = {}
    opened: dict[str, _Opened] = {}
    with ExitStack() as stack:
        for worker in dict.fromkeys(system.worker for system in systems):
            tell(f"loading {worker.name}")
            opened[worker.name] = _open(worker, model, shape, cache, stack, versions)
        yield Session(seats=tuple(_seat(system, opened[system.worker.name]) for system in systems), versions=versions)


def _seat(system: System, opened: _Opened) -> Seat:
    return Seat(system=system, player=opened.player, status=opened.status, note=opened.note)


def _open(
    worker: Worker,
    model: ModelFiles,
    shape: Shape,
    cache: Path,
    stack: ExitStack,
    versions: dict[str, dict[str, str]],
) -> _Opened:
    if not is_installed(worker, cache):
        return _Opened(player=None, status=Status.NOT_INSTALLED, note="python -m bench.compare --setup")
    cores = available_cores()[: shape.num_threads]
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command, environ = worker.command(cache), worker.environ(os.environ, cores)
    process = stack.enter_context(PeerProcess(command, environ, logs / f"{worker.name}.log"))
    order = LoadOrder(
        model_dir=str(model.directory),
        gguf="" if model.gguf is None else str(model.gguf),
        precision=worker.precision,
        num_threads=shape.num_threads,
        max_slots=shape.max_slots,
        max_context=shape.max_context,
    )
    reply = process.turn(order, _LOAD_LIMIT_S).reply
    if isinstance(reply, Loaded):
        versions[worker.name] = reply.versions
        return _Opened(player=process, status=Status.MEASURED, note="")
    process.close()
    failed = reply if isinstance(reply, Failed) else Failed(message=f"unexpected reply {type(reply).__name__}")
    return _Opened(player=None, status=Status.FAILED if failed.offered else Status.NOT_OFFERED, note=failed.message)
