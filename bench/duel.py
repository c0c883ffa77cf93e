"""Kev's kernel and torch's take turns over the same numbers: the measuring loop of the kernel benches.

Invariants and semantics: both run once before the clock starts, then alternate until the time is up and each has had
some turns; medians count. Wall time says what a user waits for; processor time what it costs, also on a machine that
does other things (there, use one thread: torch's wait for each other at full speed).

Not here: what is computed (``kernels``, ``attention_kernels``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from inference_svc.kernels.attention_calls import declare_attention
from inference_svc.kernels.library import VARIANTS, Library, Pool, kernels

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Medians of one contestant."""

    wall_us: float
    cpu_us: float

    def __str__(self) -> str:
        """Wall time, and processor time in brackets."""
        return f"{self.wall_us:.0f} ({self.cpu_us:.0f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """What both took."""

    kev: Turn
    torch: Turn
    gigabytes_per_cpu_s: float
    """Read by Kev."""
    gigaops_per_cpu_s: float
    """Multiplications and additions by Kev."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The end of a line of the table."""
        rates = f"{self.gigabytes_per_cpu_s:.1f}", f"{self.gigaops_per_cpu_s:.0f}"
        return str(self.kev), str(self.torch), f"{self.torch.cpu_us / self.kev.cpu_us:.2f}", *rates


COLUMNS = ("Kev", "torch", "torch / Kev", "GB/s", "GOP/s")
"""Heads of ``Duel.columns``."""


def fight(kev: Iterator[Run], other: Iterator[Run], *, seconds: float, num_bytes: float, ops: float) -> Duel:
    """Alternate both for a while.

    Args:
        kev: calls of Kev's kernel, each on other numbers in memory.
        other: the same with torch.
        seconds: how long.
        num_bytes: that one call of Kev's reads.
        ops: multiplications and additions of one call.
    """
    contestants = (kev, other)
    for contestant in contestants:
        next(contestant)()
    times: list[list[tuple[float, float]]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[1]) < 5:
        for contestant, found in zip(contestants, times, strict=True):
            call = next(contestant)
            cpu, wall = time.process_time(), time.perf_counter()
            call()
            found.append((time.perf_counter() - wall, time.process_time() - cpu))
    turns = []
    for found in times:
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        turns.append(Turn(wall_us=wall * 1e6, cpu_us=cpu * 1e6))
    cpu_s = turns[0].cpu_us / 1e6
    return Duel(
        kev=turns[0],
        torch=turns[1],
        gigabytes_per_cpu_s=num_bytes / cpu_s / 1e9,
        gigaops_per_cpu_s=ops / cpu_s / 1e9,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(ABC):
    """One line of a bench's table."""

    duel: Duel

    @property
    @abstractmethod
    def cells(self) -> tuple[str, ...]:
        """What was computed, and the duel."""


def parser_of(description: str | None, precisions: Sequence[str], seconds: float) -> argparse.ArgumentParser:
    """The options that both benches have.

    Args:
        description: the bench's.
        precisions: to choose from; all that can be stored in 16 bits or fewer are measured by default.
        seconds: per line of the table, by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precisions", nargs="+", choices=precisions, default=[p for p in precisions if p != "f32"])
    parser.add_argument("--seconds", type=float, default=seconds, help="per line of the table")
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--json", type=Path)
    return parser


@contextmanager
def ring(threads: int, variant: str | None) -> Iterator[tuple[Library, Pool]]:
    """The kernels with so many threads, and torch with as many.

    Raises:
        SystemExit: there are no native kernels here.
    """
    library = kernels()
    if not isinstance(library, Library):
        raise SystemExit(f"there are no native kernels here: {library}")
    declare_attention(library.calls)
    if variant:
        library.check(library.calls.kev_isa_select(variant.encode()))
    torch.set_num_threads(threads)
    with Pool(library, threads) as pool, torch.inference_mode():
        yield library, pool


def report(title: str, heads: Sequence[str], readings: Iterable[Reading], path: Path | None) -> None:
    """Show the table, and save it when a path is given."""
    variant = kernels()
    name = variant.calls.kev_isa_name().decode() if isinstance(variant, Library) else ""
    table = Table(title=f"{title}, {name}; microseconds, wall (processor)")
    for head in (*heads, *COLUMNS):
        table.add_column(head, justify="left" if head in heads[:1] else "right")
    kept = list(readings)
    for reading in kept:
        table.add_row(*reading.cells)
    Console().print(table)
    if path is not None:
        path.write_text(json.dumps([asdict(reading) for reading in kept], indent=1), encoding="utf-8")
