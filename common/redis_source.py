"""The aggregator's end of Redis: events as they come, outcomes to settle, requests that routers have registered.

Invariants and semantics: see ``ResultStream`` and ``RequestSource`` in ``common.ports``. Any number of aggregators may
read; each is given every event and has a position of its own, so none has to take over from another. A request's log
holds its events in the same order. What cannot be decoded goes to the dead letters once, whoever meets it first. While
the store is younger than ``_YOUNG_S`` nobody is told that a request does not exist: it was emptied or restarted, and
routers are about to register again what is still waited for.

Not here: what a script does (``redis_scripts_results``, ``redis_scripts_registry``), registering (``redis_registry``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import lru_cache

from common import redis_scripts_registry as registry_scripts
from common import redis_scripts_results as scripts
from common.codec import open_envelope, seal
from common.ending import Ending
from common.errors import InvalidRequestError, StoreUnavailableError
from common.outage_log import OutageLog
from common.ports import PastEvent, RegisteredRequest, Withdrawn
from common.redis_keys import RESULTS
from common.redis_link import RedisLink
from common.redis_scripts_results import EventEntry
from common.redis_settings import RedisTransportSettings
from common.types import ChannelDelta, ChannelEvent, ChannelResult, ChannelStarted, RequestRecord
from common.wording import is_a, shown

_START = "0-0"
_SIGN_EVERY_S = 0.5
_SIGN_AFTER = 1_024
"""Events read since the last sign of life."""
_PAUSE_S = 0.2
_MAX_OVERDUE = 1_000
_YOUNG_S = 10.0
"""Longer than a router needs to notice that requests were lost and to register them again, even if it was stopped."""

_log = logging.getLogger("kev.redis")


class RedisSource:
    """``ResultStream`` and ``RequestSource`` in Redis, for one event loop."""

    def __init__(self, *, link: RedisLink, settings: RedisTransportSettings) -> None:
        """Join a deployment; nothing is sent before the first call.

        Args:
            link: the connection, which outlives the source.
            settings: who reads, how long results are kept, who is told of events.
        """
        self._link = link
        self._settings = settings
        self._results = link.keys.name(RESULTS)
        self._position = _START
        self._num_gaps = 0
        self._sign_at_s = 0.0
        self._num_unsigned = 0
        self._read_lock = asyncio.Lock()
        self._outage = OutageLog(_log)

    # ---- events (ResultStream)

    @property
    def num_gaps(self) -> int:
        """How often ``read`` may have missed events so far."""
        return self._num_gaps

    async def read(self, max_events: int, wait_s: float) -> list[ChannelEvent | Withdrawn]:
        """Take up to ``max_events`` events; see ``common.ports.ResultStream``.

        Raises:
            StoreUnavailableError: the store is away.
        """
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + wait_s
        async with self._read_lock:
            while True:
                entries: list[EventEntry] = []
                if wait_s <= 0 or loop.time() >= self._sign_at_s or self._num_unsigned >= _SIGN_AFTER:
                    entries = await self._link.unbroken(self._sign(max_events))
                    self._sign_at_s, self._num_unsigned = loop.time() + _SIGN_EVERY_S, 0
                left_s = ends_at_s - loop.time()
                if not entries and left_s > 0:
                    entries = await self._wait(max_events, min(left_s, _SIGN_EVERY_S))
                events = [event for entry in entries if (event := await self._opened(entry)) is not None]
                if entries:
                    self._position = entries[-1].entry_id
                    self._num_unsigned += len(entries)
                if events or (left_s <= 0 and not entries):
                    return events

    async def settle(self, outcomes: Sequence[ChannelResult]) -> list[int]:
        """Give questions of one request these outcomes, unless they have one; see ``common.ports.ResultStream``.

        Raises:
            StoreUnavailableError: the store is away.
        """
        if not outcomes:
            return []
        envelopes = [(outcome.question_index, seal(outcome), Ending.of(outcome).mark) for outcome in outcomes]
        return await self._link.unbroken(
            scripts.settle(self._link, outcomes[0].request_id, envelopes, self._settings.retention_ms)
        )

    async def _sign(self, max_events: int) -> list[EventEntry]:
        """Give a sign of life, let go of what was read, and see what there is."""
        found = await scripts.read(self._link, self._settings.consumer, self._position, max_events)
        if not found.is_known and self._position != _START:
            self._num_gaps += 1
        return found.entries

    async def _wait(self, max_events: int, wait_s: float) -> list[EventEntry]:
        try:
            entries = await self._link.interruptible(
                self._link.entries_after(self._results, self._position, max_events, wait_s)
            )
            self._outage.worked()
            return entries
        except StoreUnavailableError as error:
            self._outage.failed(f"cannot wait for events: {error}")
            await asyncio.sleep(min(wait_s, _PAUSE_S))
            return []

    async def _opened(self, entry: EventEntry) -> ChannelEvent | Withdrawn | None:
        if entry.withdrawn:
            return Withdrawn(request_id=entry.withdrawn)
        try:
            event, trace = _open_event(entry.envelope)
        except InvalidRequestError as error:
            _log.error("event %s goes to the dead letters: %s", entry.entry_id, error)
            await self._link.unbroken(
                scripts.discard(self._link, entry.entry_id, reason=error.reason, message=str(error))
            )
            return None
        self._settings.on_event(event, trace)
        return event

    # ---- requests (RequestSource)

    async def find(self, request_id: str) -> RegisteredRequest | None:
        """The request with all that has happened to it; see ``common.ports.RequestSource``.

        Raises:
            InvalidRequestError: what is kept cannot be decoded.
            StoreUnavailableError: the store is away, or it is too young to know.
        """
        found = await self._link.unbroken(registry_scripts.find(self._link, request_id))
        if isinstance(found, registry_scripts.NotFound):
            if found.store_age_ms < _YOUNG_S * 1000:
                raise StoreUnavailableError(
                    f"no request {shown(request_id)} is known, but the store began anew {found.store_age_ms} ms ago "
                    f"and its router may be about to register it again; ask again in {_YOUNG_S:g} s"
                )
            return None
        record, _ = open_envelope(found.envelope)
        if not is_a(record, RequestRecord):
            raise InvalidRequestError.of("envelope.type", f"is {type(record).__name__}, not the record of a request")
        events = tuple(past for at_ms, envelope in found.events if (past := _past_event(at_ms, envelope)) is not None)
        return RegisteredRequest(record=record, age_ms=found.age_ms, events=events)

    async def overdue(self) -> list[str]:
        """Ids of the requests of which a question has run out of time, at most ``_MAX_OVERDUE``, oldest first."""
        return await self._link.unbroken(registry_scripts.overdue(self._link, _MAX_OVERDUE))

    async def complete(self, request_id: str) -> None:
        """Let the request and all that belongs to it expire; see ``common.ports.RequestSource``."""
        await self._link.unbroken(registry_scripts.complete(self._link, request_id, self._settings.retention_ms))


def _past_event(at_ms: int, envelope: bytes) -> PastEvent | None:
    try:
        event, _ = _open_event(envelope)
    except InvalidRequestError as error:
        _log.error("an event of a request's log cannot be read: %s", error)
        return None
    return PastEvent(event=event, at_ms=at_ms)


@lru_cache(maxsize=1024)  # What was just read is opened again when its request is taken over.
def _open_event(envelope: bytes) -> tuple[ChannelEvent, str]:
    event, trace = open_envelope(envelope)
    if isinstance(event, ChannelStarted | ChannelDelta | ChannelResult):
        return event, trace
    raise InvalidRequestError.of("envelope.type", f"is {type(event).__name__}; the result stream holds events")
