"""Calls made at the same time go together, and none gets another's reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common.redis_batches import Batches, Command


class Wire:
    """Echoes commands when it is let; remembers what went together."""

    def __init__(self) -> None:
        self.sent: list[list[Command]] = []
        self.gate = asyncio.Event()
        self.error: BaseException | None = None

    async def send(self, commands: Sequence[Command]) -> Sequence[object]:
        self.sent.append(list(commands))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [ValueError(command[0]) if command[0] == "bad" else command for command in commands]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_waits_goes_together_in_order() -> None:
    """Under load every call would be a round trip of its own, or a later call would pass an earlier one."""
    wire = Wire()
    batches = Batches(wire.send, num_lanes=2)
    calls = []
    for number in range(6):
        calls.append(asyncio.create_task(batches.call(("get", number))))
        await turns()
    assert [len(sent) for sent in wire.sent] == [1, 1]
    wire.gate.set()
    assert await asyncio.gather(*calls) == [("get", number) for number in range(6)]
    assert [command[1] for sent in wire.sent for command in sent] == list(range(6))
    assert [len(sent) for sent in wire.sent] == [1, 1, 4]


async def test_each_call_has_its_own_error() -> None:
    """One refused command would fail its neighbours; a broken connection would leave some waiting for ever."""
    wire = Wire()
    batches = Batches(wire.send, num_lanes=1)
    first = asyncio.create_task(batches.call(("first",)))
    await turns()
    calls = [asyncio.create_task(batches.call((name,))) for name in ("good", "bad", "fine")]
    await turns()
    wire.gate.set()
    found = await asyncio.gather(first, *calls, return_exceptions=True)
    assert [type(reply) for reply in found] == [tuple, tuple, ValueError, tuple]
    wire.error = ConnectionError("cut")
    found = await asyncio.gather(*(batches.call((name,)) for name in "ab"), return_exceptions=True)
    assert found == [wire.error, wire.error]
    wire.error = None
    assert await batches.call(("after",)) == ("after",)


async def test_a_call_whose_caller_left_is_not_sent() -> None:
    """Work for nobody would be done under load; or a reply would go to whoever comes next."""
    wire = Wire()
    batches = Batches(wire.send, num_lanes=1)
    calls = [asyncio.create_task(batches.call((name,))) for name in ("sent", "left", "stays")]
    await turns()
    calls[0].cancel()
    calls[1].cancel()
    await turns()
    wire.gate.set()
    assert await calls[2] == ("stays",)
    assert wire.sent == [[("sent",), ("left",), ("stays",)]] or wire.sent == [[("sent",)], [("stays",)]]


async def test_a_batch_is_bounded() -> None:
    """A burst would hold up everybody behind one huge write."""
    wire = Wire()
    wire.gate.set()
    batches = Batches(wire.send, num_lanes=1)
    await asyncio.gather(*(batches.call((str(number),)) for number in range(200)))
    assert max(map(len, wire.sent)) <= 64 and sum(map(len, wire.sent)) == 200


async def test_closing_ends_those_who_wait() -> None:
    """A process would hang at its end."""
    wire = Wire()
    batches = Batches(wire.send, num_lanes=1)
    calls = [asyncio.create_task(batches.call((name,))) for name in ("sent", "waits")]
    await turns()
    calls.append(asyncio.create_task(batches.call(("late",))))
    await turns()
    await batches.close()
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert all(isinstance(reply, asyncio.CancelledError) for reply in found)


@pytest.mark.parametrize("num_lanes", [1, 3])
async def test_replies_find_their_callers(num_lanes: int) -> None:
    """One caller would be given the reply of another: somebody else's answers."""
    wire = Wire()
    wire.gate.set()
    batches = Batches(wire.send, num_lanes=num_lanes)

    async def work(number: int) -> None:
        for turn in range(20):
            await asyncio.sleep(0 if (number + turn) % 3 else 0.001)
            assert await batches.call((f"{number}/{turn}",)) == (f"{number}/{turn}",)

    await asyncio.gather(*(work(number) for number in range(20)))
