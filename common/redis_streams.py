"""The transport of the distributed form: work streams and result stream in Redis.

Invariants and semantics: see ``common.ports``. Every operation is one script, safe to repeat after a lost reply; a call
that is cancelled has happened or not, and a lease that nobody got is handed back. Each process is a consumer of its own
(node id and incarnation); several may work on one channel, each on one item of it. A lease is an entry pending for its
consumer; renewal keeps its idle time below ``lease_timeout_s``. Whoever gives no sign of life for ``heartbeat_ttl_s``
loses what it holds at once, others when their lease runs out. A question that was delivered ``max_deliveries`` times
and never finished goes to the dead letters with an error outcome. What cannot be decoded goes there as it is. Outcomes
are kept for ``retention_s``: publishing the same question again reports its outcome again.

Not here: what a script does (``redis_scripts*``), connections (``redis_link``), names of keys (``redis_keys``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from common import redis_scripts_lease as lease_scripts
from common import redis_scripts_publish as publish_scripts
from common import redis_scripts_results as result_scripts
from common.codec import EnvelopeValue, open_envelope, seal
from common.errors import (
    InvalidRequestError,
    InvariantError,
    KevError,
    QueueFullError,
)
from common.ports import Clock, CommitState, Lease
from common.redis_keys import MAX_NOTICES, NOTICES, RESULTS_BELL, WORK_BELL
from common.redis_link import RedisLink
from common.redis_listener import RedisListener, Signal
from common.redis_scripts import Entry, Hold
from common.redis_settings import RedisTransportSettings
from common.redis_upkeep import RedisUpkeep
from common.types import ChannelDelta, ChannelEvent, ChannelResult, ChannelStarted, WorkItem
from common.wording import is_a

_RETRY_AFTER_S = 1.0
_SLICE_S = 1.0
_LEAVE_S = 1.0
_FULL_PAUSE_S = 0.05

_log = logging.getLogger("kev.redis")


class RedisTransport:
    """``WorkStreams`` and ``ResultStream`` in Redis, for one event loop."""

    def __init__(self, *, link: RedisLink, clock: Clock, settings: RedisTransportSettings) -> None:
        """Join a deployment; nothing is sent before the first call.

        Args:
            link: the connection, which outlives the transport.
            clock: stamps the outcomes that the transport itself produces.
            settings: see there.

        Raises:
            ConfigError: the settings do not go together.
        """
        settings.check()
        self._link = link
        self._clock = clock
        self._settings = settings
        self._consumer = settings.consumer
        self._hold_ttl_ms = settings.lease_ms + settings.retention_ms
        self._work_changed, self._results_changed, self._notices_changed = Signal(), Signal(), Signal()
        self._listener = RedisListener(
            link,
            {
                link.keys.name(WORK_BELL): (self._work_changed,),
                link.keys.name(RESULTS_BELL): (self._results_changed,),
                link.keys.name(NOTICES, self._consumer): (self._notices_changed, self._work_changed),
            },
        )
        self._upkeep = RedisUpkeep(link, clock, settings)
        self._upkeep_task: asyncio.Task[None] | None = None
        self._grant = 0
        """Number of the next lease call."""
        self._held: dict[tuple[str, int], str] = {}
        """Entry id of each lease that this process was granted and has not given up."""
        self._notices: dict[tuple[str, int], None] = {}
        self._returned: tuple[str, ...] = ()
        """Events that the latest read returned: acknowledged by the next one."""
        self._lease_lock, self._read_lock = asyncio.Lock(), asyncio.Lock()

    @property
    def num_lost_entries(self) -> int:
        """Leased entries that somebody else deleted or trimmed, since start: an alarm when it grows."""
        return self._upkeep.num_lost_entries

    async def close(self) -> None:
        """Let go of what is still held and leave the groups, if the store can be reached."""
        await self._listener.close()
        if self._upkeep_task is None:
            return
        self._upkeep_task.cancel()
        await asyncio.gather(self._upkeep_task, return_exceptions=True)
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._link.unbroken(self._upkeep.retire())
        except (KevError, TimeoutError):
            _log.warning("could not leave the consumer groups; the other nodes will notice")

    # ---- router's side

    async def publish(self, item: WorkItem) -> None:
        """Append the item to its channel's stream; see ``common.ports.WorkStreams``."""
        num_channels = self._settings.num_channels
        if not 0 <= item.channel_id < num_channels:
            raise InvalidRequestError.of(
                "channel_id", f"{item.channel_id} does not exist; channels are 0 to {num_channels - 1}"
            )
        publication = publish_scripts.Publication(
            channel_id=item.channel_id,
            request_id=item.request_id,
            question_index=item.question_index,
            digest=_digest_of(item),
            envelope=seal(item, self._settings.current_trace()),
            ttl_ms=item.time_budget_ms + self._hold_ttl_ms,
        )
        limit = self._settings.max_entries_per_channel
        state = await self._link.unbroken(publish_scripts.publish(self._link, publication, limit))
        if state is publish_scripts.PublishState.FULL:
            raise QueueFullError(
                f"channel {item.channel_id} already holds {limit} questions, its limit; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def cancel(self, request_id: str, question_indexes: Sequence[int] | None = None) -> None:
        """Withdraw questions; a withdrawn lease answers False from now on; see ``common.ports.WorkStreams``."""
        await self._link.unbroken(publish_scripts.withdraw(self._link, request_id, question_indexes))

    async def depths(self) -> list[int]:
        """Items per channel that are waiting or leased, index = channel id."""
        return await self._link.unbroken(publish_scripts.depths(self._link, self._settings.num_channels))

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those with neither an item nor an outcome on its way; see ``common.ports.WorkStreams``."""
        return await self._link.unbroken(publish_scripts.lost(self._link, questions)) if questions else []

    async def settled(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those with an outcome, and those that were withdrawn; see ``common.ports.OutcomeBoard``."""
        return await self._link.unbroken(publish_scripts.settled(self._link, questions)) if questions else []

    # ---- node's side

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        """Take up to ``max_items`` items, at most one per channel; see ``common.ports.WorkStreams``."""
        if max_items < 1:
            return []
        if self._upkeep_task is None:
            self._upkeep_task = asyncio.create_task(self._upkeep.run(), name="kev-redis-upkeep")
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + wait_s
        while True:
            version = self._work_changed.version
            async with self._lease_lock:
                leases = await self._link.unbroken(self._take(max_items), undo=self._give_back)
            left_s = ends_at_s - loop.time()
            if leases or left_s <= 0:
                return leases
            slice_s = min(left_s, _SLICE_S, self._settings.lease_timeout_s / 4)
            await self._listener.wait(self._work_changed, version, slice_s)

    async def renew(self, lease: Lease) -> bool:
        """Extend the lease by the full lease time."""
        renewed = await self._link.unbroken(lease_scripts.renew(self._link, self._hold_of(lease), self._hold_ttl_ms))
        if not renewed:
            self._let_go(lease)
        return renewed

    async def emit(self, lease: Lease, event: ChannelStarted | ChannelDelta) -> bool:
        """Report progress to the aggregator; waits while the result stream is full.

        Raises:
            InvariantError: the event is about another question or attempt than the lease.
        """
        _check_subject(lease, event)
        hold, envelope = self._hold_of(lease), seal(event, lease.trace)
        while True:
            state = await self._link.unbroken(
                lease_scripts.emit(self._link, hold, envelope, self._settings.max_events, self._hold_ttl_ms)
            )
            if state is not lease_scripts.EmitState.FULL:
                return state is lease_scripts.EmitState.REPORTED
            await asyncio.sleep(random.uniform(_FULL_PAUSE_S / 2, _FULL_PAUSE_S))

    async def commit(self, lease: Lease, result: ChannelResult) -> CommitState:
        """Report the outcome and remove the item, in one atomic act.

        Raises:
            InvariantError: the result is about another question or attempt than the lease.
        """
        _check_subject(lease, result)
        envelope = seal(result, lease.trace)
        state = await self._link.unbroken(
            lease_scripts.commit(self._link, self._hold_of(lease), envelope, self._settings.retention_ms)
        )
        self._let_go(lease)
        return state

    async def hand_back(self, lease: Lease) -> bool:
        """Return an unstarted item at once to the head of its channel; it does not count as an attempt."""
        back = await self._link.unbroken(lease_scripts.hand_back(self._link, self._hold_of(lease), self._hold_ttl_ms))
        self._let_go(lease)
        return back

    async def dead_letter(self, lease: Lease, error: KevError) -> bool:
        """Set the item aside and report an error outcome for its question."""
        hold = self._hold_of(lease)
        outcome = replace(
            self._upkeep.error_outcome(hold, error.info),
            num_prompt_tokens=len(lease.item.prompt.ids),
            num_truncated=lease.item.prompt.num_truncated,
        )
        done = await self._link.unbroken(self._upkeep.set_aside(hold, error.info, seal(outcome, lease.trace)))
        self._let_go(lease)
        return done

    async def cancellations(self, wait_s: float) -> list[tuple[str, int]]:
        """Leased questions withdrawn since the last call, waiting up to ``wait_s`` seconds for the first one."""
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + wait_s
        while True:
            version = self._notices_changed.version
            await self._link.unbroken(self._take_notices())
            left_s = ends_at_s - loop.time()
            if self._notices or left_s <= 0:
                withdrawn = list(self._notices)
                self._notices.clear()
                return withdrawn
            await self._listener.wait(self._notices_changed, version, min(left_s, _SLICE_S))

    # ---- aggregator's side

    async def read(self, max_events: int, wait_s: float) -> list[ChannelEvent]:
        """Take up to ``max_events`` events and acknowledge the previous ones; see ``common.ports.ResultStream``.

        Returns nothing while another process is the reader.
        """
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + wait_s
        async with self._read_lock:
            while True:
                version = self._results_changed.version
                events = await self._link.unbroken(self._take_events(max_events))
                left_s = ends_at_s - loop.time()
                if events or left_s <= 0:
                    self._returned = tuple(entry_id for entry_id, _ in events)
                    return [event for _, event in events]
                await self._listener.wait(self._results_changed, version, min(left_s, _SLICE_S))

    async def history(self, request_id: str) -> list[ChannelEvent]:
        """All events of a request so far, read or not: what a reader that starts anew begins with."""
        envelopes = await self._link.unbroken(result_scripts.history(self._link, request_id))
        return [_checked_event(open_envelope(envelope)[0]) for envelope in envelopes]

    # ---- leases

    async def _take(self, max_items: int) -> list[Lease]:
        """Lease what there is; set aside what cannot be run."""
        while True:
            grant = f"{self._consumer}/{self._grant}"
            grants = await lease_scripts.lease(
                self._link,
                self._consumer,
                max_items,
                lease_ms=self._settings.lease_ms,
                max_deliveries=self._settings.max_deliveries,
                grant=grant,
                ttl_ms=self._hold_ttl_ms,
            )
            # Only now: a call that failed may have been granted something, which the next one is given again.
            self._grant += 1
            leases = []
            num_bad = len(grants.poisonous)
            for entry in grants.granted:
                try:
                    leases.append(self._lease_of(entry, grant, grants.now_ms))
                except InvalidRequestError as error:
                    num_bad += 1
                    await self._upkeep.set_unreadable_aside(entry.hold(self._consumer, grant), error.info)
            for entry in grants.poisonous:
                await self._upkeep.set_poisonous_aside(entry)
            if leases or not num_bad:
                return leases

    def _lease_of(self, entry: Entry, grant: str, now_ms: int) -> Lease:
        item, trace = open_envelope(entry.fields.get(b"e", b""))
        if not is_a(item, WorkItem) or (*item.key, item.channel_id) != (
            entry.request_id,
            entry.question_index,
            entry.channel_id,
        ):
            raise InvalidRequestError.of("envelope", "does not hold the work item that its entry announces")
        self._held[item.key] = entry.entry_id
        # A notice still unread concerns an earlier publication of the same question.
        self._notices.pop(item.key, None)
        published_ms = int(entry.entry_id.partition("-")[0])
        return Lease(
            lease_id=f"{entry.entry_id} {grant}",
            item=item,
            attempt=entry.deliveries,
            age_ms=float(max(0, now_ms - published_ms)),
            trace=trace,
        )

    def _hold_of(self, lease: Lease) -> Hold:
        entry_id, _, grant = lease.lease_id.partition(" ")
        return Hold(
            channel_id=lease.item.channel_id,
            entry_id=entry_id,
            request_id=lease.item.request_id,
            question_index=lease.item.question_index,
            owner=self._consumer,
            attempt=lease.attempt,
            grant=grant,
        )

    def _let_go(self, lease: Lease) -> None:
        """Forget a lease; its channel may have something else for this process."""
        if self._held.get(lease.item.key) == lease.lease_id.partition(" ")[0]:
            del self._held[lease.item.key]
            self._work_changed.set()

    async def _give_back(self, leases: list[Lease]) -> None:
        for lease in leases:
            await lease_scripts.hand_back(self._link, self._hold_of(lease), self._hold_ttl_ms)
            self._let_go(lease)

    async def _take_notices(self) -> None:
        for request_id, question_index, entry_id in await lease_scripts.take_notices(self._link, self._consumer):
            key = (request_id, question_index)
            if self._held.get(key, entry_id) != entry_id:
                continue
            self._held.pop(key, None)
            self._notices[key] = None
        while len(self._notices) > MAX_NOTICES:
            del self._notices[next(iter(self._notices))]

    # ---- events

    async def _take_events(self, max_events: int) -> list[tuple[str, ChannelEvent]]:
        while True:
            entries = await result_scripts.read(
                self._link, self._consumer, self._settings.node_id, max_events, self._returned
            )
            self._returned = ()
            events = []
            for entry in entries:
                try:
                    event, _ = open_envelope(entry.envelope)
                    events.append((entry.entry_id, _checked_event(event)))
                except InvalidRequestError as error:
                    _log.error("event %s goes to the dead letters: %s", entry.entry_id, error)
                    await result_scripts.discard(self._link, entry.entry_id, reason=error.reason, message=str(error))
            if events or not entries:
                return events


def _digest_of(item: WorkItem) -> bytes:
    """Of everything but the remaining time, which a repeated publication has less of."""
    return hashlib.blake2b(seal(replace(item, time_budget_ms=0)), digest_size=16).digest()


def _check_subject(lease: Lease, event: ChannelEvent) -> None:
    reported = (event.request_id, event.question_index, event.attempt)
    if reported != (*lease.item.key, lease.attempt):
        raise InvariantError(f"an event about {reported} was reported under the lease of {lease.item.key}")


def _checked_event(event: EnvelopeValue) -> ChannelEvent:
    if isinstance(event, ChannelStarted | ChannelDelta | ChannelResult):
        return event
    raise InvalidRequestError.of("envelope.type", f"is {type(event).__name__}; the result stream holds events")
