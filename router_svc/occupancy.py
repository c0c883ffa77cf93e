"""What is on every channel, and where a question should go that was meant for one of them.

Invariants and semantics: a channel has room while it holds fewer than ``max_entries`` questions and less than
``max_bytes`` bytes; so its bytes stay below the bound plus those of one question, and a question of any size fits an
idle channel.

The breaker: a question goes to the shortest channel instead of the one picked if that one is ``queue_length`` or more
outstanding questions longer than the shortest one (an idle channel has none), if it has no room, or if its ``Breaker``
is open. The shortest one is looked for in the lane of the pick, among the channels that have room and whose breakers
take questions; where there are none, among all that have room. Of equally short ones it is the next after the pick,
counted round. ``queue_length`` 0 switches all of it off.

Shares matter once four questions a channel have come lately, while one channel in four is busy. Then of equally short
channels the one is taken that has had the fewest of the latest questions; and a channel that has had more than
``share_bound`` times the mean of its lane is spared: a question for it goes to the one that has had the fewest among
those that hold no more. So one popular bucket does not make one busy channel.

Not here: who waits, the pace (``channels``), clocks (time is passed in).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from common.errors import InvariantError
from common.types import BreakerState, ChannelSnapshot, Diversion
from router_svc.breakers import Breaker, BreakerRules
from router_svc.windows import SlidingCounts

_LOOK_INTERVAL_S = 0.25
"""How often all breakers are told the time; questions come far more often."""

LATE = "late"
"""Failure of a question whose outcome, of which nothing else is known, came when its time was up."""

_MIN_RECENT = 4
"""Questions a channel, on average, from which on shares mean something."""
_BUSY_SHARE = 4
"""One channel in so many must be busy for shares to matter."""

QuestionT = TypeVar("QuestionT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a question was put."""

    channel_id: int
    hash_bucket: int
    diverted_from: int | None = None
    """Channel that the strategy had picked, when the breaker chose another one."""
    diverted_why: Diversion | None = None
    """Why it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burden:
    """What a question means to the channel that has it."""

    num_bytes: int = 0
    num_tokens: int = 1
    """Of prompt and answer, at least 1."""
    expires_at_s: float | None = None
    """When its time budget ends; an outcome from then on is a failure. None: never."""
    head_start_s: float = 0.0
    """How much earlier than it came it stands in the overflow queue; later, if negative."""


class Recent(NamedTuple):
    """What came in the window."""

    num_questions: int
    num_tokens: int
    """Of these questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of every channel."""

    max_entries: int
    max_bytes: int | None = None
    """None: no bound."""
    queue_length: int = 0
    """See the module."""
    share_bound: float | None = None
    """Most of the latest questions, as a multiple of the mean; None: no bound."""


@dataclass(slots=True)
class Place:
    """A question's place on a channel."""

    placement: Placement
    burden: Burden
    since_s: float | None
    """None: at a time that nobody told."""
    probe: int | None
    """Its number, if it is the probe of a half-open breaker."""
    failure: str | None = None
    """The kind of its failure, as it was said, or empty for a success; None: nothing was said."""
    says_nothing: bool = False
    """Its outcome says nothing about the channel: cancelled."""


