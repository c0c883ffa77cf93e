"""The aggregator as its callers see it: register, poll, wait, stream, cancel.

Invariants and semantics: every registered question gets exactly one terminal outcome, soon after its deadline at the
latest, also when ``run`` ends and nobody could take over (then cancelled), so that no waiter waits for ever. Timeouts
and cancellations are settled in the result stream, where they compete with what nodes commit; a request changes only
by events, in their order, so that another aggregator tells exactly the same. Each outcome reaches every listener once,
before waiters and readers see it. Waiters and stream readers are independent: each reader has its own position in the
request's event log, and leaving early leaves nothing behind. Requests that were registered elsewhere are taken over
with their past. One event loop; state changes only between two
awaits.

Not here: what an event does to a request (``collector``), what is kept how long (``store``), how requests come from
elsewhere (``takeover``), gRPC (``servicer``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from aggregator_svc.gathering import Gathering
from aggregator_svc.settings import AggregatorSettings
from aggregator_svc.store import RequestStore, StoredRequest
from aggregator_svc.takeover import Takeover
from common.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    KevError,
    RequestNotFoundError,
)
from common.ports import Clock, RequestSource, ResultStream, Withdrawn, WorkStreams
from common.types import (
    ChannelDelta,
    ChannelEvent,
    ChannelResult,
    ChannelStarted,
    RequestRecord,
    RequestView,
    Result,
    StreamEvent,
    StreamEventType,
)
from common.wording import is_a, shown

_READ_MAX_EVENTS = 256
_READ_WAIT_S = 5.0
_PAUSE_S = 0.5
_SETTLE_AGAIN_S = 5.0
"""A question whose outcome was settled and has not come back by then is settled again."""
_EVENT_TYPES = frozenset({ChannelStarted, ChannelDelta, ChannelResult})
_LONGEST_WAIT_S = 1e9
"""Every question has its outcome long before; larger integers do not fit into a float."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorCounters:
    """Counters since start, and what is kept now."""

    num_open: int
    """Requests kept with questions that have no outcome."""
    num_kept: int
    """Requests kept, with those that have ended."""
    num_outcomes: int
    """Terminal outcomes, placeholders included."""
    num_late: int
    """Outcomes that came after the first one of their question."""
    num_unknown: int
    """Events of requests that are not kept (any more)."""
    num_malformed: int
    """Events that made no sense and were dropped."""


