"""The channel pool: places, breaker, overflow queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InvariantError
from common.types import BreakerState, Diversion
from router_svc.breakers import BreakerRules
from router_svc.channels import Burden, ChannelPool, Chooser, Placement
from router_svc.strategies import Pick


@cache
def to(channel_id: int, *, may_divert: bool = True) -> Chooser:
    def choose(loads: Sequence[int]) -> Pick:
        return Pick(channel_id=channel_id, hash_bucket=100 + channel_id, may_divert=may_divert)

    return choose


def pool_of(num_channels: int = 3, size: int = 2, overflow: int | None = 0, breaker: int = 0) -> ChannelPool[int]:
    return ChannelPool(
        num_channels, channel_queue_size=size, overflow_queue_size=overflow, breaker_queue_length=breaker
    )


def test_channels_are_there_from_the_start() -> None:
    """The pool would grow with traffic instead of being a bound."""
    assert [(c.channel_id, c.num_queued, c.breaker_open) for c in pool_of().snapshots()] == [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
    ]


def test_a_popular_channel_is_spared_once_it_has_had_its_share() -> None:
    """One popular bucket would make one busy channel, though it is free whenever a question for it comes."""
    pool: ChannelPool[int] = ChannelPool(
        8, channel_queue_size=8, overflow_queue_size=0, breaker_queue_length=1, share_bound=1.25, recent_s=60.0
    )
    for busy in range(3):
        assert pool.place(-1 - busy, to(7 - busy), now_s=0.0) is not None
    num_placed, whys = Counter[int](), set()
    for number in range(400):
        now_s = number / 100
        placement = pool.place(number, to(0) if number % 2 else to(number // 2 % 5), now_s=now_s)
        assert placement is not None
        whys.add(placement.diverted_why)
        num_placed[placement.channel_id] += 1
        pool.release(number, now_s)
    assert whys == {None, Diversion.SHARE}
    # Three channels are busy all the time and take nothing.
    assert max(num_placed.values()) <= 1.3 * 400 / 5
    assert min(pool.loads) == 0


@pytest.mark.parametrize(("num_busy", "num_questions"), [(1, 200), (3, 30)])
def test_shares_say_nothing_about_few_questions_or_an_idle_pool(num_busy: int, num_questions: int) -> None:
    """Somebody who tries a question a few times finds it on other channels than the strategy says."""
    pool: ChannelPool[int] = ChannelPool(
        8, channel_queue_size=8, overflow_queue_size=0, breaker_queue_length=1, share_bound=1.25, recent_s=60.0
    )
    for busy in range(num_busy):
        pool.place(-1 - busy, to(7 - busy), now_s=0.0)
    for number in range(num_questions - num_busy):
        placement = pool.place(number, to(0), now_s=0.0)
        assert placement is not None and placement.channel_id == 0
        pool.release(number, 0.0)


def test_a_full_channel_takes_no_more() -> None:
    """A channel would queue without bound."""
    pool = pool_of()
    assert [pool.place(q, to(1)) is not None for q in range(3)] == [True, True, False]
    assert pool.loads == (0, 2, 0)


def test_breaker_diverts_to_an_idle_channel_and_says_so() -> None:
    """A hot bucket would hold up its questions while other channels are idle."""
    pool = pool_of(breaker=1)
    pool.place(1, to(2))
    diverted = Placement(channel_id=0, hash_bucket=102, diverted_from=2, diverted_why=Diversion.QUEUE_LENGTH)
    assert pool.place(2, to(2)) == diverted
    assert [(c.num_diverted, c.breaker_open) for c in pool.snapshots()] == [(0, True), (0, False), (1, True)]
    pool.place(3, to(2))
    assert [c.breaker_open for c in pool.snapshots()] == [False, False, False]
    assert pool.place(4, to(2)) == Placement(channel_id=2, hash_bucket=102)


def test_breaker_waits_for_its_length() -> None:
    """Related questions would be spread before their channel is busy enough."""
    pool = pool_of(size=5, breaker=3)
    found = [pool.place(q, to(1)) for q in range(5)]
    assert [p and p.channel_id for p in found] == [1, 1, 1, 2, 0]


def test_breaker_keeps_a_burst_even() -> None:
    """With no idle channel left, a burst on one bucket would queue on one channel while the others run dry."""
    pool = pool_of(num_channels=4, size=8, breaker=1)
    for question in range(20):
        pool.place(question, to(3))
    assert pool.loads == (5, 5, 5, 5)


def test_breaker_is_closed_when_there_is_nowhere_to_divert() -> None:
    """An operator would look for a hot channel when the whole pool is full."""
    pool = pool_of(num_channels=2, size=1, breaker=1)
    assert [pool.place(q, to(1)) is not None for q in range(3)] == [True, True, False]
    assert [c.breaker_open for c in pool.snapshots()] == [False, False]


def test_breaker_zero_never_diverts() -> None:
    """An operator who binds buckets to channels would see them leave."""
    pool = pool_of(breaker=0)
    assert [pool.place(q, to(1)) is not None for q in range(3)] == [True, True, False]


def test_breaker_leaves_lanes_alone() -> None:
    """A long question would be sent among short ones."""
    pool = pool_of(breaker=1)
    found = [pool.place(q, to(1, may_divert=False)) for q in range(3)]
    assert [p and p.channel_id for p in found] == [1, 1, None]


def test_overflow_queue_is_bounded_and_first_in_first_out() -> None:
    """Memory would grow under overload, or a late question would pass an early one."""
    pool = pool_of(num_channels=1, size=1, overflow=2)
    pool.place(1, to(0))
    assert [pool.enqueue(q, to(0)) for q in (2, 3, 4)] == [True, True, False]
    assert pool.drain() == []
    order = []
    for question in (1, 2):
        pool.release(question, now_s=1.0)
        order += [moved for moved, _ in pool.drain()]
    assert order == [2, 3]


def test_waiting_for_one_channel_does_not_hold_up_another() -> None:
    """A short question would wait behind a long one for a lane it does not use."""
    pool = pool_of(num_channels=2, size=1, overflow=None)
    pool.place(1, to(0, may_divert=False))
    pool.place(2, to(1, may_divert=False))
    pool.enqueue(3, to(0, may_divert=False))
    pool.enqueue(4, to(1, may_divert=False))
    pool.release(2, now_s=1.0)
    assert [question for question, _ in pool.drain()] == [4]


def test_who_has_left_the_queue_leaves_nothing_behind() -> None:
    """Callers who give up would fill the memory, one entry each, until somebody is served."""
    pool = pool_of(num_channels=1, size=1, overflow=None)
    pool.place(0, to(0))
    pool.enqueue(1, to(0))
    for question in range(2, 5000):
        pool.enqueue(question, to(0))
        pool.withdraw(question)
    assert sum(len(line.heap) for line in pool._waiting._lines.values()) < 200
    pool.release(0, now_s=1.0)
    assert [question for question, _ in pool.drain()] == [1]


def test_withdrawn_places_do_not_count_as_used() -> None:
    """A refused request would show in the totals of the channels."""
    pool = pool_of(breaker=1, overflow=1)
    for question in (1, 2):
        pool.place(question, to(0))
    pool.enqueue(3, to(0))
    for question in (1, 2, 3):
        pool.withdraw(question)
    assert pool.snapshots() == pool_of(breaker=1).snapshots()
    assert pool.num_outstanding == pool.num_waiting == 0


def test_the_pace_is_that_of_the_releases() -> None:
    """A refused client would come back far too early or too late."""
    pool = pool_of(num_channels=1, size=8)
    assert pool.releases_per_s() is None
    for question in range(8):
        pool.place(question, to(0))
    for question in range(4):
        pool.release(question, now_s=10 + 2.0 * question)
    assert pool.releases_per_s() == pytest.approx(0.5)
    for question in range(4, 8):
        pool.release(question, now_s=18.0)
    pool.place(9, to(0))
    pool.release(9, now_s=5000.0)
    assert (pool.releases_per_s() or 0.0) > 0.5, "an idle hour is not the pace"


def test_only_time_with_work_counts_for_the_pace() -> None:
    """Clients would be told to come back in an hour because nobody asked for an hour, or at once."""
    pool = pool_of(num_channels=1, size=8)
    for question, at_s in enumerate((0.0, 100.0, 5000.0, 9000.0)):
        pool.place(question, to(0), now_s=at_s)
        pool.release(question, now_s=at_s + 2.0)
        assert pool.releases_per_s() == pytest.approx(0.5)
        assert pool.releases_per_s(at_s + 50.0) == pytest.approx(0.5)
    assert pool.releases_per_s() == pytest.approx(0.5)


def test_the_pace_is_that_of_a_pool_in_which_every_channel_has_work() -> None:
    """The few questions of a quiet hour would tell a crowd how long to stay away."""
    pool, now_s = pool_of(num_channels=2, size=10), 0.0
    for question in range(20):
        pool.place(question, to(question % 2), now_s=now_s)
    for question in range(18):
        now_s += 0.1
        pool.release(question, now_s)
    pool.check_integrity()
    for question in (18, 19):
        now_s += 5.0
        pool.release(question, now_s)
    for question in range(100, 130):
        pool.place(question, to(0), now_s=now_s)
        now_s += 5.0
        pool.release(question, now_s)
    assert (pool.releases_per_s() or 0.0) > 2.5
    pool.check_integrity()


def test_shortage_counts_channels_and_queue() -> None:
    """A refusal would cost the tokenization of the whole request, or a request that fits would be refused."""
    pool = pool_of(num_channels=2, size=2, overflow=1)
    pool.place(1, to(0))
    assert [pool.shortage(n) for n in (4, 5, 7)] == [0, 1, 3]
    assert pool_of(overflow=None).shortage(10**9) == 0


def test_misuse_is_a_bug_and_named() -> None:
    """A double release would make room that is not there."""
    pool = pool_of(overflow=1)
    pool.place(1, to(0))
    with pytest.raises(InvariantError):
        pool.place(1, to(0))
    with pytest.raises(InvariantError):
        pool.enqueue(1, to(0))
    pool.release(1, now_s=0.0)
    with pytest.raises(InvariantError):
        pool.release(1, now_s=0.0)
    with pytest.raises(InvariantError):
        pool.withdraw(1)
    with pytest.raises(InvariantError):
        ChannelPool(0, channel_queue_size=1, overflow_queue_size=0, breaker_queue_length=0)


def test_bytes_bound_a_channel_and_any_size_fits_an_idle_one() -> None:
    """A few very long questions would fill the memory that entries alone do not bound."""
    pool: ChannelPool[int] = ChannelPool(
        2,
        channel_queue_size=9,
        overflow_queue_size=9,
        breaker_queue_length=0,
        channel_queue_bytes=100,
        overflow_queue_bytes=150,
        burden_of=lambda question: Burden(num_bytes=question),
    )
    assert pool.place(1000, to(0)) is not None
    assert pool.place(1, to(0)) is None, "it holds its fill"
    assert [pool.place(q, to(1)) is not None for q in (60, 39, 2, 3)] == [True, True, True, False]
    assert [channel.num_bytes for channel in pool.snapshots()] == [1000, 101]
    assert [pool.enqueue(q, to(1)) for q in (149, 120, 4)] == [True, True, False]
    assert pool.shortage(20) == 20 - (18 - 4)
    pool.check_integrity()
    pool.release(60, now_s=1.0)
    assert [question for question, _ in pool.drain()] == [149]


def test_the_breaker_knows_bytes() -> None:
    """A question would wait for the channel with the giant although others are idle."""
    pool: ChannelPool[int] = ChannelPool(
        3,
        channel_queue_size=9,
        overflow_queue_size=0,
        breaker_queue_length=5,
        channel_queue_bytes=100,
        burden_of=lambda question: Burden(num_bytes=question),
    )
    pool.place(1000, to(1))
    found = [pool.place(question, to(1)) for question in (10, 20)]
    assert [p and (p.channel_id, p.diverted_why) for p in found] == [(2, Diversion.FULL), (0, Diversion.FULL)]
    assert [(c.breaker, c.breaker_why) for c in pool.snapshots()][1] == (BreakerState.OPEN, Diversion.FULL)


def test_the_breaker_stays_in_the_lane_of_the_pick() -> None:
    """A class of questions would flood the channels of all others."""
    pool = pool_of(num_channels=4, size=2, breaker=1)

    def choose(loads: Sequence[int]) -> Pick:
        return Pick(channel_id=2, hash_bucket=0, lane=range(2, 4))

    found = [pool.place(question, choose) for question in range(5)]
    assert [p and p.channel_id for p in found] == [2, 3, 2, 3, None]


def watched(cooldown_s: float = 5.0, **rules: float) -> ChannelPool[int]:
    return ChannelPool(
        3,
        channel_queue_size=4,
        overflow_queue_size=4,
        breaker_queue_length=3,
        breaker=BreakerRules(min_outcomes=2, cooldown_s=cooldown_s, **rules),  # type: ignore[arg-type]
        burden_of=lambda _: Burden(expires_at_s=1000.0),
    )


def test_a_stuck_channel_is_avoided_until_a_probe_succeeds() -> None:
    """Questions would go on queueing behind one that never ends."""
    pool = watched(max_age_s=10.0)
    pool.place(0, to(1), now_s=0.0)
    assert pool.place(1, to(1), now_s=9.0) == Placement(channel_id=1, hash_bucket=101)
    moved = pool.place(2, to(1), now_s=10.0)
    assert moved == Placement(channel_id=2, hash_bucket=101, diverted_from=1, diverted_why=Diversion.AGE)
    snapshot = pool.snapshots(12.0)[1]
    assert (snapshot.breaker, snapshot.breaker_why, snapshot.breaker_open) == (BreakerState.OPEN, Diversion.AGE, True)
    assert (snapshot.oldest_ms, snapshot.num_diverted) == (12_000, 1)
    for question in (0, 1):
        pool.release(question, now_s=13.0)
    assert pool.snapshots(16.0)[1].breaker is BreakerState.OPEN, "it is left alone for a while"
    assert pool.snapshots(18.0)[1].breaker is BreakerState.HALF_OPEN
    probe, other = (pool.place(question, to(1), now_s=18.5) for question in (3, 4))
    assert probe == Placement(channel_id=1, hash_bucket=101)
    assert other is not None and other.diverted_why is Diversion.AGE
    pool.release(3, now_s=19.0)
    assert pool.snapshots(19.0)[1].breaker is BreakerState.CLOSED


@pytest.mark.parametrize("says_so", [True, False])
def test_failures_open_the_breaker(says_so: bool) -> None:
    """A channel on which everything times out would go on getting its share."""
    pool = watched(failure_rate=0.5)
    for question in (0, 1):
        pool.place(question, to(1), now_s=0.0)
        if says_so:
            pool.note_outcome(question, failure="ERROR")
        pool.release(question, now_s=1.0 if says_so else 1000.0)
    moved = pool.place(2, to(1), now_s=1001.0 if not says_so else 2.0)
    assert moved is not None and (moved.channel_id, moved.diverted_why) == (2, Diversion.FAILURES)
    seen = pool.snapshots()[1]
    assert (seen.num_recent_failures, seen.main_failure) == (2, "ERROR" if says_so else "late")


def test_a_cancelled_probe_is_followed_by_another() -> None:
    """A channel would be lost for ever to a client who left."""
    pool = watched(failure_rate=0.5, cooldown_s=0.0)
    for question in (0, 1):
        pool.place(question, to(1), now_s=0.0)
        pool.note_outcome(question, failure="ERROR")
        pool.release(question, now_s=1.0)
    for question, leave in ((2, "withdraw"), (3, "cancel"), (4, "succeed")):
        probe = pool.place(question, to(1), now_s=float(question))
        assert probe is not None and probe.channel_id == 1
        if leave == "withdraw":
            pool.withdraw(question)
            continue
        if leave == "cancel":
            pool.note_outcome(question, failure=None)
        pool.release(question, now_s=question + 0.1)
    assert pool.snapshots(5.0)[1].breaker is BreakerState.CLOSED


def test_with_every_breaker_open_the_shortest_channel_takes() -> None:
    """Kev would stand still although every channel has room."""
    pool = watched(max_age_s=1.0)
    for question in range(3):
        pool.place(question, to(question), now_s=0.0)
    pool.place(3, to(0), now_s=0.5)
    found = [pool.place(question, to(0), now_s=60.0) for question in range(10, 20)]
    assert all(channel.breaker is BreakerState.OPEN for channel in pool.snapshots(61.0))
    assert sum(p is not None for p in found) == 12 - 4, "every place is used"


def test_recent_counts_follow_the_window() -> None:
    """Yesterday's load would be shown as today's."""
    pool = pool_of()
    for question, at_s in enumerate((0.0, 30.0, 59.0)):
        pool.place(question, to(question % 2), now_s=at_s)
        pool.release(question, now_s=at_s + 0.5)
    assert pool.recent(59.0) == [(2, 2), (1, 1), (0, 0)]
    assert [channel.num_recent for channel in pool.snapshots(70.0)] == [1, 1, 0]


LIMIT_BYTES, MOST_BYTES = 10, 9
RULES = st.builds(
    BreakerRules,
    max_age_s=st.sampled_from([0.0, 3.0]),
    failure_rate=st.sampled_from([0.0, 0.5]),
    min_outcomes=st.integers(1, 3),
    cooldown_s=st.sampled_from([0.0, 2.0]),
)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of place, release and withdraw: no question is lost, doubled or overtaken on its channel."""

    @initialize(
        num_channels=st.integers(1, 4),
        size=st.integers(1, 3),
        overflow=st.integers(0, 4),
        breaker=st.integers(0, 3),
        has_bytes=st.booleans(),
        rules=RULES,
    )
    def create(
        self, num_channels: int, size: int, overflow: int, breaker: int, has_bytes: bool, rules: BreakerRules
    ) -> None:
        self.num_channels, self.size, self.overflow, self.breaker = num_channels, size, overflow, breaker
        self.limit_bytes = LIMIT_BYTES if has_bytes else 10**9
        self.pool: ChannelPool[int] = ChannelPool(
            num_channels,
            channel_queue_size=size,
            overflow_queue_size=overflow,
            breaker_queue_length=breaker,
            channel_queue_bytes=self.limit_bytes,
            overflow_queue_bytes=self.limit_bytes,
            breaker=rules,
            burden_of=self.burden_of,
        )
        self.placed: dict[int, Placement] = {}
        self.waiting: dict[int, int] = {}
        self.turns: dict[int, tuple[float, int]] = {}
        self.next = 0
        self.now_s = 0.0

    @staticmethod
    def burden_of(question: int) -> Burden:
        return Burden(
            num_bytes=question * 7 % (MOST_BYTES + 1),
            expires_at_s=None if question % 3 else question + 5.0,
            head_start_s=(question % 4) * 1.5,
        )

    def num_bytes(self, channel_id: int) -> int:
        return sum(self.burden_of(q).num_bytes for q, p in self.placed.items() if p.channel_id == channel_id)

    def has_room(self, channel_id: int) -> bool:
        load = sum(p.channel_id == channel_id for p in self.placed.values())
        return load < self.size and self.num_bytes(channel_id) < self.limit_bytes

    @rule(pause_s=st.floats(0, 4))
    def pass_time(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pool.snapshots(self.now_s)

    @rule(home=st.integers(0, 3))
    def arrive(self, home: int) -> None:
        question, self.next = self.next, self.next + 1
        home %= self.num_channels
        placement = self.pool.place(question, to(home), now_s=self.now_s)
        if placement is not None:
            self.placed[question] = placement
            assert placement.hash_bucket == 100 + home
            assert placement.diverted_from == (home if placement.channel_id != home else None)
            assert (placement.diverted_why is None) == (placement.diverted_from is None)
        elif self.pool.enqueue(question, to(home)):
            self.waiting[question] = home
            self.turns[question] = (self.now_s - self.burden_of(question).head_start_s, question)
        else:
            held = sum(self.burden_of(q).num_bytes for q in self.waiting)
            assert len(self.waiting) == self.overflow or held >= self.limit_bytes

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), how=st.sampled_from(["release", "fail", "cancel", "withdraw"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        question = data.draw(st.sampled_from(sorted(self.placed)))
        del self.placed[question]
        if how == "withdraw":
            self.pool.withdraw(question)
        else:
            if how != "release":
                self.pool.note_outcome(question, failure="ERROR" if how == "fail" else None)
            self.pool.release(question, now_s=self.now_s)
        self.collect()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        question = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[question]
        self.pool.withdraw(question)
        self.collect()

    def collect(self) -> None:
        moved = self.pool.drain(now_s=self.now_s)
        questions = [question for question, _ in moved]
        assert questions == sorted(questions, key=self.turns.__getitem__), "the queue is drained in order"
        for question, placement in moved:
            home = self.waiting.pop(question)
            self.placed[question] = placement
            passed = [q for q, h in self.waiting.items() if h == home and self.turns[q] < self.turns[question]]
            assert not passed, "overtaken on its channel"

    @invariant()
    def counts_match(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        loads = [sum(p.channel_id == c for p in self.placed.values()) for c in range(self.num_channels)]
        assert self.pool.loads == tuple(loads)
        assert max(loads) <= self.size
        assert all(self.num_bytes(c) < self.limit_bytes + MOST_BYTES for c in range(self.num_channels))
        assert self.pool.num_waiting == len(self.waiting) <= self.overflow
        assert {q for q in range(self.next) if self.pool.find(q)} == set(self.placed)
        for home in self.waiting.values():
            assert not self.has_room(home), "a question waits although its channel has room"
            if self.breaker:
                assert not any(map(self.has_room, range(self.num_channels))), "it waits although it could be diverted"


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
