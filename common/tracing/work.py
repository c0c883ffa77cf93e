"""The spans of a question's way through the tiers: submit, queue, run, outcome.

Invariants and semantics: the span of the submission is the parent of the other three, which are recorded when they are
over, by whoever saw their end: the node queue and run, when it commits; the aggregator the outcome, when it tells it.
So they hold for a node that dies too: a new attempt is recorded by the node that commits. Traces are remembered by
request in the router and by question in the aggregator, the latest ``_MAX_KEPT`` of each.

Not here: how spans are kept (``common.tracing.otel``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from common.clock import SystemClock
from common.ports import Clock, Report, ReportState
from common.tracing.context import current_request_id, current_trace
from common.tracing.port import Attributes, SpanKind, Tracer
from common.types import ChannelEvent, ChannelResult, WorkItem
from common.watched_work import WorkWatcher

_MAX_KEPT = 10_000
_OLD_S = 60.0
"""An outcome that is told so late was told before, or nobody asked."""
_Key = TypeVar("_Key")


class WorkTraces(WorkWatcher):
    """The traces of the requests that pass through one process."""

    def __init__(self, tracer: Tracer, clock: Clock | None = None) -> None:
        self._tracer = tracer
        self._clock = clock or SystemClock()
        self._traces: OrderedDict[str, str] = OrderedDict()
        """By request that was submitted here."""
        self._outcomes: OrderedDict[tuple[str, int], str] = OrderedDict()
        """By question whose outcome was read and not told yet."""

    # ---- router

    @contextmanager
    def submission(self, request_id: str, num_questions: int) -> Iterator[None]:
        """Around the call that submits a request; what is published of it belongs to its trace, now or later."""
        attributes: Attributes = {"kev.request_id": request_id, "kev.num_questions": num_questions}
        about = current_request_id.set(request_id)
        try:
            with self._tracer.span("kev.submit", SpanKind.SERVER, attributes):
                if trace := current_trace.get():
                    _keep(self._traces, request_id, trace)
                yield
        finally:
            current_request_id.reset(about)

    def trace_of(self, item: WorkItem) -> str:
        """The traceparent that travels with an item, whoever publishes it; empty without one."""
        return self.of_request(item.request_id)

    def of_request(self, request_id: str) -> str:
        """The traceparent of a request that was submitted in this process; empty without one."""
        return self._traces.get(request_id, "")

    # ---- node

    def reported(self, report: Report, state: ReportState) -> None:
        """Progress or the outcome was reported, or why not."""
        result = report.outcome
        if result is None or state is not ReportState.COMMITTED:
            return
        trace = report.lease.trace or self.of_request(result.request_id)  # in one process nothing carries it
        if not trace:
            return
        attributes: Attributes = {
            "kev.request_id": result.request_id,
            "kev.question_index": result.question_index,
            "kev.channel_id": result.channel_id,
            "kev.attempt": result.attempt,
            "kev.node_id": result.node_id,
        }
        began_s = result.finished_at if result.started_at is None else result.started_at
        published_s = began_s - result.queued_ms / 1000
        self._tracer.record("kev.queue", trace, published_s, began_s, attributes)
        if result.started_at is None:
            return
        ran: Attributes = {
            **attributes,
            **_ending(result),
            "kev.slot": result.slot,
            "kev.prompt_tokens": result.num_prompt_tokens,
            "kev.cached_tokens": result.num_cached_tokens,
            "kev.tokens": len(result.token_ids),
            **({} if result.first_token_ms is None else {"kev.first_token_ms": round(result.first_token_ms)}),
        }
        self._tracer.record("kev.run", trace, began_s, max(began_s, result.finished_at), ran)

    # ---- aggregator

    def arrived(self, event: ChannelEvent, trace: str) -> None:
        """An event of a node was read, perhaps not for the first time."""
        if trace and isinstance(event, ChannelResult):
            _keep(self._outcomes, event.key, trace)

    def told(self, outcome: ChannelResult) -> None:
        """An outcome is told to those who asked; its span is the way from the node."""
        trace = self._outcomes.pop(outcome.key, "") or self.of_request(outcome.request_id)
        now_s = self._clock.time()
        if not trace or now_s - outcome.finished_at > _OLD_S:
            return
        attributes: Attributes = {
            "kev.request_id": outcome.request_id,
            "kev.question_index": outcome.question_index,
            "kev.attempt": outcome.attempt,
            **_ending(outcome),
        }
        self._tracer.record("kev.outcome", trace, min(outcome.finished_at, now_s), now_s, attributes)


def _keep(book: OrderedDict[_Key, str], key: _Key, trace: str) -> None:
    book[key] = trace
    while len(book) > _MAX_KEPT:
        book.popitem(last=False)


def _ending(result: ChannelResult) -> Attributes:
    ending = {"kev.finish_reason": result.finish_reason.value}
    return ending if result.error is None else {**ending, "kev.error_reason": result.error.reason}
