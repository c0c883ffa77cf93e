"""What a simulation shows: waits by class, how evenly channels are loaded, and what was lost.

Invariants and semantics: pure. Percentiles are of the nearest rank; nobody who came during the warm-up counts, though
it took part. The wait of a question that never started lasts to its end, so that losing slow ones does not look fast.

Not here: running (``world``), showing (``report``, ``plots``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.traffic.world import End, Ending, History

WARM_UP = 0.1
"""Share of the arrivals that is not counted: the pool starts empty."""
_PEAK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReading:
    """One class of questions."""

    kind: str
    num: int
    num_rejected: int
    num_timed_out: int
    wait_p50_s: float
    wait_p99_s: float
    answer_p50_s: float
    answer_p99_s: float

    @classmethod
    def of(cls, kind: str, endings: Sequence[Ending]) -> ClassReading:
        """Of the endings of one class; refused questions have no wait."""
        taken = [ending for ending in endings if ending.end is not End.REJECTED]
        waits_s, stays_s = sorted(e.wait_s for e in taken), sorted(e.stay_s for e in taken)
        return cls(
            kind=kind,
            num=len(endings),
            num_rejected=len(endings) - len(taken),
            num_timed_out=sum(ending.end is End.TIMED_OUT for ending in endings),
            wait_p50_s=percentile(waits_s, 0.5),
            wait_p99_s=percentile(waits_s, 0.99),
            answer_p50_s=percentile(stays_s, 0.5),
            answer_p99_s=percentile(stays_s, 0.99),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One simulation."""

    classes: tuple[ClassReading, ...]
    utilization: float
    """Taken slots, of all slots, on average."""
    questions_per_s: float
    """Answered, over the whole span."""
    max_over_mean_load: float
    """Outstanding questions of the fullest channel over the mean channel, as arrivals found them."""
    max_over_mean_placed: float
    """Questions sent to the most used channel over the mean channel."""
    hot_bucket_share: float
    """Of the questions with a channel, those of the most frequent bucket."""
    refusals_per_answer: float
    """Refused tries over answered questions."""
    peak_returns: int
    """Most clients that asked again within a tenth of a second."""
    slowest_s: float
    """From its first try to its answer, of the question that took longest: until then a burst is not served."""
    num_diverted: int
    num_rejected: int
    num_timed_out: int
    shares: tuple[float, ...]
    """Of the questions, by channel."""
    advice: str
    """What the router told its operator to do about a hot bucket; empty if it saw none."""

    def of(self, kind: str) -> ClassReading:
        """The reading of a class.

        Raises:
            KeyError: nobody of that class came.
        """
        found = next((reading for reading in self.classes if reading.kind == kind), None)
        if found is None:
            raise KeyError(kind)
        return found


def read(history: History) -> Reading:
    """All figures of a finished simulation."""
    counted = history.endings[int(len(history.endings) * WARM_UP) :]
    kinds = dict.fromkeys(ending.arrival.kind for ending in history.endings)
    settings, placed = history.settings, [channel.num_total for channel in history.channels]
    buckets = [ending.hash_bucket for ending in counted if ending.hash_bucket is not None]
    ends = [ending.end for ending in counted]
    answered = [ending for ending in history.endings if ending.end is End.ANSWERED]
    num_refusals = sum(ending.num_tries - (ending.end is not End.REJECTED) for ending in history.endings)
    slots = settings.num_nodes * settings.num_slots
    return Reading(
        classes=tuple(ClassReading.of(kind, [e for e in counted if e.arrival.kind == kind]) for kind in sorted(kinds)),
        utilization=history.slot_s / max(history.span_s, 1e-9) / slots,
        questions_per_s=len(answered) / max(history.span_s, 1e-9),
        max_over_mean_load=max_over_mean(history.loads_seen),
        max_over_mean_placed=max_over_mean(placed),
        hot_bucket_share=max((buckets.count(bucket) for bucket in set(buckets)), default=0) / max(1, len(buckets)),
        refusals_per_answer=num_refusals / max(1, len(answered)),
        peak_returns=most_within(history.returns_s, _PEAK_S),
        slowest_s=max((ending.stay_s for ending in answered), default=0.0),
        num_diverted=history.num_diverted,
        num_rejected=ends.count(End.REJECTED),
        num_timed_out=ends.count(End.TIMED_OUT),
        shares=tuple(number / max(1, sum(placed)) for number in placed),
        advice=history.advice,
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """The nearest rank; 0 of nothing."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0


def most_within(ascending: Sequence[float], length: float) -> int:
    """The largest number of values in a stretch of this length."""
    most = first = 0
    for last, value in enumerate(ascending):
        while ascending[first] <= value - length:
            first += 1
        most = max(most, last - first + 1)
    return most


def max_over_mean(loads: Sequence[float]) -> float:
    """1 when all are equal, the number of channels when one has everything; 1 when there is nothing."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
