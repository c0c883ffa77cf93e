"""The transport of the distributed form: work streams in Redis.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from common import redis_scripts_lease as lease_scripts
from common import redis_scripts_publish as publish_scripts
from common.codec import open_envelope, seal, seal_item
from common.ending import Ending
from common.errors import InvalidRequestError, KevError, QueueFullError
from common.ports import Clock, Lease, Report, ReportState
from common.redis_keys import MAX_NOTICES, NOTICES, WORK_BELL
from common.redis_link import RedisLink, StoreFullError
from common.redis_listener import RedisListener, Signal
from common.redis_scripts import Entry, Hold
from common.redis_settings import RedisTransportSettings
from common.redis_upkeep import RedisUpkeep
from common.types import WorkItem
from common.wording import is_a

_SLICE_S = 1.0
_LEAVE_S = 1.0
_MAX_PER_CALL = 128
"""Most entries that one script works on: the server does nothing else meanwhile."""
_MAX_BYTES_PER_CALL = 4_194_304

_STILL_LEASED = frozenset({ReportState.HELD, ReportState.FULL})

_log = logging.getLogger("kev.redis")

T = TypeVar("T")


class RedisTransport:
    """``WorkStreams`` and ``OutcomeBoard`` in Redis, for one event loop."""

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
        self._work_changed, self._notices_changed = Signal(), Signal()
        # One for each, so that nobody is woken by what he does not wait for.
        self._work_listener = RedisListener(link, {link.keys.name(WORK_BELL): (self._work_changed,)})
        self._notices_listener = RedisListener(
            link, {link.keys.name(NOTICES, self._consumer): (self._notices_changed, self._work_changed)}
        )
        self._upkeep = RedisUpkeep(link, clock, settings)
        self._upkeep_task: asyncio.Task[None] | None = None
        self._grant = 0
        """Number of the next lease call."""
        self._held: dict[tuple[str, int], tuple[int, str]] = {}
        """(channel id, entry id) of each lease that this process was granted and has not given up."""
        self._notices: dict[tuple[str, int], None] = {}
        self._lease_lock = asyncio.Lock()

    @property
    def settings(self) -> RedisTransportSettings:
        """What this process has joined with."""
        return self._settings

    @property
    def num_lost_entries(self) -> int:
        """Leased entries that somebody else deleted or trimmed, since start: an alarm when it grows."""
        return self._upkeep.num_lost_entries

    async def close(self) -> None:
        """Let go of what is still held and leave the groups, if the store can be reached."""
        for listener in (self._work_listener, self._notices_listener):
            await listener.close()
        if self._upkeep_task is None:
            return
        self._upkeep_task.cancel()
        await asyncio.gather(self._upkeep_task, return_exceptions=True)
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._link.unbroken(self._upkeep.retire())
        except (KevError, TimeoutError):
            _log.warning("could not leave the consumer groups; the other nodes will notice")

    @property
    def channel_limits(self) -> tuple[int, int]:
        """Most entries and most bytes of a channel."""
        return self._settings.max_entries_per_channel, self._settings.max_bytes_per_channel

    # ---- router's side

    async def publish(self, items: Sequence[WorkItem]) -> list[QueueFullError | None]:
        """Append items to their channels' streams; see ``common.ports.WorkStreams``."""
        publications = [self.publication_of(item) for item in items]
        refusals: list[QueueFullError | None] = []
        for part in parts_of(publications, lambda publication: len(publication.envelope)):
            published = await self._link.unbroken(publish_scripts.publish(self._link, part, *self.channel_limits))
            refusals += map(self.refusal_of, part, published)
        return refusals

    async def cancel(self, request_id: str, question_indexes: Sequence[int] | None = None) -> None:
        """Withdraw questions; a withdrawn lease answers False from now on; see ``common.ports.WorkStreams``."""
        await self._link.unbroken(publish_scripts.withdraw(self._link, request_id, question_indexes))

    async def depths(self) -> list[int]:
        """Items per channel that are waiting or leased, index = channel id."""
        return await self._link.unbroken(publish_scripts.depths(self._link, self._settings.num_channels))

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those with neither an item nor an outcome; see ``common.ports.WorkStreams``."""
        return await self._link.unbroken(publish_scripts.lost(self._link, questions)) if questions else []

    async def settled(self, questions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Ending]:
        """Those with an outcome, and those that were withdrawn; see ``common.ports.OutcomeBoard``."""
        return await self._link.unbroken(publish_scripts.settled(self._link, questions)) if questions else {}

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
                leases = await self._link.unbroken(self._take(max_items), undo=self._hand_back)
            left_s = ends_at_s - loop.time()
            if leases or left_s <= 0:
                return leases
            slice_s = min(left_s, _SLICE_S, self._settings.lease_timeout_s / 4)
            await self._work_listener.wait(self._work_changed, version, slice_s)

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Extend leases by the full lease time; see ``common.ports.WorkStreams``."""
        renewed: list[bool] = []
        for part in parts_of(leases):
            holds = [self._hold_of(lease) for lease in part]
            renewed += await self._link.unbroken(lease_scripts.renew(self._link, holds, self._hold_ttl_ms))
        self._let_go([lease for lease, is_held in zip(leases, renewed, strict=True) if not is_held])
        return renewed

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        """Tell the aggregator what happened; see ``common.ports.WorkStreams``."""
        states: list[ReportState] = []
        for part in parts_of(reports):
            some = await self._link.unbroken(self._report([self._hold_report_of(report) for report in part]))
            self._let_go([report.lease for report, state in zip(part, some, strict=True) if state not in _STILL_LEASED])
            states += some
        return states

    async def hand_back(self, leases: Sequence[Lease]) -> list[bool]:
        """Return unstarted items at once to the heads of their channels; see ``common.ports.WorkStreams``."""
        handed_back: list[bool] = []
        for part in parts_of(leases):
            handed_back += await self._link.unbroken(self._hand_back(part))
        return handed_back

    async def dead_letter(self, lease: Lease, error: KevError) -> bool:
        """Set the item aside and report an error outcome for its question."""
        hold = self._hold_of(lease)
        outcome = replace(
            self._upkeep.error_outcome(hold, error.info),
            num_prompt_tokens=len(lease.item.prompt.ids),
            num_truncated=lease.item.prompt.num_truncated,
        )
        done = await self._link.unbroken(self._upkeep.set_aside(hold, error.info, seal(outcome, lease.trace)))
        self._let_go([lease])
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
            await self._notices_listener.wait(self._notices_changed, version, min(left_s, _SLICE_S))

    # ---- publications

    def publication_of(self, item: WorkItem) -> publish_scripts.Publication:
        """The entry that an item becomes.

        Raises:
            InvalidRequestError: its channel does not exist.
        """
        num_channels = self._settings.num_channels
        if not 0 <= item.channel_id < num_channels:
            raise InvalidRequestError.of(
                "channel_id", f"{item.channel_id} does not exist; channels are 0 to {num_channels - 1}"
            )
        sealed, content = seal_item(item, self._settings.trace_of(item))
        return publish_scripts.Publication(
            channel_id=item.channel_id,
            request_id=item.request_id,
            question_index=item.question_index,
            digest=hashlib.blake2b(content, digest_size=16).digest(),
            head_start_ms=item.priority * self._settings.priority_step_ms,
            envelope=sealed,
            ttl_ms=item.time_budget_ms + self._hold_ttl_ms,
        )

    def refusal_of(
        self, publication: publish_scripts.Publication, published: publish_scripts.Published
    ) -> QueueFullError | None:
        """Why an entry was not appended; None: it was."""
        settings, states = self._settings, publish_scripts.PublishState
        bounds = {
            states.FULL_OF_ENTRIES: (settings.max_entries_per_channel, "questions"),
            states.FULL_OF_BYTES: (settings.max_bytes_per_channel, "bytes"),
        }
        if published.state not in bounds:
            return None
        return QueueFullError.of_channel(publication.channel_id, published.num_held, *bounds[published.state])

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
                held=list(self._held.values()),
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
        self._held[item.key] = (entry.channel_id, entry.entry_id)
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

    def _hold_report_of(self, report: Report) -> lease_scripts.HoldReport:
        return lease_scripts.HoldReport(
            hold=self._hold_of(report.lease),
            envelopes=[seal(event, report.lease.trace) for event in report.events],
            ending="" if report.outcome is None else Ending.of(report.outcome).mark,
        )

    async def _report(self, reports: Sequence[lease_scripts.HoldReport]) -> list[ReportState]:
        """Report in one call; a server without room for progress still takes outcomes."""
        send = partial(
            lease_scripts.report,
            self._link,
            max_events=self._settings.max_events,
            hold_ttl_ms=self._hold_ttl_ms,
            outcome_ttl_ms=self._settings.retention_ms,
        )
        try:
            return await send(reports)
        except StoreFullError:
            ends = [report for report in reports if report.ending]
            states = iter(await send(ends) if ends else ())
            return [next(states) if report.ending else ReportState.FULL for report in reports]

    def _let_go(self, leases: Sequence[Lease]) -> None:
        """Forget leases; their channels may have something else for this process."""
        for lease in leases:
            _, entry_id = self._held.get(lease.item.key, (0, ""))
            if entry_id == lease.lease_id.partition(" ")[0]:
                del self._held[lease.item.key]
                self._work_changed.set()

    async def _hand_back(self, leases: Sequence[Lease]) -> list[bool]:
        holds = [self._hold_of(lease) for lease in leases]
        handed_back = await lease_scripts.hand_back(self._link, holds, self._hold_ttl_ms) if holds else []
        self._let_go(leases)
        return handed_back

    async def _take_notices(self) -> None:
        for request_id, question_index, entry_id in await lease_scripts.take_notices(self._link, self._consumer):
            key = (request_id, question_index)
            if self._held.get(key, (0, entry_id))[1] != entry_id:
                continue
            self._held.pop(key, None)
            self._notices[key] = None
        while len(self._notices) > MAX_NOTICES:
            del self._notices[next(iter(self._notices))]


def parts_of(things: Sequence[T], size_of: Callable[[T], int] = lambda _: 0) -> Iterator[Sequence[T]]:
    """The things in their order, in pieces that one script call may work on."""
    first = num_bytes = 0
    for place, thing in enumerate(things):
        size = size_of(thing)
        if place > first and (place - first >= _MAX_PER_CALL or num_bytes + size > _MAX_BYTES_PER_CALL):
            yield things[first:place]
            first, num_bytes = place, 0
        num_bytes += size
    if things:
        yield things[first:]
