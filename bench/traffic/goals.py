"""What must hold in the stories, and whether it does.

Invariants and semantics: a goal is about a remedy, never about the case as it was told. *Channel load* is the number of
questions that were sent to a channel; the *p99 of short questions* is that of their answers' times, waiting included,
because a giant costs its neighbours both.

Not here: the figures (``measures``), the cases (``stories``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.traffic.measures import Reading

_SHORTEST_S = 0.0144
"""A step: waits below it are nobody's wait, and a ratio of two of them says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure and its limit."""

    case: str
    what: str
    value: float
    most: float

    @property
    def reached(self) -> bool:
        """Whether the figure keeps its limit."""
        return self.value <= self.most


HOT_REMEDIES = ("semantic_hash, breaker", "consistent_hash, breaker")
GIANT_REMEDY = "length_aware"
RETURNS_REMEDIES = ("each at a time of its own", "the same, in whole seconds")


def goals_of(story: str, readings: Mapping[str, Reading]) -> list[Goal]:
    """The goals of a story whose cases have been run; the first case is the world as it should be."""
    if not readings:
        return []
    reference = next(iter(readings.values()))
    if story == "hot":
        return [
            goal
            for case in HOT_REMEDIES
            if case in readings
            for goal in (
                Goal(case=case, what="max/mean channel load", value=readings[case].max_over_mean_placed, most=1.3),
                Goal(
                    case=case,
                    what="p99 wait of cold questions over an even load",
                    value=ratio(readings[case].of("cold").wait_p99_s, reference.of("cold").wait_p99_s),
                    most=1.2,
                ),
            )
        ]
    if story == "giant" and GIANT_REMEDY in readings:
        return [
            Goal(
                case=GIANT_REMEDY,
                what="p99 of short questions over a world without the giant",
                value=ratio(readings[GIANT_REMEDY].of("short").answer_p99_s, reference.of("short").answer_p99_s),
                most=1.5,
            )
        ]
    if story == "returns":
        return [
            goal
            for case in RETURNS_REMEDIES
            if case in readings
            for goal in (
                Goal(case=case, what="refusals an answer", value=readings[case].refusals_per_answer, most=1.0),
                Goal(
                    case=case,
                    what="slowest answer over standing in line",
                    value=ratio(readings[case].slowest_s, reference.slowest_s),
                    most=1.5,
                ),
            )
        ]
    return []


def ratio(seconds: float, reference_s: float) -> float:
    """How many times as long; anything below a step counts as a step."""
    return max(seconds, _SHORTEST_S) / max(reference_s, _SHORTEST_S)
