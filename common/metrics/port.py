"""The two ways in which a number reaches an operator: something happened, or somebody looks.

Invariants and semantics: events go through a ``Recorder``, whose methods may be called from any thread, never raise and
never wait. Readings of the moment are made by a source, which is asked at every scrape on the event loop.

Not here: the library that keeps them (``registry``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from common.metrics.catalogue import Metric
from common.types import ChannelResult


class Recorder(Protocol):
    """Takes what happened."""

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Add to a counter; ``labels`` in the order of the metric's."""
        ...

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a gauge, or of a counter that somebody else counts, at this moment."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Reading]]
"""Reads the numbers of the moment; must not wait."""


def ending(outcome: ChannelResult) -> tuple[str, str]:
    """How a question ended: finish reason, and the reason of the error or ``none``."""
    return outcome.finish_reason.value, "none" if outcome.error is None else outcome.error.reason


MAX_CHANNEL_LABELS = 64
"""Channels with a series of their own; the others share the label ``other``."""


def by_channel(metric: Metric, values: Iterable[float]) -> list[Reading]:
    """One reading per channel, index = channel id; those beyond ``MAX_CHANNEL_LABELS`` are added up."""
    listed = list(values)
    readings = [Reading(metric, value, (str(i),)) for i, value in enumerate(listed[:MAX_CHANNEL_LABELS])]
    if len(listed) > MAX_CHANNEL_LABELS:
        readings.append(Reading(metric, sum(listed[MAX_CHANNEL_LABELS:]), ("other",)))
    return readings
