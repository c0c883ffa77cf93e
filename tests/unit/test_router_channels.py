"""The channel pool: places, breaker, overflow queue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InvariantError
from router_svc.channels import ChannelPool, Chooser, Placement
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


def test_a_full_channel_takes_no_more() -> None:
    """A channel would queue without bound."""
    pool = pool_of()
    assert [pool.place(q, to(1)) is not None for q in range(3)] == [True, True, False]
    assert pool.loads == (0, 2, 0)


def test_breaker_diverts_to_an_idle_channel_and_says_so() -> None:
    """A hot bucket would hold up its questions while other channels are idle."""
    pool = pool_of(breaker=1)
    pool.place(1, to(2))
    assert pool.place(2, to(2)) == Placement(channel_id=0, hash_bucket=102, diverted_from=2)
    assert [(c.num_diverted, c.breaker_open) for c in pool.snapshots()] == [(0, True), (0, False), (1, True)]
    pool.place(3, to(2))
    assert [c.breaker_open for c in pool.snapshots()] == [False, False, False]
    assert pool.place(4, to(2)) == Placement(channel_id=2, hash_bucket=102)


def test_breaker_waits_for_its_length() -> None:
    """Related questions would be spread before their channel is busy enough."""
    pool = pool_of(size=5, breaker=3)
    found = [pool.place(q, to(1)) for q in range(5)]
    assert [p and p.channel_id for p in found] == [1, 1, 1, 0, 2]


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


def test_retry_after_follows_the_pace() -> None:
    """A refused client would come back far too early or too late."""
    pool = pool_of(num_channels=1, size=8)
    assert pool.retry_after_s(3) == 1.0
    for question in range(8):
        pool.place(question, to(0))
    for question in range(4):
        pool.release(question, now_s=10 + 2.0 * question)
    assert pool.retry_after_s(3) == pytest.approx(6.0)
    assert pool.retry_after_s(10**6) == 60.0
    for question in range(4, 8):
        pool.release(question, now_s=18.0)
    pool.place(9, to(0))
    pool.release(9, now_s=5000.0)
    assert pool.retry_after_s(1) < 2.0, "an idle hour is not the pace"


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


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of place, release and withdraw: no question is lost, doubled or overtaken on its channel."""

    @initialize(
        num_channels=st.integers(1, 4), size=st.integers(1, 3), overflow=st.integers(0, 4), breaker=st.integers(0, 3)
    )
    def create(self, num_channels: int, size: int, overflow: int, breaker: int) -> None:
        self.pool = pool_of(num_channels, size, overflow, breaker)
        self.num_channels, self.size, self.overflow, self.breaker = num_channels, size, overflow, breaker
        self.placed: dict[int, Placement] = {}
        self.waiting: dict[int, int] = {}
        self.next = 0

    @rule(home=st.integers(0, 3))
    def arrive(self, home: int) -> None:
        question, self.next = self.next, self.next + 1
        home %= self.num_channels
        placement = self.pool.place(question, to(home))
        if placement is not None:
            self.placed[question] = placement
            assert placement.hash_bucket == 100 + home
            assert placement.diverted_from == (home if placement.channel_id != home else None)
        elif self.pool.enqueue(question, to(home)):
            self.waiting[question] = home
        else:
            assert len(self.waiting) == self.overflow

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), finished=st.booleans())
    def leave(self, data: st.DataObject, finished: bool) -> None:
        question = data.draw(st.sampled_from(sorted(self.placed)))
        del self.placed[question]
        if finished:
            self.pool.release(question, now_s=float(self.next))
        else:
            self.pool.withdraw(question)
        self.collect()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        question = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[question]
        self.pool.withdraw(question)
        self.collect()

    def collect(self) -> None:
        moved = self.pool.drain()
        questions = [question for question, _ in moved]
        assert questions == sorted(questions), "the queue is drained in order"
        for question, placement in moved:
            home = self.waiting.pop(question)
            self.placed[question] = placement
            assert not any(q < question and h == home for q, h in self.waiting.items()), "overtaken on its channel"

    @invariant()
    def counts_match(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        loads = [sum(p.channel_id == c for p in self.placed.values()) for c in range(self.num_channels)]
        assert self.pool.loads == tuple(loads)
        assert max(loads) <= self.size
        assert self.pool.num_waiting == len(self.waiting) <= self.overflow
        assert {q for q in range(self.next) if self.pool.find(q)} == set(self.placed)
        for home in self.waiting.values():
            assert loads[home] == self.size, "a question waits although its channel has room"
            assert not self.breaker or min(loads) == self.size, "a question waits although it could be diverted"


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
