"""The memory transport keeps the contract of ``common.ports``, and its own promises.

Not here: the contract's tests (``transport_suite``).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.clock import ManualClock, SystemClock
from common.errors import InvariantError, OutOfMemoryError
from common.memory import MemoryTransport
from common.ports import CommitState
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

LEASE_TIMEOUT_S = 15.0


class MemoryHarness:
    """Both nodes are the same object: within a process there is one consumer."""

    def __init__(self) -> None:
        self._clock = ManualClock()

    async def create(self, *, num_channels: int, max_entries_per_channel: int = 64) -> Ends:
        transport = MemoryTransport(
            num_channels=num_channels,
            clock=self._clock,
            lease_timeout_s=LEASE_TIMEOUT_S,
            max_entries_per_channel=max_entries_per_channel,
        )
        return Ends(router=transport, node=transport, other_node=transport, results=transport)

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


def make_transport(max_events: int = 65_536) -> MemoryTransport:
    return MemoryTransport(num_channels=2, clock=ManualClock(), max_events=max_events)


async def test_a_waiting_lease_wakes_when_another_one_runs_out() -> None:
    """Work of a dead node would lie there until something else happens on the channels."""
    transport = MemoryTransport(num_channels=1, clock=SystemClock(), lease_timeout_s=0.02)
    await transport.publish(make_item())
    await transport.lease(1, 0)
    [again] = await asyncio.wait_for(transport.lease(1, LONG_S), 5)
    assert again.attempt == 2


async def test_several_interrupted_waits_do_not_swallow_a_wake_up() -> None:
    """The wake-up would go to a waiter that has just been cancelled, and the other would sleep on."""
    transport = make_transport()
    waiting = [asyncio.create_task(transport.lease(1, LONG_S)) for _ in range(3)]
    await settle()
    await transport.publish(make_item())
    for task in waiting[:2]:
        task.cancel()
    assert keys(await asyncio.wait_for(waiting[2], 5)) == [("r", 0)]
    assert all(
        isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*waiting[:2], return_exceptions=True)
    )


async def test_a_full_event_stream_makes_nodes_wait() -> None:
    """A slow aggregator would make the process grow, or lose text."""
    transport = make_transport(max_events=2)
    await transport.publish(make_item())
    [lease] = await transport.lease(1, 0)
    assert await transport.emit(lease, started(lease))
    assert await transport.emit(lease, delta(lease, 0))
    blocked = asyncio.create_task(transport.emit(lease, delta(lease, 1)))
    await settle()
    assert not blocked.done()
    assert await transport.read(1, 0) == [started(lease)]
    assert await asyncio.wait_for(blocked, 5)
    assert await transport.read(10, 0) == [delta(lease, 0), delta(lease, 1)]


async def test_an_interrupted_commit_has_not_happened() -> None:
    """A commit that waits for room would have removed the item already."""
    transport = make_transport(max_events=1)
    await transport.publish(make_item())
    [lease] = await transport.lease(1, 0)
    await transport.emit(lease, started(lease))
    blocked = asyncio.create_task(transport.commit(lease, outcome(lease)))
    await settle()
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    assert await transport.depths() == [1, 0]
    assert await transport.read(10, 0) == [started(lease)]
    assert await transport.commit(lease, outcome(lease)) is CommitState.COMMITTED


async def test_ownership_is_checked_after_the_wait_for_room() -> None:
    """A question withdrawn while its node waited for room would still report."""
    transport = make_transport(max_events=1)
    await transport.publish(make_item(0, 0))
    await transport.publish(make_item(1, 1))
    [lease, other] = await transport.lease(2, 0)
    await transport.emit(other, started(other))
    blocked = asyncio.create_task(transport.emit(lease, started(lease)))
    await settle()
    await transport.cancel("r", [0])
    await transport.read(1, 0)
    assert not await asyncio.wait_for(blocked, 5)
    assert await transport.read(1, 0) == []


@pytest.mark.parametrize("change", [{"question_index": 1}, {"request_id": "other"}, {"attempt": 2}])
async def test_a_lease_reports_only_about_its_own_question(change: dict[str, object]) -> None:
    """A mixed-up node would answer one question with another's text."""
    transport = make_transport()
    await transport.publish(make_item())
    [lease] = await transport.lease(1, 0)
    with pytest.raises(InvariantError):
        await transport.emit(lease, replace(delta(lease), **change))
    with pytest.raises(InvariantError):
        await transport.commit(lease, replace(outcome(lease), **change))
    assert await transport.read(1, 0) == []
    assert await transport.renew(lease)


async def test_dead_letters_are_kept_for_the_operator() -> None:
    """What killed a node could not be looked at."""
    transport = make_transport()
    await transport.publish(make_item())
    [lease] = await transport.lease(1, 0)
    error = OutOfMemoryError("no memory")
    await transport.dead_letter(lease, error)
    [letter] = transport.dead_letters
    assert (letter.item, letter.attempt, letter.error) == (make_item(), 1, error.info)


async def test_nothing_is_left_of_finished_questions() -> None:
    """Memory would grow with every request."""
    transport = make_transport()
    for index in range(50):
        await transport.publish(make_item(index, index % 2, request_id=f"r{index}"))
    await transport.cancel("r0")
    while leases := await transport.lease(2, 0):
        for lease in leases:
            await transport.commit(lease, outcome(lease))
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
