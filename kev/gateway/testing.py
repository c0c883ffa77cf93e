"""A backend without a model, for tests of HTTP clients and of the gateway itself.

Invariants and semantics: requests are checked by the same rules as in production. Each question is answered at once
with scripted pieces of text, or stays running until ``finish`` is called; ``num_running`` counts the slots in use.

Not here: routing, timing, tokens; every number in a result is made up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import DeadlineExceededError, KevError, RequestConflictError, RequestNotFoundError
from common.request import RequestRules, parse_request
from common.types import (
    ChannelSnapshot,
    EngineStats,
    FinishReason,
    IsolationLevel,
    IsolationReport,
    NodeStats,
    Receipt,
    RequestSpec,
    RequestState,
    RequestView,
    Result,
    RouterStats,
    Strategy,
    StreamEvent,
    StreamEventType,
    Verdict,
)
from common.wakeup import WakeUp

Script = Callable[[str], Sequence[str] | None]
"""Text of a question to the pieces of its answer; ``None`` leaves it running."""


def echo(question: str) -> Sequence[str]:
    """Answer with the question, in two pieces."""
    middle = len(question) // 2
    return question[:middle], question[middle:]


def silent(question: str) -> None:
    """Leave the question running."""


@dataclass(slots=True)
class _Request:
    spec: RequestSpec
    events: list[StreamEvent] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)

    @property
    def state(self) -> RequestState:
        if len(self.results) < len(self.spec.questions):
            return RequestState.PENDING
        answered = sum(result.finish_reason is FinishReason.STOP for result in self.results.values())
        if answered == len(self.results):
            return RequestState.COMPLETE
        return RequestState.PARTIAL if answered else RequestState.FAILED


class ScriptedBackend:
    """Has the methods of ``kev.AsyncEngine``; see the module.

    Attributes:
        submitted: every accepted request, in order.
        cancelled: ids of requests that were withdrawn, in order.
        submit_error: raised by the next submissions, if set.
        stream_error: raised by streams instead of ``done``, if set.
        not_ready: raised by ``ready``, if set.
        closed: whether ``close`` was called.
    """

    def __init__(self, script: Script = echo, rules: RequestRules | None = None) -> None:
        self.submitted: list[RequestSpec] = []
        self.cancelled: list[str] = []
        self.submit_error: Exception | None = None
        self.stream_error: Exception | None = None
        self.not_ready: KevError | None = None
        self.closed = False
        self._script = script
        self._rules = rules or RequestRules()
        self._requests: dict[str, _Request] = {}
        self._changed = WakeUp()

    @property
    def num_running(self) -> int:
        """Questions without an outcome."""
        return sum(len(request.spec.questions) - len(request.results) for request in self._requests.values())

    async def submit(self, queries: Any, /, **options: Any) -> str:
        """Check and accept; questions with a script are answered before this returns."""
        if self.submit_error is not None:
            raise self.submit_error
        spec = parse_request(queries, options, self._rules)
        known = self._requests.get(spec.request_id)
        if known is not None:
            if known.spec.content_digest != spec.content_digest:
                raise RequestConflictError(f"request id {spec.request_id} is taken by a request with other content")
            return spec.request_id
        self._requests[spec.request_id] = _Request(spec)
        self.submitted.append(spec)
        for index, question in enumerate(spec.questions):
            self._emit(spec.request_id, StreamEventType.STARTED, index)
            pieces = self._script(question.text)
            if pieces is not None:
                self.finish(spec.request_id, index, pieces)
        return spec.request_id

    def say(self, request_id: str, question_index: int, text: str) -> None:
        """Let a question produce text."""
        self._emit(request_id, StreamEventType.DELTA, question_index, text=text)

    def finish(
        self,
        request_id: str,
        question_index: int,
        pieces: Sequence[str] = (),
        finish_reason: FinishReason = FinishReason.STOP,
    ) -> None:
        """Give a question its outcome."""
        for piece in pieces:
            self.say(request_id, question_index, piece)
        request = self._requests[request_id]
        result = _result(request.spec, question_index, "".join(pieces), finish_reason, len(pieces))
        request.results[question_index] = result
        self._emit(request_id, StreamEventType.RESULT, question_index, result=result)
        if request.state is not RequestState.PENDING:
            self._emit(request_id, StreamEventType.DONE, None, state=request.state)

    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        """All results, once they are there."""
        request = self._find(request_id)
        while request.state is RequestState.PENDING:
            if not await self._changed.wait(timeout):
                raise DeadlineExceededError(f"request {request_id} has no outcome after {timeout} s; it goes on")
        return list((await self.poll(request_id)).results)

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands."""
        request = self._find(request_id)
        return RequestView(
            request_id=request_id,
            state=request.state,
            mode=request.spec.mode,
            num_questions=len(request.spec.questions),
            results=tuple(result for _, result in sorted(request.results.items())),
        )

    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        """Events from an index on."""
        request = self._find(request_id)
        index = from_event_index
        while True:
            while index < len(request.events):
                event = request.events[index]
                if event.type is StreamEventType.DONE and self.stream_error is not None:
                    raise self.stream_error
                yield event
                index += 1
            if request.state is not RequestState.PENDING:
                return
            await self._changed.wait()

    async def cancel(self, request_id: str) -> int:
        """Withdraw what is still running."""
        request = self._find(request_id)
        running = [index for index in range(len(request.spec.questions)) if index not in request.results]
        self.cancelled.append(request_id)
        for index in running:
            self.finish(request_id, index, finish_reason=FinishReason.CANCELLED)
        return len(running)

    async def isolation(self) -> IsolationReport:
        """A made-up report."""
        return IsolationReport(
            levels=((IsolationLevel.STRICT, Verdict.BITWISE), (IsolationLevel.LOOSE, Verdict.UNVERIFIED)),
            backend="scripted",
            precision="fp32",
            num_threads=1,
            decode_rows=8,
            prefill_rows=256,
            row_independent=True,
            position_independent=True,
            prefix_independent=True,
            fingerprint="scripted",
        )

    async def channels(self) -> list[ChannelSnapshot]:
        """One channel with everything in it."""
        num_total = sum(len(spec.questions) for spec in self.submitted)
        return [
            ChannelSnapshot(
                channel_id=0, num_queued=self.num_running, num_total=num_total, num_diverted=0, breaker_open=False
            )
        ]

    async def stats(self) -> EngineStats:
        """Counts of requests and questions; the rest is zero."""
        num_questions = sum(len(spec.questions) for spec in self.submitted)
        router = RouterStats(
            num_requests=len(self.submitted),
            num_questions=num_questions,
            num_rejected=0,
            num_overflow=0,
            num_removed_chars=0,
            bucket_counts=((0, num_questions),),
        )
        node = NodeStats(
            node_id="scripted",
            num_running=self.num_running,
            num_waiting=0,
            max_slots=8,
            num_steps=0,
            num_prompt_tokens=0,
            num_completion_tokens=0,
            kv_bytes_used=0,
            kv_bytes_total=0,
            num_prefixes=0,
            alive=True,
        )
        return EngineStats(router=router, node=node)

    async def ready(self) -> None:
        """Ready, unless told otherwise."""
        if self.not_ready is not None:
            raise self.not_ready

    async def close(self) -> None:
        """Remember that it was called."""
        self.closed = True

    def _find(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise RequestNotFoundError("no request with this id is known, or its results have expired; submit it again")
        return request

    def _emit(self, request_id: str, kind: StreamEventType, question_index: int | None, **content: Any) -> None:
        events = self._requests[request_id].events
        channel_id = None if question_index is None else question_index
        events.append(
            StreamEvent(
                type=kind,
                request_id=request_id,
                event_index=len(events),
                question_index=question_index,
                channel_id=channel_id,
                **content,
            )
        )
        self._changed.wake_all()


def _result(spec: RequestSpec, question_index: int, text: str, finish_reason: FinishReason, num_tokens: int) -> Result:
    ran = finish_reason is not FinishReason.CANCELLED
    return Result(
        request_id=spec.request_id,
        question_index=question_index,
        channel_id=question_index,
        slot=question_index if ran else -1,
        text=text,
        finish_reason=finish_reason,
        tokens=num_tokens,
        prompt_tokens=1,
        elapsed_ms=2,
        queued_ms=1,
        first_token_ms=1 if ran else None,
        started_at=1.0 if ran else None,
        finished_at=2.0,
        hash_bucket=question_index,
        strategy=Strategy.SEMANTIC_HASH,
        attempt=1,
        node_id="scripted",
        isolation=Receipt(level=spec.isolation, verdict=Verdict.BITWISE, mask_digest="00" * 32),
    )
