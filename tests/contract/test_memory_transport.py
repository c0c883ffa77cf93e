"""The memory transport keeps the contract of ``common.ports``, and its own promises.

Not here: the contract's tests (``transport_suite``).
"""

from __future__ import annotations

import asyncio

import pytest

from common.clock import ManualClock, SystemClock
from common.errors import InvariantError, OutOfMemoryError
from common.memory import MemoryTransport
from common.memory_consumer import ConsumerGroup
from common.ports import Report, ReportState, WorkStreams
from tests.contract.transport_suite import (
    LONG_S,
    Ends,
    TransportHarness,
    TransportSuite,
    delta,
    keys,
    make_item,
    outcome,
    started,
)
from tests.work_calls import commit, emit, publish

LEASE_TIMEOUT_S = 15.0


class MemoryHarness:
    """Both nodes are the same object, or two consumers of it."""

    def __init__(self, num_consumers: int = 1) -> None:
        self._clock = ManualClock()
        self._num_consumers = num_consumers

    async def create(
        self, *, num_channels: int, max_entries_per_channel: int = 64, max_bytes_per_channel: int = 67_108_864
    ) -> Ends:
        transport = MemoryTransport(
            num_channels=num_channels,
            clock=self._clock,
            lease_timeout_s=LEASE_TIMEOUT_S,
            max_entries_per_channel=max_entries_per_channel,
            max_bytes_per_channel=max_bytes_per_channel,
        )
        nodes: list[WorkStreams] = [transport, transport]
        if self._num_consumers > 1:
            group = ConsumerGroup(transport, max_attempts=2)
            nodes = [group.join("node"), group.join("other-node")]
        return Ends(router=transport, node=nodes[0], other_node=nodes[1], results=transport)

    async def expire_leases(self) -> None:
        self._clock.advance(LEASE_TIMEOUT_S)

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def settle(self) -> None:
        await settle()

    async def close(self) -> None:
        pass


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class TestMemoryTransport(TransportSuite):
    def make_harness(self) -> TransportHarness:
        return MemoryHarness()


class TestMemoryConsumers(TransportSuite):
    def make_harness(self) -> TransportHarness:
        return MemoryHarness(num_consumers=2)


def make_transport(max_events: int = 65_536) -> MemoryTransport:
    return MemoryTransport(num_channels=2, clock=ManualClock(), max_events=max_events)


async def test_a_waiting_lease_wakes_when_another_one_runs_out() -> None:
    """Work of a dead node would lie there until something else happens on the channels."""
    transport = MemoryTransport(num_channels=1, clock=SystemClock(), lease_timeout_s=0.02)
    await publish(transport, make_item())
    await transport.lease(1, 0)
    [again] = await asyncio.wait_for(transport.lease(1, LONG_S), 5)
    assert again.attempt == 2


async def test_several_interrupted_waits_do_not_swallow_a_wake_up() -> None:
    """The wake-up would go to a waiter that has just been cancelled, and the other would sleep on."""
    transport = make_transport()
    waiting = [asyncio.create_task(transport.lease(1, LONG_S)) for _ in range(3)]
    await settle()
    await publish(transport, make_item())
    for task in waiting[:2]:
        task.cancel()
    assert keys(await asyncio.wait_for(waiting[2], 5)) == [("r", 0)]
    assert all(
        isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*waiting[:2], return_exceptions=True)
    )


async def test_a_full_event_stream_takes_outcomes_only() -> None:
    """A slow aggregator would make the process grow, lose text, or hold up the outcomes."""
    transport = make_transport(max_events=2)
    await publish(transport, make_item())
    [lease] = await transport.lease(1, 0)
    assert await emit(transport, lease, started(lease))
    assert await emit(transport, lease, delta(lease, 0))
    more = Report(lease=lease, events=(delta(lease, 1),))
    assert await transport.report([more]) == [ReportState.FULL]
    assert await transport.read(1, 0) == [started(lease)]
    assert await transport.report([more, more]) == [ReportState.HELD, ReportState.FULL]
    assert await commit(transport, lease, outcome(lease)) is ReportState.COMMITTED
    assert await transport.read(10, 0) == [delta(lease, 0), delta(lease, 1), outcome(lease)]


async def test_dead_letters_are_kept_for_the_operator() -> None:
    """What killed a node could not be looked at."""
    transport = make_transport()
    await publish(transport, make_item())
    [lease] = await transport.lease(1, 0)
    error = OutOfMemoryError("no memory")
    await transport.dead_letter(lease, error)
    [letter] = transport.dead_letters
    assert (letter.item, letter.attempt, letter.error) == (make_item(), 1, error.info)


async def test_nothing_is_left_of_finished_questions() -> None:
    """Memory would grow with every request."""
    transport = make_transport()
    for index in range(50):
        await publish(transport, make_item(index, index % 2, request_id=f"r{index}"))
    await transport.cancel("r0")
    while leases := await transport.lease(2, 0):
        for lease in leases:
            await commit(transport, lease, outcome(lease))
    await transport.read(100, 0)
    assert (transport._entries, len(transport._events), transport._notices) == ({}, 0, {})


@pytest.mark.parametrize(
    "arguments",
    [{"num_channels": 0}, {"num_channels": 1, "lease_timeout_s": 0.0}, {"num_channels": 1, "max_events": 0}],
)
def test_impossible_sizes_are_refused(arguments: dict[str, int]) -> None:
    """A transport would be made that can never deliver."""
    with pytest.raises(InvariantError):
        MemoryTransport(clock=ManualClock(), **arguments)
