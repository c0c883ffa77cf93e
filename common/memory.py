"""The transport of the embedded form: work streams and result stream inside one event loop.

Invariants and semantics: every operation changes state in one piece between two awaits, so a cancelled call has either
happened or not, and no waiting call can lose an item. A lease that ran out stays with its holder until somebody else
takes the item; from then on the former holder is refused. Each grant of a lease has its own id, so a handed-back or
lost lease never works again, whatever its attempt number. Called directly, the transport is one nameless consumer;
several share it through ``common.memory_consumer``. Entries and their bytes are bounded per channel. Unread progress is
bounded in total: a full event stream refuses more until its reader has read, and takes outcomes, which are bounded by
what was admitted. Durations come from the clock; only the length of a wait is real time.

Not here: durability (the process is the unit of failure), the decision to dead-letter (the worker counts attempts).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.errors import InvalidRequestError, InvariantError, KevError, QueueFullError
from common.memory_channel import Channel, Entry
from common.memory_sharing import share_out
from common.ports import Clock, Lease, Report, ReportState
from common.types import ChannelEvent, ChannelResult, ErrorInfo, FinishReason, WorkItem
from common.wakeup import WakeUp

_MAX_DEAD_LETTERS = 100
_MAX_NOTICES = 65_536
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An item set aside for an operator."""

    item: WorkItem
    attempt: int
    error: ErrorInfo


async def _until(condition: Callable[[], bool], changed: WakeUp, wait_s: float) -> None:
    """Return when the condition holds or ``wait_s`` seconds have passed; looks again after each change."""
    if condition() or wait_s <= 0:
        return
    try:
        async with asyncio.timeout(wait_s):
            while not condition():
                await changed.wait()
    except TimeoutError:
        pass


