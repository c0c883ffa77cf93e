r"""Gathers the outcomes of one request: a pure state machine, one per request.

Invariants and semantics: each question gets exactly one outcome, the first one placed, whether it comes from a node
or is a placeholder for a timeout or a cancellation; later ones are counted with their attempt and change nothing, and
one that comes again is not even counted. A placeholder is only proposed here: it is placed when it comes back as an
event, because something else may have come first. The same events in the same order make the same log, so a reader may
go on at another aggregator. A question's events touch that question only. The event log is numbered from 0 without
gaps; per question it holds ``started`` (once, before any text), ``delta``, ``attempt_changed`` and exactly one
``result``, and it ends with one ``done`` for the request. Reading rule: ``delta`` appends its text,
``attempt_changed`` replaces the question's whole text by its own (equal to what was delivered when a new attempt
begins; the new attempt's text where it differs); read so, the text equals ``result.text`` at the ``result`` event.

    question:  waiting --started/delta--> running --outcome--> ended
                  \------------outcome-----------------------/

Not here: clocks (``now`` is passed in), listeners, waiting (``service``); how attempts are joined (``transcript``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from aggregator_svc.audit import Moment, build_result
from aggregator_svc.transcript import Change, Transcript
from common.errors import DeadlineExceededError, InvariantError
from common.types import (
    AggregateMode,
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    ErrorInfo,
    FinishReason,
    QuestionRecord,
    RequestRecord,
    RequestState,
    RequestView,
    Result,
    StreamEvent,
    StreamEventType,
)

_ANSWERS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_TIMEOUTS = frozenset({FinishReason.TIMEOUT_QUEUED, FinishReason.TIMEOUT_RUNNING})


@dataclass(slots=True, eq=False)
class _Question:
    record: QuestionRecord
    deadline_s: float
    transcript: Transcript = field(default_factory=Transcript)
    started: ChannelStarted | None = None
    """Of the newest attempt."""
    began: Moment | None = None
    """When the newest attempt was first heard of."""
    first_text: Moment | None = None
    """When its first text came."""
    result: Result | None = None
    outcome: ChannelResult | None = None
    """What the result was made of."""

    @property
    def channel_id(self) -> int:
        return self.record.route.channel_id if self.started is None else self.started.channel_id


class Collector:
    """The outcomes and the event log of one request."""

    def __init__(self, record: RequestRecord, accepted: Moment) -> None:
        """Start with every question open.

        Raises:
            InvariantError: the record has no questions, or an index twice.
        """
        self.record = record
        self._accepted = accepted
        self._questions = {
            question.question_index: _Question(
                record=question, deadline_s=accepted.monotonic_s + question.timeout_ms / 1000
            )
            for question in record.questions
        }
        if not record.questions or len(self._questions) != len(record.questions):
            raise InvariantError(f"request {record.request_id!r} was registered with no or repeated question indexes")
        self._results: list[Result] = []
        self._events: list[StreamEvent] = []
        self._late: Counter[tuple[int, int]] = Counter()

    # ---- what there is

    @property
    def state(self) -> RequestState:
        """Lifecycle as the caller sees it."""
        if len(self._results) < len(self._questions):
            return RequestState.PENDING
        num_answers = sum(result.finish_reason in _ANSWERS for result in self._results)
        if num_answers == len(self._results):
            return RequestState.COMPLETE
        return RequestState.PARTIAL if num_answers else RequestState.FAILED

    @property
    def done(self) -> bool:
        """Every question has its outcome."""
        return len(self._results) == len(self._questions)

    @property
    def num_done(self) -> int:
        """Questions that have their outcome."""
        return len(self._results)

    @property
    def events(self) -> Sequence[StreamEvent]:
        """The event log; position = ``event_index``. It only grows."""
        return self._events

    @property
    def late(self) -> dict[tuple[int, int], int]:
        """Other outcomes that came second: (question_index, attempt) to how many."""
        return dict(self._late)

    def outcomes(self) -> tuple[ChannelResult, ...]:
        """What the results were made of, in the order of the questions."""
        return tuple(question.outcome for question in self._questions.values() if question.outcome is not None)

    @property
    def next_deadline_s(self) -> float | None:
        """Monotonic seconds at which an open question is due."""
        return min((question.deadline_s for question in self._open()), default=None)

    def result_of(self, question_index: int) -> Result | None:
        """The outcome of a question; None while it has none.

        Raises:
            InvariantError: the request has no such question.
        """
        return self._question(question_index).result

    def results(self) -> tuple[Result, ...]:
        """The outcomes there are, in the order of the request's mode."""
        match self.record.mode:
            case AggregateMode.SLOT_MAP:
                return tuple(sorted(self._results, key=lambda result: result.question_index))
            case AggregateMode.PRIORITY:
                return tuple(sorted(self._results, key=lambda result: -result.priority))
            case AggregateMode.SEQ_APPEND:
                return tuple(self._results)

    def view(self) -> RequestView:
        """The request as it stands."""
        return RequestView(
            request_id=self.record.request_id,
            state=self.state,
            mode=self.record.mode,
            num_questions=len(self._questions),
            results=self.results(),
        )

    # ---- what happens

    def start(self, event: ChannelStarted, now: Moment) -> bool:
        """A node gave the question a slot. False: the event is out of date.

        Raises:
            InvariantError: the request has no such question.
        """
        question = self._question(event.question_index)
        if question.result is not None or event.attempt < question.transcript.attempt:
            return False
        self._begin(question, event.attempt, event.channel_id, now)
        question.started = event
        return True

    def append(self, delta: ChannelDelta, now: Moment) -> bool:
        """New text of a question. False: it belongs to a former attempt or an ended question.

        Raises:
            InvariantError: the request has no such question.
        """
        question = self._question(delta.question_index)
        if question.result is not None or delta.attempt < question.transcript.attempt:
            return False
        self._begin(question, delta.attempt, delta.channel_id, now)
        question.first_text = question.first_text or now
        self._tell(question, delta.channel_id, question.transcript.add(delta.seq, delta.text, delta.num_tokens))
        return True

    def place(self, outcome: ChannelResult, now: Moment) -> bool:
        """The outcome of a question, whoever it comes from. False: it has one already; another one was counted as late.

        Raises:
            InvariantError: the request has no such question.
        """
        question = self._question(outcome.question_index)
        if question.result is not None:
            if outcome != question.outcome:
                self._late[outcome.question_index, outcome.attempt] += 1
            return False
        received = outcome
        if outcome.finish_reason in _TIMEOUTS and outcome.error is None:
            # A node that notices the deadline first says so in the same words.
            outcome = replace(outcome, error=_out_of_time(question, outcome.finish_reason).info)
        transcript = question.transcript
        text = transcript.final_text(outcome.text, is_answer=outcome.finish_reason in _ANSWERS)
        result = build_result(
            self.record,
            question.record,
            outcome,
            text=text,
            num_streamed_tokens=transcript.num_tokens,
            accepted=self._accepted,
            now=now,
        )
        if text or transcript.attempt:
            self._begin(question, outcome.attempt, outcome.channel_id, now)
        self._tell(question, outcome.channel_id, transcript.settle(text))
        question.result, question.outcome = result, received
        self._results.append(result)
        self._log(StreamEventType.RESULT, question, outcome.channel_id, result=result)
        if self.done:
            self._log(StreamEventType.DONE, state=self.state)
        return True

    def due(self, now: Moment, *, again_after_s: float) -> tuple[ChannelResult, ...]:
        """Placeholders for the open questions whose deadline has come, to be settled.

        Those that are still open ``again_after_s`` seconds later are due again.
        """
        due = [question for question in self._open() if question.deadline_s <= now.monotonic_s]
        for question in due:
            question.deadline_s = now.monotonic_s + again_after_s
        return tuple(self._placeholder(question, *_timed_out(question), now) for question in due)

    def cancelled(self, now: Moment, error: ErrorInfo | None = None) -> tuple[ChannelResult, ...]:
        """Placeholders for all open questions, to be settled."""
        return tuple(self._placeholder(question, FinishReason.CANCELLED, error, now) for question in self._open())

    def has_outcomes(self, question_indexes: Iterable[int]) -> bool:
        """Whether all these questions have ended.

        Raises:
            InvariantError: the request has no such question.
        """
        return all(self._question(index).result is not None for index in question_indexes)

    # ---- inside

    def _open(self) -> list[_Question]:
        return [question for question in self._questions.values() if question.result is None]

    def _question(self, question_index: int) -> _Question:
        question = self._questions.get(question_index)
        if question is None:
            raise InvariantError(f"request {self.record.request_id!r} has no question {question_index}")
        return question

    def _begin(self, question: _Question, attempt: int, channel_id: int, now: Moment) -> None:
        is_first = question.transcript.attempt == 0
        if not question.transcript.begin(attempt):
            return
        question.began, question.started, question.first_text = now, None, None
        if is_first:
            self._log(StreamEventType.STARTED, question, channel_id)
        else:
            self._log(StreamEventType.ATTEMPT_CHANGED, question, channel_id, text=question.transcript.delivered)

    def _tell(self, question: _Question, channel_id: int, change: Change | None) -> None:
        if change is not None:
            event_type, text = change
            self._log(event_type, question, channel_id, text=text)

    def _log(
        self,
        event_type: StreamEventType,
        question: _Question | None = None,
        channel_id: int | None = None,
        *,
        text: str = "",
        result: Result | None = None,
        state: RequestState | None = None,
    ) -> None:
        self._events.append(
            StreamEvent(
                type=event_type,
                request_id=self.record.request_id,
                event_index=len(self._events),
                question_index=None if question is None else question.record.question_index,
                channel_id=channel_id,
                text=text,
                result=result,
                state=state,
            )
        )

    def _placeholder(
        self, question: _Question, finish_reason: FinishReason, error: ErrorInfo | None, now: Moment
    ) -> ChannelResult:
        started, began = question.started, question.began
        waited_until = now if began is None else began
        first_text, accepted_s = question.first_text, self._accepted.monotonic_s
        return ChannelResult(
            request_id=self.record.request_id,
            question_index=question.record.question_index,
            channel_id=question.channel_id,
            finish_reason=finish_reason,
            slot=-1 if started is None else started.slot,
            text=question.transcript.delivered,
            num_prompt_tokens=question.record.num_prompt_tokens,
            num_truncated=question.record.num_truncated,
            queued_ms=(waited_until.monotonic_s - accepted_s) * 1000,
            first_token_ms=None if first_text is None else (first_text.monotonic_s - accepted_s) * 1000,
            started_at=None if began is None else began.unix_s,
            finished_at=now.unix_s,
            attempt=max(1, question.transcript.attempt),
            node_id="" if started is None else started.node_id,
            error=error,
        )


def _timed_out(question: _Question) -> tuple[FinishReason, ErrorInfo]:
    running = question.transcript.attempt > 0
    reason = FinishReason.TIMEOUT_RUNNING if running else FinishReason.TIMEOUT_QUEUED
    return reason, _out_of_time(question, reason).info


def _out_of_time(question: _Question, reason: FinishReason) -> DeadlineExceededError:
    record = question.record
    running = reason is FinishReason.TIMEOUT_RUNNING
    return DeadlineExceededError(
        f"question {record.question_index} was still {'running' if running else 'waiting'} on channel "
        f"{question.channel_id} when its {record.timeout_ms} ms were used up; give it a larger timeout_ms"
        + (" or fewer max_tokens" if running else " or lower the load")
    )
