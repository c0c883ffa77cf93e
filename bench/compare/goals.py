"""The speed goals, and whether a run reached them.

Invariants and semantics: pure; ratios inside one run. A goal over a system that was not measured is left open, never
counted as reached. "Every peer" means each one that was measured.

Not here: the numbers (``readings``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.compare.catalogue import SYSTEMS
from bench.compare.readings import Reading, Status

_PEERS = tuple(system.name for system in SYSTEMS if not system.is_kev)
_BF16_PEERS = tuple(system.name for system in SYSTEMS if not system.is_kev and system.numbers == "bf16")
_SERVERS = ("vllm", "llama.cpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Work done per second by one system over that of others."""

    work: str
    system: str
    over: tuple[str, ...]
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A goal against one peer."""

    work: str
    system: str
    over: str
    factor: float
    ratio: float | None
    """None: one of the two was not measured."""

    @property
    def reached(self) -> bool | None:
        """Whether the ratio is high enough; None if there is none."""
        return None if self.ratio is None else self.ratio >= self.factor


GOALS = (
    Goal(work="W1", system="kev-strict-bf16", over=_BF16_PEERS, factor=2.0),
    Goal(work="W1", system="kev-strict-int8", over=_PEERS, factor=4.0),
    Goal(work="W2", system="kev-shared-bf16", over=("padded",), factor=10.0),
    Goal(work="W2", system="kev-shared-bf16", over=("vllm",), factor=1.5),
    Goal(work="W2", system="kev-shared-int8", over=("padded",), factor=25.0),
    Goal(work="W2", system="kev-shared-int8", over=("vllm",), factor=3.5),
    Goal(work="W3", system="kev-strict-bf16", over=("padded",), factor=4.0),
    Goal(work="W3", system="kev-strict-bf16", over=_SERVERS, factor=1.5),
    Goal(work="W3", system="kev-strict-int8", over=("padded",), factor=8.0),
    Goal(work="W3", system="kev-strict-int8", over=_SERVERS, factor=3.0),
    Goal(work="W5", system="kev-strict-bf16", over=_BF16_PEERS, factor=1.3),
    Goal(work="W5", system="kev-strict-int8", over=_BF16_PEERS, factor=3.0),
    Goal(work="W6", system="kev-strict-bf16", over=("kev-shared-bf16",), factor=1 / 1.05),
    Goal(work="W6", system="kev-strict-int8", over=("kev-shared-int8",), factor=1 / 1.02),
)


def outcomes(readings: Sequence[Reading], goals: Sequence[Goal] = GOALS) -> list[Outcome]:
    """All goals of the works that were run."""
    measured = {(reading.work, reading.system): reading for reading in readings if reading.status is Status.MEASURED}
    works = {reading.work for reading in readings}
    return [outcome for goal in goals if goal.work in works for outcome in _of(goal, measured)]


def _of(goal: Goal, measured: Mapping[tuple[str, str], Reading]) -> Iterator[Outcome]:
    own = measured.get((goal.work, goal.system))
    for name in goal.over:
        other = measured.get((goal.work, name))
        ratio = None if own is None or other is None else other.median_s / own.median_s
        yield Outcome(work=goal.work, system=goal.system, over=name, factor=goal.factor, ratio=ratio)