class MemoryTransport:
    """``WorkStreams`` and ``ResultStream`` in memory."""

    def __init__(
        self,
        *,
        num_channels: int,
        clock: Clock,
        lease_timeout_s: float = 15.0,
        max_entries_per_channel: int = 1024,
        max_bytes_per_channel: int = 67_108_864,
        max_events: int = 65_536,
        priority_step_ms: float = 100.0,
    ) -> None:
        """Create empty streams.

        Args:
            num_channels: channels exist with ids 0 to this, exclusive.
            clock: measures ages and leases.
            lease_timeout_s: seconds a lease holds without renewal.
            max_entries_per_channel: most items of one channel that wait or are leased.
            max_bytes_per_channel: a channel takes no further item once its items have so many bytes.
            max_events: unread events from which on no more progress is taken.
            priority_step_ms: how much earlier than it came an item stands in line for each step of priority.
        """
        sizes = (num_channels, max_entries_per_channel, max_bytes_per_channel, max_events)
        if min(sizes) < 1 or lease_timeout_s <= 0:
            raise InvariantError("a memory transport needs room for something, and a lease time")
        self._channels = [Channel() for _ in range(num_channels)]
        self._entries: dict[str, dict[int, Entry]] = {}
        self._clock = clock
        self._lease_timeout_s = lease_timeout_s
        self._max_entries_per_channel = max_entries_per_channel
        self._max_bytes_per_channel = max_bytes_per_channel
        self._max_events = max_events
        self._priority_step_s = priority_step_ms / 1000
        self._events: deque[ChannelEvent] = deque()
        self._unread: set[tuple[str, int]] = set()
        """Questions whose outcome is among the events."""
        self._notices: dict[tuple[str, int], str] = {}
        """Withdrawn leases, with their holder."""
        self._rooms: dict[str, int] = {}
        """Consumers that wait for work, and how much they would take."""
        self._dead_letters: deque[DeadLetter] = deque(maxlen=_MAX_DEAD_LETTERS)
        self._orders = itertools.count()
        self._grants = itertools.count()
        self._work_changed = WakeUp()
        self._events_changed = WakeUp()
        self._notices_changed = WakeUp()

    @property
    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """The latest items set aside, oldest first."""
        return tuple(self._dead_letters)

    # ---- router's side

    async def publish(self, items: Sequence[WorkItem]) -> list[QueueFullError | None]:
        """Append items to their channels' streams; see ``common.ports.WorkStreams``."""
        for item in items:
            if not 0 <= item.channel_id < len(self._channels):
                raise InvalidRequestError.of(
                    "channel_id", f"{item.channel_id} does not exist; channels are 0 to {len(self._channels) - 1}"
                )
        refusals = [self._append(item) for item in items]
        self._work_changed.wake_all()
        return refusals

    async def cancel(self, request_id: str, question_indexes: Sequence[int] | None = None) -> None:
        """Withdraw questions; a withdrawn lease answers False from now on; see ``common.ports.WorkStreams``."""
        entries = self._entries.get(request_id, {})
        indexes: Iterable[int] = list(entries) if question_indexes is None else question_indexes
        for index in indexes:
            self._withdraw((request_id, index))

    async def depths(self) -> list[int]:
        """Items per channel that are waiting or leased, index = channel id."""
        return [channel.depth for channel in self._channels]

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """None: what is published stays until its outcome."""
        return []

    # ---- node's side

    async def lease(self, max_items: int, wait_s: float, consumer: str = "") -> list[Lease]:
        """Take up to ``max_items`` items, at most one per channel; see ``common.ports.WorkStreams``."""
        leases = self._take(max_items, consumer)
        if leases or max_items < 1 or wait_s <= 0:
            return leases
        self._rooms[consumer] = max_items
        try:
            async with asyncio.timeout(wait_s):
                while not (leases := self._take(max_items, consumer)):
                    await self._work_changed.wait(self._until_expiry_s())
        except TimeoutError:
            pass
        finally:
            self._rooms.pop(consumer, None)
            if self._rooms:  # what was left to this consumer is theirs now
                self._work_changed.wake_all()
        return leases

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Extend leases by the full lease time; see ``common.ports.WorkStreams``."""
        entries = [self._held(lease) for lease in leases]
        for entry in entries:
            if entry is not None:
                entry.expires_at_s = self._clock.monotonic() + self._lease_timeout_s
        return [entry is not None for entry in entries]

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        """Tell the aggregator what happened; see ``common.ports.WorkStreams``."""
        return [self._take_in(report) for report in reports]

    async def hand_back(self, leases: Sequence[Lease]) -> list[bool]:
        """Return unstarted items at once to the heads of their channels; see ``common.ports.WorkStreams``."""
        handed_back = [self._put_back(lease) for lease in leases]
        self._work_changed.wake_all()
        return handed_back

    def give_up(self, leases: Sequence[Lease]) -> None:
        """Leave items to other consumers, at once and in a further attempt."""
        for lease in leases:
            entry = self._held(lease)
            if entry is not None:
                self._channels[entry.item.channel_id].take_back(entry)
                entry.given_up_by = entry.consumer
        self._work_changed.wake_all()

    def leave(self, consumer: str, *, is_last_but_one: bool) -> None:
        """A consumer has ended: others have its items at once, in a further attempt.

        Args:
            consumer: the one that has ended.
            is_last_but_one: one is left; it takes what it had given up, too.
        """
        for channel in self._channels:
            if consumer in channel.leased:
                channel.take_back(channel.leased[consumer])
            for entry in channel.waiting if is_last_but_one else ():
                entry.given_up_by = None
        self._work_changed.wake_all()

    async def dead_letter(self, lease: Lease, error: KevError) -> bool:
        """Set the item aside and report an error outcome for its question."""
        item = lease.item
        outcome = ChannelResult(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            finish_reason=FinishReason.ERROR,
            num_prompt_tokens=len(item.prompt.ids),
            num_truncated=item.prompt.num_truncated,
            finished_at=self._clock.time(),
            attempt=lease.attempt,
            error=error.info,
        )
        if self._take_in(Report(lease=lease, events=(outcome,))) is not ReportState.COMMITTED:
            return False
        self._dead_letters.append(DeadLetter(item=item, attempt=lease.attempt, error=error.info))
        return True

    async def cancellations(self, wait_s: float, consumer: str = "") -> list[tuple[str, int]]:
        """Leased questions withdrawn since the last call, waiting up to ``wait_s`` seconds for the first one."""
        await _until(lambda: consumer in self._notices.values(), self._notices_changed, wait_s)
        withdrawn = [key for key, holder in self._notices.items() if holder == consumer]
        for key in withdrawn:
            del self._notices[key]
        return withdrawn

    # ---- aggregator's side

    async def read(self, max_events: int, wait_s: float) -> list[ChannelEvent]:
        """Take up to ``max_events`` events; waits up to ``wait_s`` seconds for the first one."""
        await _until(lambda: bool(self._events), self._events_changed, wait_s)
        taken = [self._events.popleft() for _ in range(min(max_events, len(self._events)))]
        self._unread -= {event.key for event in taken if isinstance(event, ChannelResult)}
        return taken

    @property
    def num_gaps(self) -> int:
        """0: the reader is given everything."""
        return 0

    async def settle(self, outcomes: Sequence[ChannelResult]) -> list[int]:
        """Give questions of one request these outcomes, unless they have one; see ``common.ports.ResultStream``.

        Outcomes that were read are the reader's to know.
        """
        settled = [outcome for outcome in outcomes if outcome.key not in self._unread]
        for outcome in settled:
            self._withdraw(outcome.key)
            self._add_events([outcome])
        return [outcome.question_index for outcome in settled]

    # ---- shared

    def _append(self, item: WorkItem) -> QueueFullError | None:
        if self._find(item.key) is not None:
            return None
        channel = self._channels[item.channel_id]
        for held, limit, unit in (
            (channel.depth, self._max_entries_per_channel, "questions"),
            (channel.num_bytes, self._max_bytes_per_channel, "bytes"),
        ):
            if held >= limit:
                return QueueFullError.of_channel(item.channel_id, held, limit, unit)
        now_s = self._clock.monotonic()
        entry = Entry(
            item=item,
            order=next(self._orders),
            published_at_s=now_s,
            in_line_since_s=now_s - item.priority * self._priority_step_s,
            num_bytes=_TOKEN_BYTES * len(item.prompt.ids),
        )
        self._entries.setdefault(item.request_id, {})[item.question_index] = entry
        channel.append(entry)
        return None

    def _take_in(self, report: Report) -> ReportState:
        entry = self._held(report.lease)
        if entry is None:
            # An entry leaves only with an outcome: committed, dead-lettered or withdrawn.
            is_gone = report.outcome is not None and self._find(report.lease.item.key) is None
            return ReportState.ALREADY_COMMITTED if is_gone else ReportState.STALE
        if report.outcome is None and len(self._events) >= self._max_events:
            return ReportState.FULL
        self._add_events(report.events)
        if report.outcome is None:
            return ReportState.HELD
        self._remove(entry)
        return ReportState.COMMITTED

    def _add_events(self, events: Iterable[ChannelEvent]) -> None:
        self._events.extend(events)
        self._unread |= {event.key for event in events if isinstance(event, ChannelResult)}
        self._events_changed.wake_all()

    def _withdraw(self, key: tuple[str, int]) -> None:
        """Remove the question's item, if there is one, and tell whoever holds it."""
        entry = self._find(key)
        if entry is None:
            return
        if entry.lease_id:
            self._notify(key, entry.consumer)
        self._remove(entry)

    def _put_back(self, lease: Lease) -> bool:
        entry = self._held(lease)
        if entry is None:
            return False
        self._channels[entry.item.channel_id].take_back(entry)
        entry.attempt -= 1
        return True

    def _take(self, max_items: int, consumer: str) -> list[Lease]:
        now_s = self._clock.monotonic()
        heads = [head for channel in self._channels if (head := channel.head(consumer, now_s)) is not None]
        heads.sort(key=lambda entry: (not entry.attempt, entry.in_line_since_s, entry.order))
        if self._rooms.keys() - {consumer}:
            heads = self._share_of(consumer, heads, max_items, now_s)
        return [self._grant(entry, consumer, now_s) for entry in heads[: max(0, max_items)]]

    def _share_of(self, consumer: str, heads: Sequence[Entry], max_items: int, now_s: float) -> list[Entry]:
        """What is left of the heads beside the consumers that wait for work, too."""
        rooms = {**self._rooms, consumer: max_items}
        loads = {name: sum(name in channel.leased for channel in self._channels) for name in rooms}
        able = [
            [name for name in rooms if self._channels[entry.item.channel_id].head(name, now_s) is entry]
            for entry in heads
        ]
        receivers = share_out(able, loads, rooms)
        return [entry for entry, receiver in zip(heads, receivers, strict=True) if receiver == consumer]

    def _grant(self, entry: Entry, consumer: str, now_s: float) -> Lease:
        self._channels[entry.item.channel_id].give(entry, consumer)
        entry.attempt += 1
        entry.lease_id = f"{entry.order}-{next(self._grants)}"
        entry.expires_at_s = now_s + self._lease_timeout_s
        # A notice still unread concerns an earlier publication of the same question.
        self._notices.pop(entry.item.key, None)
        return Lease(
            lease_id=entry.lease_id,
            item=entry.item,
            attempt=entry.attempt,
            age_ms=(now_s - entry.published_at_s) * 1000.0,
        )

    def _until_expiry_s(self) -> float | None:
        expiries_s = [entry.expires_at_s for channel in self._channels for entry in channel.leased.values()]
        return max(0.0, min(expiries_s) - self._clock.monotonic()) if expiries_s else None

    def _find(self, key: tuple[str, int]) -> Entry | None:
        request_id, question_index = key
        return self._entries.get(request_id, {}).get(question_index)

    def _held(self, lease: Lease) -> Entry | None:
        entry = self._find(lease.item.key)
        return entry if entry is not None and entry.lease_id == lease.lease_id else None

    def _notify(self, key: tuple[str, int], holder: str) -> None:
        # Dropping the oldest is harmless: its holder is refused at the next renewal or report.
        if len(self._notices) >= _MAX_NOTICES:
            del self._notices[next(iter(self._notices))]
        self._notices[key] = holder
        self._notices_changed.wake_all()

    def _remove(self, entry: Entry) -> None:
        siblings = self._entries[entry.item.request_id]
        del siblings[entry.item.question_index]
        if not siblings:
            del self._entries[entry.item.request_id]
        self._channels[entry.item.channel_id].remove(entry)
        self._work_changed.wake_all()