class Occupancy(Generic[QuestionT]):
    """All channels of a pool."""

    def __init__(self, num_channels: int, limits: Limits, rules: BreakerRules, recent_s: float) -> None:
        """Idle channels; ``recent_s`` is the window of ``ChannelSnapshot.num_recent``."""
        self.loads = [0] * num_channels
        """Outstanding questions per channel. For reading only."""
        self.num_idle = num_channels
        """Channels without a question. For reading only."""
        self._bytes = [0] * num_channels
        self._lines: list[OrderedDict[QuestionT, Place]] = [OrderedDict() for _ in range(num_channels)]
        self._num_placed = [0] * num_channels
        self._num_diverted = [0] * num_channels
        self._recent: SlidingCounts[int] = SlidingCounts(recent_s)
        self._recent_tokens: SlidingCounts[int] = SlidingCounts(recent_s)
        self._limits = limits
        self._breakers = [Breaker(rules) for _ in range(num_channels)]
        self._has_breakers = rules.can_open and limits.queue_length > 0
        self._all_take = True
        """Every breaker takes questions and no channel has its fill of bytes: the usual case, and a quick one."""
        self._next_look_s = float("-inf")

    def has_room(self, channel_id: int) -> bool:
        """Whether a channel takes one more."""
        limits = self._limits
        return self.loads[channel_id] < limits.max_entries and (
            limits.max_bytes is None or self._bytes[channel_id] < limits.max_bytes
        )

    def detour(self, picked: int, lane: range | None) -> tuple[int, Diversion | None]:
        """The channel for a question whose strategy picked ``picked``, and why if it is another one."""
        if not self._limits.queue_length:
            return picked, None
        other = self._shortest(picked, lane)
        why = self._why_divert(picked, other)
        if why is None:
            spare = self._spare(picked, lane, self.loads[picked]) if self._has_had_its_share(picked, lane) else picked
            return (picked, None) if spare == picked else (spare, Diversion.SHARE)
        if why is Diversion.QUEUE_LENGTH and self._shares_matter(lane):
            other = self._spare(picked, lane, self.loads[other])
        return other, why

    def put_on(self, question: QuestionT, placement: Placement, burden: Burden, now_s: float | None) -> Place:
        """A question takes its place."""
        channel_id, max_bytes = placement.channel_id, self._limits.max_bytes
        probe = None if self._all_take else self._breakers[channel_id].begin()
        place = self._lines[channel_id][question] = Place(placement, burden, now_s, probe)
        self.num_idle -= not self.loads[channel_id]
        self.loads[channel_id] += 1
        self._num_placed[channel_id] += 1
        if placement.diverted_from is not None:
            self._num_diverted[placement.diverted_from] += 1
        if now_s is not None:
            self._recent.add(channel_id, now_s)
            self._recent_tokens.add(channel_id, now_s, burden.num_tokens)
        self._bytes[channel_id] += burden.num_bytes
        if max_bytes is not None and self._bytes[channel_id] >= max_bytes:
            self._all_take = False
        return place

    def take_off(self, question: QuestionT, place: Place) -> None:
        """A question leaves its place."""
        channel_id = place.placement.channel_id
        del self._lines[channel_id][question]
        self.loads[channel_id] -= 1
        self.num_idle += not self.loads[channel_id]
        self._bytes[channel_id] -= place.burden.num_bytes
        if not self._all_take:
            self._see_who_takes()

    def judge(self, place: Place, now_s: float) -> None:
        """A question that left had its outcome: tell the breaker of its channel."""
        breaker, expires_at_s = self._breakers[place.placement.channel_id], place.burden.expires_at_s
        if not self._has_breakers or place.says_nothing:
            breaker.forget(place.probe)
            return
        is_late = expires_at_s is not None and now_s >= expires_at_s
        before, failure = breaker.state, place.failure
        if failure is None:
            failure = LATE if is_late else ""
        breaker.end(now_s, failure=failure, probe=place.probe)
        if breaker.state is not before:
            self._see_who_takes()

    def forget(self, place: Place) -> None:
        """A question that left never ran: its place does not count as used."""
        placement = place.placement
        self._breakers[placement.channel_id].forget(place.probe)
        self._num_placed[placement.channel_id] -= 1
        if placement.diverted_from is not None:
            self._num_diverted[placement.diverted_from] -= 1

    def look(self, now_s: float, *, at_once: bool = False) -> None:
        """Tell the breakers the time, if it is long enough ago or has to be ``at_once``."""
        if self._has_breakers and (at_once or now_s >= self._next_look_s):
            self._next_look_s = now_s + _LOOK_INTERVAL_S
            for breaker, line in zip(self._breakers, self._lines, strict=True):
                breaker.look(now_s, next(iter(line.values())).since_s if line else None)
            self._see_who_takes()

    def recent(self, now_s: float | None) -> list[Recent]:
        """What was placed on each channel in the window, index = channel id."""
        if now_s is not None:
            self._recent.move_to(now_s)
            self._recent_tokens.move_to(now_s)
        count, count_tokens = self._recent.count, self._recent_tokens.count
        return [Recent(count(channel_id), count_tokens(channel_id)) for channel_id in range(len(self.loads))]

    def snapshots(self, now_s: float | None) -> list[ChannelSnapshot]:
        """Every channel, by id."""
        other = self._shortest(0, None) if self._limits.queue_length else None
        counts = enumerate(self.recent(now_s))
        return [self._snapshot(channel_id, other, recent, now_s) for channel_id, recent in counts]

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            InvariantError: loads, bytes and bounds do not match who is here.
        """
        places = [place for line in self._lines for place in line.values()]
        counted: list[int] = [0] * len(self.loads)
        num_bytes: list[int] = [0] * len(self.loads)
        for place in places:
            counted[place.placement.channel_id] += 1
            num_bytes[place.placement.channel_id] += place.burden.num_bytes
        if not counted == self.loads == [len(line) for line in self._lines] or self.num_idle != counted.count(0):
            raise InvariantError(f"channel loads are {self.loads}, counted {counted}")
        if num_bytes != self._bytes or max(counted) > self._limits.max_entries:
            raise InvariantError(f"channel bytes are {self._bytes}, counted {num_bytes}; loads {counted}")

    def _shortest(self, picked: int, lane: Sequence[int] | None) -> int:
        """The channel that questions for ``picked`` are diverted to."""
        loads = self.loads
        if self._all_take and lane is None:
            shortest = min(loads)
            return loads.index(shortest, picked) if shortest in loads[picked:] else loads.index(shortest)
        lane = range(len(loads)) if lane is None else lane
        with_room = [channel_id for channel_id in lane if self.has_room(channel_id)]
        taking = with_room if self._all_take else [c for c in with_room if self._breakers[c].takes]
        return min(taking or with_room or lane, key=lambda c: (loads[c], c < picked, c))

    def _why_divert(self, picked: int, other: int) -> Diversion | None:
        """Why a question whose strategy picked a channel should go to another one; None: it should not."""
        if other == picked or not self.has_room(other):
            return None
        breakers = self._breakers
        if not self._all_take and not breakers[picked].takes and breakers[other].takes:
            return breakers[picked].why
        if not self.has_room(picked):
            return Diversion.FULL
        is_long = self.loads[picked] - self.loads[other] >= self._limits.queue_length
        return Diversion.QUEUE_LENGTH if is_long else None

    def _shares_matter(self, lane: Sequence[int] | None) -> bool:
        """Whether the latest questions are many enough, and the pool busy enough."""
        num_channels = len(self.loads)
        if self._limits.share_bound is None or self._recent.total < _MIN_RECENT * num_channels:
            return False
        return self._num_recent(lane) >= _MIN_RECENT * len(lane or self.loads) and (
            sum(map(bool, self.loads)) * _BUSY_SHARE >= num_channels
        )

    def _has_had_its_share(self, picked: int, lane: Sequence[int] | None) -> bool:
        bound, count, num_channels = self._limits.share_bound, self._recent.count(picked), len(lane or self.loads)
        # The cheap question first: most channels are far below any bound.
        if bound is None or count < _MIN_RECENT or not self._shares_matter(lane):
            return False
        return (count + 1) * num_channels > bound * (self._num_recent(lane) + num_channels)

    def _num_recent(self, lane: Sequence[int] | None) -> int:
        return self._recent.total if lane is None else sum(map(self._recent.count, lane))

    def _spare(self, picked: int, lane: Sequence[int] | None, max_load: int) -> int:
        """The channel that has had the fewest of the latest questions among those that hold so many or fewer."""
        loads, count = self.loads, self._recent.count
        able = [
            channel_id
            for channel_id in (range(len(loads)) if lane is None else lane)
            if loads[channel_id] <= max_load
            and (self._all_take or (self.has_room(channel_id) and self._breakers[channel_id].takes))
        ]
        return min(able, key=lambda c: (count(c), loads[c], c < picked, c), default=picked)

    def _see_who_takes(self) -> None:
        max_bytes = self._limits.max_bytes
        self._all_take = (max_bytes is None or max(self._bytes) < max_bytes) and (
            not self._has_breakers or all(breaker.state is BreakerState.CLOSED for breaker in self._breakers)
        )

    def _snapshot(self, channel_id: int, other: int | None, recent: Recent, now_s: float | None) -> ChannelSnapshot:
        breaker, line = self._breakers[channel_id], self._lines[channel_id]
        why, state = breaker.why, breaker.state
        diverts_why = None if other is None else self._why_divert(channel_id, other)
        if state is BreakerState.CLOSED and diverts_why is not None:
            state, why = BreakerState.OPEN, diverts_why
        oldest_s = next(iter(line.values())).since_s if line else None
        age_s = 0.0 if oldest_s is None or now_s is None else now_s - oldest_s
        return ChannelSnapshot(
            channel_id=channel_id,
            num_queued=self.loads[channel_id],
            num_total=self._num_placed[channel_id],
            num_diverted=self._num_diverted[channel_id],
            breaker_open=diverts_why is not None,
            breaker=state,
            breaker_why=why,
            num_bytes=self._bytes[channel_id],
            oldest_ms=round(age_s * 1000),
            num_recent=recent.num_questions,
            num_recent_tokens=recent.num_tokens,
            num_recent_failures=breaker.num_failed,
            main_failure=breaker.main_failure,
        )
