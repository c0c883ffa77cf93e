"""Replay: a share of the answers is computed again, alone, and compared with what the question got in company.

Invariants and semantics: which questions are replayed depends on their ids alone. A replay runs between two steps over
free KV of the same arena, at level strict and without a neighbour; running questions keep theirs and wait. Tokens and
the logits of the chosen tokens are compared bit for bit; an answer that differs is replaced by an error and counted.
A replay that finds no room is skipped, not counted.

Not here: the first computation (``engine_core``), proof without traffic (``verify``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from common.errors import IsolationViolationError
from common.ports import Clock
from common.types import ChannelEvent, ChannelResult, FinishReason, Verdict
from inference_svc.answer import AnswerText, NoText
from inference_svc.plan import StepOutput, StepPlan
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.sequence import Sequence as Question
from inference_svc.slots import Extent, KVLedger

_LOG = logging.getLogger("kev.replay")

_BUDGET_MS = 3_600_000
_SHARES = 1 << 32


class ReplayRunner(Protocol):
    """What runs a replay's forwards (``model_runner.ModelRunner``)."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one forward."""
        ...

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """How an answer changed."""

    first_token: int
    """Index of the first answer token whose id or logit differs."""
    largest_logit_gap: float
    """Over the chosen tokens that both have; infinite when the tokens differ."""


class Replayer:
    """Belongs to the engine thread."""

    def __init__(
        self,
        rate: float,
        runner: ReplayRunner,
        ledger: KVLedger,
        settings: SchedulerSettings,
        clock: Clock,
        scrub: Callable[[Extent], None],
    ) -> None:
        """Prepare replays.

        Args:
            rate: share of the answers, 0 to 1.
            runner: the engine's.
            ledger: the engine's.
            settings: the engine's.
            clock: source of time.
            scrub: zeroes an extent.
        """
        self._threshold = round(rate * _SHARES)
        self._runner = runner
        self._ledger = ledger
        self._settings = replace(settings, max_slots=1, reserve_context=False, keep_prefixes=False)
        self._clock = clock
        self._scrub = scrub
        self._next_id = -1
        self.num_replayed = 0
        self.num_violations = 0

    def is_chosen(self, request_id: str, question_index: int) -> bool:
        """Whether this question belongs to the share; the same on every node and in every attempt."""
        digest = sha256(f"{request_id}\0{question_index}".encode()).digest()
        return int.from_bytes(digest[:4], "little") < self._threshold

    def checked(self, events: list[ChannelEvent], ended: Sequence[Question]) -> list[ChannelEvent]:
        """The events, with an error in the place of each answer that a replay refutes."""
        refuted: dict[tuple[str, int], IsolationViolationError] = {}
        for question in ended:
            if self.is_chosen(*question.item.key):
                difference = self._replay(question)
                if difference is not None:
                    refuted[question.item.key] = _violation(question, difference)
        if not refuted:
            return events
        return [
            _refused(event, refuted[event.request_id, event.question_index])
            if isinstance(event, ChannelResult) and (event.request_id, event.question_index) in refuted
            else event
            for event in events
        ]

    def _replay(self, question: Question) -> Difference | None:
        """Compute the question alone; None when nothing differs or there is no room."""
        again = Question(
            sequence_id=self._next_id,
            item=replace(question.item, num_shared=0, time_budget_ms=_BUDGET_MS),
            attempt=question.attempt,
            published_s=self._clock.monotonic(),
            answer=AnswerText(NoText(), question.item.sampling),
            eos_ids=question.eos_ids,
        )
        self._next_id -= 1
        alone = Scheduler(self._settings, self._ledger, self._clock, self._scrub)
        alone.add(again)
        started = False
        while len(again.output_ids) < len(question.output_ids):
            plan = alone.schedule()
            if plan is None:
                break
            started = True
            alone.update(plan, self._runner.execute(plan))
        alone.cancel(*again.item.key)
        self._runner.drop(again.sequence_id)
        if not started:
            _LOG.info("no room to replay %s[%d]", *question.item.key)
            return None
        self.num_replayed += 1
        found = difference(question, again)
        self.num_violations += found is not None
        return found


def difference(one: Question, other: Question) -> Difference | None:
    """The first difference of two answers; None when tokens and chosen logits are equal, bit for bit."""
    if one.output_ids == other.output_ids and one.chosen_logits == other.chosen_logits:
        return None
    pairs = zip(one.output_ids, one.chosen_logits, other.output_ids, other.chosen_logits, strict=False)
    first, gap = min(len(one.output_ids), len(other.output_ids)), 0.0
    for index, (token, logit, other_token, other_logit) in reversed(list(enumerate(pairs))):
        if token != other_token:
            first, gap = index, float("inf")
        elif logit != other_logit:
            first, gap = index, max(gap, abs(logit - other_logit))
    return Difference(first, gap if one.output_ids == other.output_ids else float("inf"))


def _violation(question: Question, found: Difference) -> IsolationViolationError:
    request_id, index = question.item.key
    message = (
        f"isolation violated: asked alone again, queries[{index}] differs from token {found.first_token} on "
        f"(largest gap of a logit {found.largest_logit_gap:.3g}); the answer is withheld; run kev verify on this node"
    )
    _LOG.error("request %s: %s", request_id, message)
    return IsolationViolationError(message)


def _refused(result: ChannelResult, error: IsolationViolationError) -> ChannelResult:
    receipt = None if result.receipt is None else replace(result.receipt, verdict=Verdict.UNVERIFIED)
    return replace(
        result,
        finish_reason=FinishReason.ERROR,
        text="",
        token_ids=(),
        logprobs=None,
        receipt=receipt,
        error=error.info,
    )
