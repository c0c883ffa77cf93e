"""Takes over requests that were registered elsewhere, with all that has happened to them.

Invariants and semantics: a request is taken over when somebody asks for it, soon after its first event is read, or when
its time is over; so what happened is known here before anybody asks, also when the source forgets it. Its past comes
from its log; events that are read while the log is on its way are put by and come after it, so that none is lost and
the order is the log's. What the stream may have missed is taken from the log again.

Not here: what a source is (``common.ports.RequestSource``), what events do (``gathering``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from weakref import WeakValueDictionary

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from aggregator_svc.gathering import Gathering
from aggregator_svc.store import StoredRequest
from common.errors import KevError
from common.ports import RegisteredRequest, RequestSource, ResultStream
from common.types import ChannelEvent

_INTERVAL_S = 0.5
_MAX_AT_ONCE = 16

_log = logging.getLogger(__name__)


class Takeover:
    """Brings the requests of a source into a gathering."""

    def __init__(self, source: RequestSource, results: ResultStream, gathering: Gathering) -> None:
        """Take nothing over yet.

        Args:
            source: where requests are registered.
            results: where outcomes are settled.
            gathering: where requests are kept.
        """
        self._source = source
        self._results = results
        self._gathering = gathering
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._put_by: dict[str, list[ChannelEvent]] = {}
        self._stale: set[str] = set()
        """Requests that were withdrawn while they were being taken over: they must be looked for again."""
        self._met: dict[str, None] = {}
        """Requests of which events were read, to be taken over."""
        self._met_some = asyncio.Event()

    async def run(self) -> None:
        """Take over what nobody asks for, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take_met(), name="aggregator-met")
            group.create_task(self._take_overdue(), name="aggregator-overdue")

    async def _take_met(self) -> None:
        while True:
            await self._met_some.wait()
            some = list(itertools.islice(self._met, _MAX_AT_ONCE))
            for outcome in await asyncio.gather(*map(self.take, some), return_exceptions=True):
                if isinstance(outcome, KevError):
                    _log.warning("could not take over a request: %s", outcome)
                elif outcome is not None:
                    raise outcome
            for request_id in some:
                self._met.pop(request_id, None)
            if not self._met:
                self._met_some.clear()

    async def _take_overdue(self) -> None:
        while True:
            try:
                for request_id in await self._source.overdue():
                    await self._look_after(request_id)
            except KevError:
                _log.exception("could not look after overdue requests; trying again")
            await asyncio.sleep(_INTERVAL_S)

    async def take(self, request_id: str) -> None:
        """Have a request in the gathering; does nothing if there is no such request.

        Raises:
            StoreUnavailableError: the source cannot be asked now, or has just lost what it knew.
            QueueFullError: every kept request is still running.
        """
        store, lock = self._gathering.store, self._locks.get(request_id)
        if lock is None:
            lock = self._locks[request_id] = asyncio.Lock()
        async with lock:
            if store.find(request_id) is not None:
                return
            meanwhile: list[ChannelEvent] = []
            self._put_by[request_id] = meanwhile
            try:
                found = await self._source.find(request_id)
                while request_id in self._stale:
                    self._stale.discard(request_id)
                    found = await self._source.find(request_id)
            finally:
                del self._put_by[request_id]
                self._stale.discard(request_id)
            if found is None:
                return
            now = self._gathering.now()
            stored = self._gathering.keep(Collector(found.record, _accepted(found, now)), now)
            self._replay(stored, found, now)
            for event in meanwhile:
                self._gathering.feed(stored, event, now)

    def meet(self, event: ChannelEvent) -> None:
        """Note an event of a request that is not kept (yet)."""
        if event.request_id in self._put_by:
            self._put_by[event.request_id].append(event)
        else:
            self._met[event.request_id] = None
            self._met_some.set()

    def forget(self, request_id: str) -> None:
        """The request was withdrawn: what is known of it belongs to no later one under its id."""
        self._met.pop(request_id, None)
        if request_id in self._put_by:
            self._put_by[request_id].clear()
            self._stale.add(request_id)

    async def catch_up(self, stored: StoredRequest) -> None:
        """Take in what the stream may have missed.

        Raises:
            StoreUnavailableError: the source cannot be asked now, or has just lost what it knew.
        """
        found = await self._source.find(stored.request_id)
        if found is None:
            return
        if found.record.content_digest == stored.collector.record.content_digest:
            self._replay(stored, found, self._gathering.now())
        else:
            self._gathering.forget(stored.request_id)

    async def _look_after(self, request_id: str) -> None:
        store = self._gathering.store
        try:
            await self.take(request_id)
            stored = store.find(request_id)
            if stored is not None and stored.collector.done:
                # The store may have lost what was told already: it must stay told.
                await self._results.settle(stored.collector.outcomes())
                await self._source.complete(request_id)
        except KevError:
            _log.exception("could not look after an overdue request; trying again")

    def _replay(self, stored: StoredRequest, found: RegisteredRequest, now: Moment) -> None:
        accepted = _accepted(found, now)
        for past in found.events:
            at_s = past.at_ms / 1000
            then = Moment(monotonic_s=accepted.monotonic_s + at_s, unix_s=accepted.unix_s + at_s)
            self._gathering.feed(stored, past.event, then)


def _accepted(found: RegisteredRequest, now: Moment) -> Moment:
    age_s = found.age_ms / 1000
    return Moment(monotonic_s=now.monotonic_s - age_s, unix_s=now.unix_s - age_s)
