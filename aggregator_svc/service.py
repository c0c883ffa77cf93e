"""The aggregator as its callers see it: register, poll, wait, stream, cancel.

Invariants and semantics: every registered question gets exactly one terminal outcome, by its deadline at the latest,
also when ``run`` ends (then cancelled), so that no waiter waits for ever. Each outcome reaches every listener once,
before waiters and readers see it. Deadlines are kept by ``run`` and looked at on every call, so a view never shows an
open question whose deadline has passed. Work of questions that timed out or were cancelled is withdrawn from the
transport; an interrupted withdrawal is repeated. Waiters and stream readers are independent: each reader has its own
position in the request's event log, and leaving early leaves nothing behind. One event loop; state changes only
between two awaits.

Not here: what an event does to a request (``collector``), what is kept how long (``store``), gRPC (``servicer``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from aggregator_svc.settings import AggregatorSettings
from aggregator_svc.store import RequestStore, StoredRequest
from common.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    InvariantError,
    KevError,
    RequestNotFoundError,
)
from common.ports import Clock, RequestSource, ResultStream, WorkStreams
from common.types import (
    ChannelDelta,
    ChannelEvent,
    ChannelResult,
    ChannelStarted,
    RequestRecord,
    RequestView,
    StreamEvent,
    StreamEventType,
)
from common.wakeup import WakeUp
from common.wording import is_a, shown

_READ_MAX_EVENTS = 256
_READ_WAIT_S = 5.0
_SOURCE_INTERVAL_S = 0.5
_LONGEST_WAIT_S = 1e9
"""Every question has its outcome long before; larger integers do not fit into a float."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorCounters:
    """Counters since start."""

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
        self._source = source
        self._adopting = asyncio.Lock()
        self._completed: deque[str] = deque()
        self._results = results
        self._work = work
        self._clock = clock
        self._result_ttl_s = settings.result_ttl_s
        self._store = RequestStore(max_requests=settings.max_requests, result_ttl_s=settings.result_ttl_s)
        self._listeners: list[Callable[[ChannelResult], None]] = []
        self._withdrawals: deque[tuple[str, tuple[int, ...]]] = deque()
        self._timetable_changed = WakeUp()
        self._draining = False
        self._num_outcomes = 0
        self._num_late = 0
        self._num_unknown = 0
        self._num_malformed = 0

    @property
    def counters(self) -> AggregatorCounters:
        """Counters since start."""
        return AggregatorCounters(
            num_outcomes=self._num_outcomes,
            num_late=self._num_late,
            num_unknown=self._num_unknown,
            num_malformed=self._num_malformed,
        )

    def add_listener(self, listener: Callable[[ChannelResult], None]) -> None:
        """Call ``listener`` once per question, at its terminal outcome; what it raises is logged only."""
        self._listeners.append(listener)

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
        now = self._look_at_clock()
        if self._store.holds(record.request_id, record.content_digest):
            return False
        if self._draining:
            raise DrainingError("Kev is shutting down and accepts no new requests; send it to another instance")
        next_due_s = self._store.next_due_s()
        stored = StoredRequest(Collector(record, now))
        self._store.add(stored, now.monotonic_s)
        if next_due_s is None or (stored.collector.next_deadline_s or next_due_s) < next_due_s:
            self._timetable_changed.wake_all()
        return True

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        """Whether exactly this request is registered.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
        """
        self._look_at_clock()
        return self._store.holds(request_id, content_digest)

    async def withdraw(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete and forget it, so that its id can be used again."""
        self._look_at_clock()
        stored = self._store.find(request_id)
        if stored is None:
            return
        self._cancel_open(stored)
        self._store.remove(request_id)
        await self._withdraw_work()

    # ---- the caller's side

    async def load(self, request_id: str) -> None:
        """Have the request at hand, taking it over from where it was registered; before ``stream`` in that case.

        Raises:
            RequestNotFoundError: unknown, or its results have expired.
        """
        self._look_at_clock()
        if self._source is not None and is_a(request_id, str) and self._store.find(request_id) is None:
            await self._adopt(self._source, request_id)
        self._get(request_id)

    def tenant_of(self, request_id: str) -> str:
        """Whose a request at hand is.

        Raises:
            RequestNotFoundError: it is not at hand.
        """
        return self._get(request_id).collector.record.tenant

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
        self._look_at_clock()
        return _read_log(self._get(request_id), from_event_index)

    async def cancel(self, request_id: str) -> int:
        """Withdraw every question that has no outcome yet; outcomes that are there stay.

        Returns:
            How many questions were withdrawn.

        Raises:
            RequestNotFoundError: unknown, or its results have expired.
        """
        await self.load(request_id)
        num_withdrawn = self._cancel_open(self._get(request_id))
        await self._withdraw_work()
        return num_withdrawn

    # ---- the loops

    async def run(self) -> None:
        """Consume events and keep deadlines until cancelled.

        Then every open question ends as cancelled, unless another aggregator can take the requests over.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._consume(), name="aggregator-consume")
                group.create_task(self._keep_deadlines(), name="aggregator-deadlines")
                if self._source is not None:
                    group.create_task(self._keep_source(self._source), name="aggregator-source")
        finally:
            self.begin_drain()
            if self._source is None:
                self._end_open()

    async def _consume(self) -> None:
        while True:
            try:
                events = await self._results.read(_READ_MAX_EVENTS, _READ_WAIT_S)
            except KevError as error:
                if not error.retryable:
                    raise
                _log.warning("events cannot be read; trying again: %s", error)
                await asyncio.sleep(_SOURCE_INTERVAL_S)
                continue
            for event in events:
                if self._source is not None and self._store.find(event.request_id) is None:
                    await self._adopt_quietly(self._source, event.request_id)
                self._apply(event)
            # A backlog must not keep the loop from everybody else.
            await asyncio.sleep(0)

    async def _keep_deadlines(self) -> None:
        while True:
            await self._withdraw_work()
            now = self._look_at_clock()
            if self._withdrawals:
                continue
            next_due_s = self._store.next_due_s()
            await self._timetable_changed.wait(None if next_due_s is None else max(0.0, next_due_s - now.monotonic_s))

    async def _keep_source(self, source: RequestSource) -> None:
        """Report finished requests, and take over those whose time is over without a sign of life."""
        while True:
            while self._completed:
                try:
                    await source.complete(self._completed[0])
                except KevError:
                    _log.exception("could not report a finished request; trying again")
                    break
                self._completed.popleft()
            try:
                for request_id in await source.overdue():
                    if self._store.find(request_id) is None:
                        await self._adopt_quietly(source, request_id)
            except KevError:
                _log.exception("could not look for overdue requests; trying again")
            await asyncio.sleep(_SOURCE_INTERVAL_S)

    # ---- inside

    def _end_open(self) -> None:
        """Nobody else could give the open questions an outcome: they end as cancelled."""
        error = DrainingError("Kev shut down before this question had an outcome; submit it again").info
        now = self._now()
        for stored in self._store.running():
            self._settle(stored, stored.collector.cancel(now, error), now)

    async def _adopt(self, source: RequestSource, request_id: str) -> None:
        """Take a request over with all that has happened to it; does nothing if there is no such request."""
        async with self._adopting:
            found = await source.find(request_id)
            if found is None or self._store.find(request_id) is not None:
                return
            past = await source.history(request_id)
            now, age_s = self._now(), found.age_ms / 1000
            accepted = Moment(monotonic_s=now.monotonic_s - age_s, unix_s=now.unix_s - age_s)
            self._store.add(StoredRequest(Collector(found.record, accepted)), now.monotonic_s)
            for event in past:
                self._apply(event)
            self._timetable_changed.wake_all()

    async def _adopt_quietly(self, source: RequestSource, request_id: str) -> None:
        try:
            await self._adopt(source, request_id)
        except KevError:
            _log.exception("could not take over a request; its next event or its deadline tries again")

    def _now(self) -> Moment:
        return Moment(monotonic_s=self._clock.monotonic(), unix_s=self._clock.time())

    def _look_at_clock(self) -> Moment:
        """Time out and forget whatever is due; called first by everything that reads or changes state."""
        now = self._now()
        for stored, placeholders in self._store.expire_questions(now):
            self._drop_work(stored, placeholders)
            self._settle(stored, placeholders, now)
        self._store.drop_expired(now.monotonic_s)
        return now

    def _get(self, request_id: str) -> StoredRequest:
        stored = self._store.find(request_id) if is_a(request_id, str) else None
        if stored is None:
            raise RequestNotFoundError(
                f"no request {shown(request_id)}: it was never accepted, or its results are gone "
                f"(they are kept for {self._result_ttl_s:g} s after the last outcome); submit it again"
            )
        return stored

    def _apply(self, event: ChannelEvent) -> None:
        try:
            stored = self._store.find(event.request_id)
            if stored is None:
                self._num_unknown += 1
                return
            self._feed(stored, event)
        except Exception:
            # Whatever a peer sent: the loop serves all other requests too. The text of a question is never logged.
            self._num_malformed += 1
            _log.exception("dropped a malformed %s event", type(event).__name__)

    def _feed(self, stored: StoredRequest, event: ChannelEvent) -> None:
        now = self._now()
        match event:
            case ChannelStarted():
                stored.collector.start(event, now)
            case ChannelDelta():
                stored.collector.append(event, now)
            case ChannelResult():
                if not stored.collector.place(event, now):
                    self._num_late += 1
                    return
                self._settle(stored, (event,), now)
            case _:
                raise InvariantError("the event is of no known type")
        stored.progressed.wake_all()

    def _settle(self, stored: StoredRequest, outcomes: Iterable[ChannelResult], now: Moment) -> None:
        """Tell everybody about outcomes that the collector has just placed."""
        for outcome in outcomes:
            self._num_outcomes += 1
            for listener in self._listeners:
                try:
                    listener(outcome)
                except Exception:
                    _log.exception("a listener failed on question %d", outcome.question_index)
        if stored.collector.done and not stored.finished.is_set():
            self._store.finish(stored, now.monotonic_s)
            if self._source is not None:
                self._completed.append(stored.request_id)
            stored.finished.set()
        stored.progressed.wake_all()

    def _cancel_open(self, stored: StoredRequest) -> int:
        now = self._now()
        placeholders = stored.collector.cancel(now)
        self._drop_work(stored, placeholders)
        self._settle(stored, placeholders, now)
        return len(placeholders)

    def _drop_work(self, stored: StoredRequest, placeholders: tuple[ChannelResult, ...]) -> None:
        if placeholders:
            self._withdrawals.append((stored.request_id, tuple(outcome.question_index for outcome in placeholders)))
            self._timetable_changed.wake_all()

    async def _withdraw_work(self) -> None:
        """Cancel outstanding work; one that is interrupted stays in line, cancelling twice does no harm."""
        while self._withdrawals:
            withdrawal = self._withdrawals[0]
            try:
                await self._work.cancel(*withdrawal)
            except KevError:
                # The item's own time budget ends the work then.
                _log.exception("could not withdraw %d questions from the work streams", len(withdrawal[1]))
            if self._withdrawals and self._withdrawals[0] is withdrawal:
                self._withdrawals.popleft()


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