class AggregatorService:
    """``RequestRegistry`` for the router, and what the surfaces call."""

    def __init__(
        self,
        *,
        results: ResultStream,
        work: WorkStreams,
        clock: Clock,
        settings: AggregatorSettings,
        source: RequestSource | None = None,
    ) -> None:
        """Compose the service; nothing runs before ``run``.

        Args:
            results: where the nodes' events arrive.
            work: where work of withdrawn questions is cancelled.
            clock: measures deadlines and stamps placeholders.
            settings: bounds of the store.
            source: where requests are found that were registered elsewhere, before a restart too; None when all come
                by ``register``.
        """
        self._results = results
        self._work = work
        self._result_ttl_s = settings.result_ttl_s
        self._store = RequestStore(max_requests=settings.max_requests, result_ttl_s=settings.result_ttl_s)
        self._gathering = Gathering(self._store, clock)
        self._takeover = None if source is None else Takeover(source, results, self._gathering)
        self._draining = False
        self._num_unknown = 0

    @property
    def counters(self) -> AggregatorCounters:
        """Counters since start, and what is kept now."""
        return AggregatorCounters(
            num_open=len(self._store.running()),
            num_kept=len(self._store),
            num_outcomes=self._gathering.num_outcomes,
            num_late=self._gathering.num_late,
            num_unknown=self._num_unknown,
            num_malformed=self._gathering.num_malformed,
        )

    def add_listener(self, listener: Callable[[ChannelResult], None]) -> None:
        """Call ``listener`` once per question, at its terminal outcome; what it raises is logged only."""
        self._gathering.add_listener(listener)

    def begin_drain(self) -> None:
        """Accept no new requests; those registered go on."""
        self._draining = True

    # ---- the router's side (RequestRegistry)

    async def register(self, record: RequestRecord) -> bool:
        """Expect the outcomes of a request; its time budgets start now.

        Returns:
            False when exactly this request is already there.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
            DrainingError: shutting down.
            QueueFullError: as many requests as can be kept are running.
        """
        now = self._gathering.drop_expired()
        if self._store.holds(record.request_id, record.content_digest):
            return False
        if self._draining:
            raise DrainingError("Kev is shutting down and accepts no new requests; send it to another instance")
        self._gathering.keep(Collector(record, now), now)
        return True

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        """Whether exactly this request is registered.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
        """
        self._gathering.drop_expired()
        return self._store.holds(request_id, content_digest)

    async def unregistered(self, request_ids: Sequence[str]) -> list[str]:
        """None: nothing is lost here."""
        return []

    async def restore(self, record: RequestRecord, age_ms: int) -> None:
        """Does nothing: nothing is lost here."""

    async def withdraw(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete and forget it, so that its id can be used again."""
        await self._work.cancel(request_id)
        self._gathering.forget(request_id)

    # ---- the caller's side

    async def load(self, request_id: str) -> None:
        """Have the request at hand, taking it over from where it was registered; before ``stream`` in that case.

        Raises:
            RequestNotFoundError: unknown, or its results have expired.
            StoreUnavailableError: where it may be registered cannot be asked now, or has just lost what it knew.
        """
        self._gathering.drop_expired()
        if self._takeover is not None and is_a(request_id, str) and self._store.find(request_id) is None:
            await self._takeover.take(request_id)
        self._get(request_id)

    def tenant_of(self, request_id: str) -> str:
        """Whose a request at hand is.

        Raises:
            RequestNotFoundError: it is not at hand.
        """
        return self._get(request_id).collector.record.tenant

    def result_of(self, request_id: str, question_index: int) -> Result | None:
        """The outcome of a question; None while it has none, or its request is not at hand."""
        stored = self._store.find(request_id)
        return None if stored is None else stored.collector.result_of(question_index)

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands.

        Raises:
            RequestNotFoundError: unknown, or its results have expired.
        """
        await self.load(request_id)
        return self._get(request_id).collector.view()

    async def wait(self, request_id: str, timeout_s: float | None) -> RequestView:
        """The request once every question has its outcome; any number of callers may wait.

        Args:
            request_id: a registered request.
            timeout_s: most seconds to wait; ``None`` waits for as long as the questions' own budgets last.

        Raises:
            RequestNotFoundError: unknown, or its results have expired.
            DeadlineExceededError: ``timeout_s`` passed first; the request goes on.
            InvalidRequestError: ``timeout_s`` is negative or not a number.
        """
        if timeout_s is not None and not (_is_number(timeout_s) and timeout_s >= 0):
            raise InvalidRequestError.of("timeout", f"{shown(timeout_s)} is not a number of seconds from 0 on, or null")
        await self.load(request_id)
        stored = self._get(request_id)
        collector = stored.collector
        try:
            async with asyncio.timeout(None if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)):
                await stored.finished.wait()
        except TimeoutError:
            if not collector.done:
                raise DeadlineExceededError(
                    f"{collector.num_done} of {len(collector.record.questions)} questions of request {request_id!r} "
                    f"have an outcome after waiting {timeout_s:g} s; the request goes on: wait again, or poll"
                ) from None
        return collector.view()

    def stream(self, request_id: str, from_event_index: int = 0) -> AsyncGenerator[StreamEvent, None]:
        """The request's events from ``from_event_index`` on, past ones first; ends after ``done``.

        Any number of readers; a slow one holds up nobody. Leaving early needs no clean-up.

        Raises:
            RequestNotFoundError: unknown, or its results have expired (at once, not at the first event).
            InvalidRequestError: the index is negative.
        """
        if not is_a(from_event_index, int) or from_event_index < 0:
            raise InvalidRequestError.of("from_event_index", f"{shown(from_event_index)} is not an integer from 0 on")
        self._gathering.drop_expired()
        return _read_log(self._get(request_id), from_event_index)

    async def cancel(self, request_id: str) -> int:
        """Withdraw every question that has no outcome yet; outcomes that are there stay. Returns when all have one.

        Returns:
            How many questions were withdrawn.

        Raises:
            RequestNotFoundError: unknown, or its results have expired.
            StoreUnavailableError: nothing can be withdrawn now.
        """
        await self.load(request_id)
        stored = self._get(request_id)
        placeholders = stored.collector.cancelled(self._gathering.now())
        if not placeholders:
            return 0
        withdrawn = await self._settle(stored, placeholders)
        while not stored.collector.has_outcomes(outcome.question_index for outcome in placeholders):
            if not await stored.progressed.wait(_SETTLE_AGAIN_S):
                await self._catch_up(stored)
        return len(withdrawn)

    # ---- the loops

    async def run(self) -> None:
        """Consume events and keep deadlines until cancelled.

        Then every open question ends as cancelled, unless another aggregator can take the requests over.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._consume(), name="aggregator-consume")
                group.create_task(self._keep_deadlines(), name="aggregator-deadlines")
                if self._takeover is not None:
                    group.create_task(self._takeover.run(), name="aggregator-takeover")
        finally:
            self.begin_drain()
            if self._takeover is None:
                self._end_open()

    async def _consume(self) -> None:
        num_gaps = self._results.num_gaps
        while True:
            try:
                events = await self._results.read(_READ_MAX_EVENTS, _READ_WAIT_S)
            except KevError as error:
                if not error.retryable:
                    raise
                _log.warning("events cannot be read; trying again: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if self._results.num_gaps != num_gaps:
                num_gaps = self._results.num_gaps
                await self._catch_up(*self._store.running())
            now = self._gathering.now()
            for event in events:
                self._apply(event, now)
            # A backlog must not keep the loop from everybody else.
            await asyncio.sleep(0)

    def _apply(self, event: ChannelEvent | Withdrawn, now: Moment) -> None:
        if isinstance(event, Withdrawn):
            self._forget(event.request_id)
            return
        if type(event) not in _EVENT_TYPES:
            self._gathering.drop(event)
            return
        stored = self._store.find(event.request_id)
        if stored is not None:
            self._gathering.feed(stored, event, now)
        elif self._takeover is not None:
            self._takeover.meet(event)
        else:
            self._num_unknown += 1

    def _forget(self, request_id: str) -> None:
        self._gathering.forget(request_id)
        if self._takeover is not None:
            self._takeover.forget(request_id)

    async def _keep_deadlines(self) -> None:
        while True:
            now = self._gathering.drop_expired()
            for stored, placeholders in self._store.due(now, again_after_s=_SETTLE_AGAIN_S):
                try:
                    await self._settle(stored, placeholders)
                except KevError:
                    _log.exception("could not settle %d timeouts; trying again", len(placeholders))
            next_due_s = self._store.next_due_s()
            left_s = None if next_due_s is None else max(0.0, next_due_s - self._gathering.now().monotonic_s)
            await self._gathering.due_sooner.wait(left_s)

    # ---- inside

    async def _settle(self, stored: StoredRequest, placeholders: tuple[ChannelResult, ...]) -> list[int]:
        """Give open questions their placeholders; returns those that had no other outcome before."""
        settled = await self._results.settle(placeholders)
        if len(settled) < len(placeholders):
            await self._catch_up(stored)
        return settled

    async def _catch_up(self, *requests: StoredRequest) -> None:
        """Take in what the result stream may have missed; what cannot be had now comes when the requests are due."""
        if self._takeover is None:
            return
        try:
            for stored in requests:
                await self._takeover.catch_up(stored)
        except KevError as error:
            _log.warning("could not look for missed events of %d requests: %s", len(requests), error)

    def _end_open(self) -> None:
        """Nobody else could give the open questions an outcome: they end as cancelled."""
        error = DrainingError("Kev shut down before this question had an outcome; submit it again").info
        for stored in self._store.running():
            self._gathering.end(stored, error)

    def _get(self, request_id: str) -> StoredRequest:
        stored = self._store.find(request_id) if is_a(request_id, str) else None
        if stored is None:
            raise RequestNotFoundError(
                f"no request {shown(request_id)}: it was never accepted, or its results are gone "
                f"(they are kept for {self._result_ttl_s:g} s after the last outcome); submit it again"
            )
        return stored


def _is_number(value: object) -> bool:
    return is_a(value, float) or (is_a(value, int) and not is_a(value, bool))


async def _read_log(stored: StoredRequest, event_index: int) -> AsyncGenerator[StreamEvent, None]:
    events = stored.collector.events
    while True:
        while event_index < len(events):
            event = events[event_index]
            event_index += 1
            yield event
            if event.type is StreamEventType.DONE:
                return
        if stored.finished.is_set():
            return
        await stored.progressed.wait()
