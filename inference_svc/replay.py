"""Replay: a share of the answers is computed again, alone, and compared with what the question got in company.

Invariants and semantics: which questions are replayed depends on their ids alone. A replay has forwards of its own, at
level strict, over free KV of the same arena. As many as there are slots go on side by side, each with one forward after
each step of the engine: neighbours go on meanwhile, and under load their steps wait for what the share costs, instead
of answers for their replays. Nothing of a replayed question's answer, neither text nor outcome, leaves before the
replay has ended. Tokens and the logits of the chosen tokens are compared bit for bit; an answer that differs is
replaced by an error and counted. A replay that finds no room, fails by itself or outlives the question's budget is
skipped, and counted as that: the answer then goes out as it is.

Not here: the first computation (``engine_core``), proof without traffic (``verify``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from common.errors import EngineDeadError, IsolationViolationError
from common.ports import Clock
from common.types import ChannelEvent, ChannelResult, ChannelStarted, FinishReason, Verdict
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


@dataclass(slots=True)
class _Run:
    """A replay on its way."""

    question: Question
    again: Question
    scheduler: Scheduler
    started: bool = False
    failed: bool = False

    @property
    def complete(self) -> bool:
        """As many tokens as the answer has."""
        return len(self.again.output_ids) >= len(self.question.output_ids)


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
        self._withheld: dict[tuple[str, int], list[ChannelEvent]] = {}
        self._queue: deque[Question] = deque()
        self._runs: list[_Run] = []
        self._max_runs = settings.max_slots
        self.num_replayed = 0
        self.num_skipped = 0
        self.num_violations = 0

    @property
    def has_work(self) -> bool:
        """A replay is on its way or waits."""
        return bool(self._runs or self._queue)

    def is_chosen(self, request_id: str, question_index: int) -> bool:
        """Whether this question belongs to the share; the same on every node and in every attempt."""
        digest = sha256(f"{request_id}\0{question_index}".encode()).digest()
        return int.from_bytes(digest[:4], "little") < self._threshold

    def hold_back(self, events: Sequence[ChannelEvent], ended: Sequence[Question]) -> list[ChannelEvent]:
        """What may go out now: all but the answers that are to be replayed.

        Args:
            events: of one step, in order.
            ended: questions that ended by their own rules in it; others (cancelled, failed) are not replayed.
        """
        self._queue.extend(question for question in ended if self.is_chosen(*question.item.key))
        to_replay = {question.item.key for question in ended}
        passing: list[ChannelEvent] = []
        for event in events:
            key = event.request_id, event.question_index
            if isinstance(event, ChannelStarted) or not self.is_chosen(*key):
                passing.append(event)
                continue
            self._withheld.setdefault(key, []).append(event)
            if isinstance(event, ChannelResult) and key not in to_replay:
                passing += self._withheld.pop(key)
        return passing

    def advance(self) -> list[ChannelEvent]:
        """One forward of each replay on its way; what they release.

        Raises:
            EngineDeadError: no forward can run any more.
        """
        while self._queue and len(self._runs) < self._max_runs:
            self._runs.append(self._begun(self._queue.popleft()))
        events: list[ChannelEvent] = []
        for run in list(self._runs):
            if self._clock.monotonic() >= run.question.deadline_s:
                run.failed = True
            elif not run.complete and (self._step(run) or self._waits_for_room(run)):
                continue
            events += self._ended(run)
        return events

    def give_up(self) -> list[ChannelEvent]:
        """Release every answer without its replay: the engine ends."""
        events: list[ChannelEvent] = []
        for run in list(self._runs):
            run.failed = True
            events += self._ended(run)
        self.num_skipped += len(self._queue)
        self._queue.clear()
        for withheld in self._withheld.values():
            events += withheld
        self._withheld.clear()
        return events

    def _begun(self, question: Question) -> _Run:
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
        return _Run(question, again, alone)

    def _step(self, run: _Run) -> bool:
        """One forward; False when there is none left."""
        plan = run.scheduler.schedule()
        if plan is None:
            return False
        run.started = True
        try:
            output = self._runner.execute(plan)
        except EngineDeadError:
            raise
        except Exception:
            _LOG.exception("a replay of %s[%d] failed", *run.question.item.key)
            run.failed = True
            return False
        run.failed = bool(output.errors)
        run.scheduler.update(plan, output)
        return not run.failed and not run.complete

    def _waits_for_room(self, run: _Run) -> bool:
        """It has no room yet, and another replay will give some back."""
        return not run.started and any(other.started for other in self._runs)

    def _ended(self, run: _Run) -> list[ChannelEvent]:
        """Free what the replay holds, and release the answer or an error in its place."""
        self._runs.remove(run)
        key = run.question.item.key
        run.scheduler.cancel(*key)
        self._runner.drop(run.again.sequence_id)
        withheld = self._withheld.pop(key, [])
        if run.failed or not run.started:
            self.num_skipped += 1
            _LOG.info("%s[%d] was not replayed: no room, no time, or the replay failed", *key)
            return withheld
        self.num_replayed += 1
        found = difference(run.question, run.again)
        if found is None:
            return withheld
        self.num_violations += 1
        error = _violation(run.question, found)
        return [_refused(event, error) for event in withheld if isinstance(event, ChannelResult)]


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
