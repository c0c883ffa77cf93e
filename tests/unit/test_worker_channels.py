"""The worker keeps a channel to one question, also when word of a withdrawal comes after the channel's next one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.clock import ManualClock
from common.types import ChannelResult, FinishReason
from tests.unit.test_worker import LONG_S, CountingTransport, GatedRunner, _item, _read_to_the_end, _working
from tests.work_calls import publish


class SilentTransport(CountingTransport):
    """Tells nobody what was withdrawn, as a store does for a moment."""

    async def cancellations(self, wait_s: float, consumer: str = "") -> list[tuple[str, int]]:
        await asyncio.sleep(LONG_S)
        return []


async def test_the_next_question_of_a_channel_does_not_meet_the_withdrawn_one() -> None:
    """A channel would have two questions in a forward, and hold up others than itself."""
    clock, runner = ManualClock(), GatedRunner()
    transport = SilentTransport(clock)
    await publish(transport, _item(0, "a withdrawn question"))
    await publish(transport, _item(1, "a neighbour on another channel"))
    runner.gate.clear()
    async with _working(transport, clock, runner):
        assert await asyncio.to_thread(runner.is_held_back.wait, LONG_S)
        await publish(transport, replace(_item(2, "the next one"), channel_id=0))
        await transport.cancel("r", [0])
        await transport.until_granted(("r", 2), 1)
        await asyncio.sleep(0.01)
        runner.gate.set()
        events = await _read_to_the_end(transport, 2)
    assert not any({"a withdrawn question", "the next one"} <= forward for forward in runner.forwards)
    assert any({"a neighbour on another channel", "the next one"} <= forward for forward in runner.forwards)
    ends = {key: found[-1] for key, found in events.items()}
    assert all(isinstance(end, ChannelResult) and end.finish_reason is FinishReason.STOP for end in ends.values())
