"""The transport of the embedded form: work streams and result stream inside one event loop.

Invariants and semantics: every operation changes state in one piece between two awaits, so a cancelled call has either
happened or not, and no waiting call can lose an item. A lease that ran out stays with its holder until somebody else
takes the item; from then on the former holder is refused. Each grant of a lease has its own id, so a handed-back or
lost lease never works again, whatever its attempt number. The whole transport is one consumer: at most one item of a
channel is leased at a time. Entries and their bytes are bounded per channel. Unread progress is bounded in total: a
full event stream refuses more until its reader has read, and takes outcomes, which are bounded by what was admitted.
Durations come from the clock; only the length of a wait is real time.

Not here: durability (the process is the unit of failure), the decision to dead-letter (the worker counts attempts).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidRequestError, InvariantError, KevError, QueueFullError
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


@dataclass(slots=True, eq=False)
class _Entry:
    item: WorkItem
    order: int
    published_at_s: float
    num_bytes: int
    attempt: int = 0
    lease_id: str = ""
    """Of the current lease; empty while the entry waits."""
    expires_at_s: float = 0.0


@dataclass(slots=True)
class _Channel:
    waiting: deque[_Entry] = field(default_factory=deque)
    leased: _Entry | None = None
    num_bytes: int = 0

    @property
    def depth(self) -> int:
        return len(self.waiting) + (self.leased is not None)

    def head(self, now_s: float) -> _Entry | None:
        """The entry that may be leased now."""
        if self.leased is not None:
            return self.leased if self.leased.expires_at_s <= now_s else None
        return self.waiting[0] if self.waiting else None


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
    ) -> None:
        """Create empty streams.

        Args:
            num_channels: channels exist with ids 0 to this, exclusive.
            clock: measures ages and leases.
            lease_timeout_s: seconds a lease holds without renewal.
            max_entries_per_channel: most items of one channel that wait or are leased.
            max_bytes_per_channel: a channel takes no further item once its items have so many bytes.
            max_events: unread events from which on no more progress is taken.
        """
        sizes = (num_channels, max_entries_per_channel, max_bytes_per_channel, max_events)
        if min(sizes) < 1 or lease_timeout_s <= 0:
            raise InvariantError("a memory transport needs room for something, and a lease time")
        self._channels = [_Channel() for _ in range(num_channels)]
        self._entries: dict[str, dict[int, _Entry]] = {}
        self._clock = clock
        self._lease_timeout_s = lease_timeout_s
        self._max_entries_per_channel = max_entries_per_channel
        self._max_bytes_per_channel = max_bytes_per_channel
        self._max_events = max_events
        self._events: deque[ChannelEvent] = deque()
        self._unread: set[tuple[str, int]] = set()
        """Questions whose outcome is among the events."""
        self._notices: dict[tuple[str, int], None] = {}
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

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        """Take up to ``max_items`` items, at most one per channel; see ``common.ports.WorkStreams``."""
        leases = self._take(max_items)
        if leases or max_items < 1 or wait_s <= 0:
            return leases
        try:
            async with asyncio.timeout(wait_s):
                while not (leases := self._take(max_items)):
                    await self._work_changed.wait(self._until_expiry_s())
        except TimeoutError:
            pass
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

    async def cancellations(self, wait_s: float) -> list[tuple[str, int]]:
        """Leased questions withdrawn since the last call, waiting up to ``wait_s`` seconds for the first one."""
        await _until(lambda: bool(self._notices), self._notices_changed, wait_s)
        withdrawn = list(self._notices)
        self._notices.clear()
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
        entry = _Entry(
            item=item,
            order=next(self._orders),
            published_at_s=self._clock.monotonic(),
            num_bytes=_TOKEN_BYTES * len(item.prompt.ids),
        )
        self._entries.setdefault(item.request_id, {})[item.question_index] = entry
        channel.waiting.append(entry)
        channel.num_bytes += entry.num_bytes
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
            self._notify(key)
        self._remove(entry)

    def _put_back(self, lease: Lease) -> bool:
        entry = self._held(lease)
        if entry is None:
            return False
        entry.attempt -= 1
        entry.lease_id = ""
        channel = self._channels[entry.item.channel_id]
        channel.leased = None
        channel.waiting.appendleft(entry)
        return True

    def _take(self, max_items: int) -> list[Lease]:
        now_s = self._clock.monotonic()
        heads = [head for channel in self._channels if (head := channel.head(now_s)) is not None]
        heads.sort(key=lambda entry: (not entry.lease_id, entry.order))
        return [self._grant(entry, now_s) for entry in heads[: max(0, max_items)]]

    def _grant(self, entry: _Entry, now_s: float) -> Lease:
        channel = self._channels[entry.item.channel_id]
        if channel.leased is not entry:
            channel.leased = channel.waiting.popleft()
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
        expiries_s = [channel.leased.expires_at_s for channel in self._channels if channel.leased is not None]
        return max(0.0, min(expiries_s) - self._clock.monotonic()) if expiries_s else None

    def _find(self, key: tuple[str, int]) -> _Entry | None:
        request_id, question_index = key
        return self._entries.get(request_id, {}).get(question_index)

    def _held(self, lease: Lease) -> _Entry | None:
        entry = self._find(lease.item.key)
        return entry if entry is not None and entry.lease_id == lease.lease_id else None

    def _notify(self, key: tuple[str, int]) -> None:
        # Dropping the oldest is harmless: its holder is refused at the next renewal or report.
        if len(self._notices) >= _MAX_NOTICES:
            del self._notices[next(iter(self._notices))]
        self._notices[key] = None
        self._notices_changed.wake_all()

    def _remove(self, entry: _Entry) -> None:
        siblings = self._entries[entry.item.request_id]
        del siblings[entry.item.question_index]
        if not siblings:
            del self._entries[entry.item.request_id]
        channel = self._channels[entry.item.channel_id]
        channel.num_bytes -= entry.num_bytes
        if channel.leased is entry:
            channel.leased = None
        else:
            channel.waiting.remove(entry)
        entry.lease_id = ""
        self._work_changed.wake_all()
