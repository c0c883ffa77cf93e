"""Several consumers of one memory transport: who gets what, and what becomes of the work of one that fails.

Not here: what every transport promises (``transport_suite``).
"""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from common.clock import ManualClock
from common.errors import OutOfMemoryError
from common.memory import MemoryTransport
from common.memory_consumer import ConsumerGroup, MemoryConsumer
from common.memory_sharing import share_out
from common.ports import Lease, Report, ReportState
from common.types import ChannelResult, FinishReason
from tests.contract.transport_suite import LONG_S, keys, make_item, outcome
from tests.work_calls import publish

NAMES = ("a", "b", "c")


def make_group(num_channels: int = 8, max_attempts: int = 2) -> ConsumerGroup:
    return ConsumerGroup(MemoryTransport(num_channels=num_channels, clock=ManualClock()), max_attempts)


def out_of_memory(lease: Lease) -> Report:
    error = OutOfMemoryError("no memory").info
    item = lease.item
    result = ChannelResult(
        request_id=item.request_id,
        question_index=item.question_index,
        channel_id=item.channel_id,
        finish_reason=FinishReason.ERROR,
        attempt=lease.attempt,
        error=error,
    )
    return Report(lease=lease, events=(result,))


async def waiting_leases(consumers: list[MemoryConsumer], max_items: int) -> list[asyncio.Task[list[Lease]]]:
    tasks = [asyncio.create_task(consumer.lease(max_items, LONG_S)) for consumer in consumers]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


@given(
    able=st.lists(st.lists(st.sampled_from(NAMES), unique=True), max_size=20),
    loads=st.fixed_dictionaries({name: st.integers(0, 5) for name in NAMES}),
    rooms=st.fixed_dictionaries({name: st.integers(0, 6) for name in NAMES}),
)
def test_shares_leave_nothing_that_somebody_could_take(
    able: list[list[str]], loads: dict[str, int], rooms: dict[str, int]
) -> None:
    """An item would lie there while a core idles, or a core be given more than it has slots."""
    receivers = share_out(able, loads, rooms)
    given = {name: receivers.count(name) for name in NAMES}
    assert all(given[name] <= rooms[name] for name in NAMES)
    for names, receiver in zip(able, receivers, strict=True):
        assert receiver in names if receiver is not None else all(given[name] == rooms[name] for name in names)


@given(num_items=st.integers(0, 20), start=st.integers(0, 5))
def test_idle_cores_get_equal_shares(num_items: int, start: int) -> None:
    """One core would run everything and the others nothing."""
    receivers = share_out([NAMES] * num_items, dict.fromkeys(NAMES, start), dict.fromkeys(NAMES, 100))
    counts = [receivers.count(name) for name in NAMES]
    assert max(counts) - min(counts) <= 1


async def test_one_publication_spreads_over_all_that_wait() -> None:
    """The first core to wake would take all questions of a request."""
    group = make_group()
    waiting = await waiting_leases([group.join(name) for name in NAMES[:2]], max_items=8)
    await group.transport.publish([make_item(index, index) for index in range(8)])
    first, second = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert (len(first), len(second)) == (4, 4)
    assert sorted(keys(first) + keys(second)) == [("r", index) for index in range(8)]


async def test_what_was_left_to_a_wait_that_ends_is_taken_by_another() -> None:
    """A question would wait for a core that has just been cancelled."""
    group = make_group()
    first, second = await waiting_leases([group.join("a"), group.join("b")], max_items=1)
    await publish(group.transport, make_item())
    first.cancel()
    assert keys(await asyncio.wait_for(second, 5)) == [("r", 0)]


async def test_a_core_takes_all_when_nobody_else_waits() -> None:
    """Half of the work would be kept for a core that is busy."""
    group = make_group()
    group.join("b")
    await group.transport.publish([make_item(index, index) for index in range(8)])
    assert len(await group.join("a").lease(8, 0)) == 8


async def test_the_questions_of_a_core_that_ends_are_taken_over_at_once() -> None:
    """They would wait until their leases run out, or be lost."""
    group = make_group()
    dying, other = group.join("a"), group.join("b")
    await group.transport.publish([make_item(index, index) for index in range(3)])
    lost = await dying.lease(8, 0)
    waiting = asyncio.create_task(other.lease(8, LONG_S))
    group.leave("a")
    taken = await asyncio.wait_for(waiting, 5)
    assert (keys(taken), [lease.attempt for lease in taken]) == (keys(lost), [2, 2, 2])
    assert await dying.report([Report(lease=lost[0], events=(outcome(lost[0]),))]) == [ReportState.STALE]
    done = [Report(lease=lease, events=(outcome(lease),)) for lease in taken]
    assert await other.report(done) == [ReportState.COMMITTED] * 3


async def test_a_question_that_ran_out_of_memory_is_tried_by_another_core_once() -> None:
    """It would fail although another device has room, or go round for ever."""
    group = make_group()
    small, large = group.join("a"), group.join("b")
    await publish(group.transport, make_item())
    [lease] = await small.lease(1, 0)
    assert await small.report([out_of_memory(lease)]) == [ReportState.STALE]
    assert await small.lease(1, 0) == [], "the core that has no room for it takes it again"
    [again] = await large.lease(1, 0)
    assert again.attempt == 2
    assert await large.report([out_of_memory(again)]) == [ReportState.COMMITTED], "its last attempt is its outcome"
    assert len(await group.transport.read(10, 0)) == 1


async def test_a_core_alone_keeps_its_questions() -> None:
    """With nobody to take over, a question would never have an outcome."""
    group = make_group()
    only = group.join("a")
    await publish(group.transport, make_item())
    [lease] = await only.lease(1, 0)
    assert await only.report([out_of_memory(lease)]) == [ReportState.COMMITTED]


async def test_the_last_core_takes_back_what_it_had_given_up() -> None:
    """A question given up for a core that then ends would be taken by nobody."""
    group = make_group(max_attempts=3)
    small, large = group.join("a"), group.join("b")
    await publish(group.transport, make_item())
    [lease] = await small.lease(1, 0)
    await small.report([out_of_memory(lease)])
    await large.lease(1, 0)
    group.leave("b")
    [again] = await small.lease(1, 0)
    assert again.attempt == 3


async def test_a_withdrawal_is_told_to_the_core_that_holds_the_question() -> None:
    """Another core would read the notice, and the question would run on."""
    group = make_group()
    one, other = group.join("a"), group.join("b")
    await publish(group.transport, make_item())
    await one.lease(1, 0)
    await group.transport.cancel("r")
    assert await other.cancellations(0) == []
    assert await one.cancellations(0) == [("r", 0)]
