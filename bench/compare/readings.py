"""What was measured, and the statistics over it.

Invariants and semantics: pure. A rate is the useful tokens of a work over the median of its rounds; times of questions
are pooled over all rounds; a percentile is the smallest value that enough values do not exceed (nearest rank).

Not here: taking turns (``rounds``), goals (``goals``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.compare.wire import Answered
from bench.compare.works import Work


class Status(StrEnum):
    """What came of a system on a work."""

    MEASURED = "measured"
    NOT_INSTALLED = "not installed"
    NOT_OFFERED = "not offered"
    SKIPPED = "skipped"
    """It would have taken longer than allowed."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All questions of a work, once."""

    answered: Answered
    peak_rss_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One system on one work."""

    work: str
    system: str
    status: Status
    note: str = ""
    rounds_s: tuple[float, ...] = ()
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    first_token_p50_s: float | None = None
    question_p50_s: float = 0.0
    """From the order to the end of a question."""
    question_p99_s: float = 0.0
    peak_rss_bytes: int = 0
    cpu_s: float = 0.0
    """Processor time of a round, median."""
    num_changed: int = 0
    """Answers that differ from the same question alone, of ``num_compared``; the worst round."""
    num_compared: int = 0

    @property
    def median_s(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.rounds_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank.

    Raises:
        ValueError: no values, or a share outside (0, 1].
    """
    if not values or not 0 < share <= 1:
        raise ValueError(f"percentile {share} of {len(values)} values")
    return sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]


def unequal_work(work: Work, answered: Answered) -> str:
    """In words how the answers fall short of what was asked; empty if they do not."""
    if len(answered.answers) != len(work.asks):
        return f"{len(answered.answers)} answers to {len(work.asks)} questions"
    for index, (ask, answer) in enumerate(zip(work.asks, answered.answers, strict=True)):
        if ask.max_tokens != answer.num_tokens:
            return f"unequal work: question {index} got {answer.num_tokens} tokens, not {ask.max_tokens}"
    return ""


def summarize(work: Work, system: str, rounds: Sequence[Round], alone: Mapping[int, str], note: str = "") -> Reading:
    """The reading of at least one round. ``alone``: outputs without company by question index."""
    answers = [answer for item in rounds for answer in item.answered.answers]
    first_s = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    finished_s = [answer.finished_s for answer in answers]
    rounds_s = tuple(item.answered.total_s for item in rounds)
    return Reading(
        work=work.name,
        system=system,
        status=Status.MEASURED,
        note=note,
        rounds_s=rounds_s,
        num_tokens=work.num_tokens,
        tokens_per_s=work.num_tokens / statistics.median(rounds_s),
        first_token_p50_s=percentile(first_s, 0.5) if first_s else None,
        question_p50_s=percentile(finished_s, 0.5),
        question_p99_s=percentile(finished_s, 0.99),
        peak_rss_bytes=max(item.peak_rss_bytes for item in rounds),
        cpu_s=statistics.median(item.cpu_s for item in rounds),
        num_changed=max(
            sum(item.answered.answers[index].output != output for index, output in alone.items()) for item in rounds
        ),
        num_compared=len(alone),
    )
