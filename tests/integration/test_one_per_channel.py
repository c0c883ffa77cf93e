"""One question of a channel in a forward at a time, whatever is cancelled or timed out meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from common.errors import KevError
from common.types import FinishReason
from kev.engine import AsyncEngine
from kev.testing import scripted_engine
from tests.integration.scripted_runners import GuidedRunner, until_idle

CHANNELS = 3


def crowded(forwards: list[frozenset[str]], channel_of: dict[str, int]) -> list[list[str]]:
    """The questions of each forward that was taken with two of one channel."""
    return [
        sorted(forward)
        for forward in forwards
        if max(Counter(channel_of[text] for text in forward if text in channel_of).values(), default=0) > 1
    ]


async def ask(engine: AsyncEngine, text: str, channel_of: dict[str, int], chance: random.Random) -> None:
    """Ask one question; now and then leave early, or give it too little time."""
    timeout_ms = chance.choice([5, 30, 60_000])
    try:
        request_id = await engine.submit([text], timeout_ms=timeout_ms, max_tokens=chance.randint(1, 8))
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.03)
            await engine.cancel(request_id)
        for result in await engine.wait(request_id):
            if result.finish_reason is not FinishReason.ERROR:
                channel_of[text] = result.channel_id
    except KevError:
        return


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_channel_has_one_question_in_a_forward(seed: int) -> None:
    """A hot channel would take the slots of the others, though it is meant to hold up only itself."""
    chance = random.Random(seed)
    runner = GuidedRunner(lambda prompt: prompt, step_s=0.001)
    router = {
        "channel_pool_size": CHANNELS,
        "max_parallel_queries": 8,
        "breaker_queue_length": 0,
        "strategy": "round_robin",
    }
    channel_of: dict[str, int] = {}
    async with scripted_engine(str, {"kev": {"router": router}}, runner=runner) as engine:
        asks = [ask(engine, f"question {number}", channel_of, chance) for number in range(150)]
        async with asyncio.timeout(50):
            await asyncio.gather(*asks)
            await until_idle(engine)
    assert len(channel_of) > 50 and set(channel_of.values()) == set(range(CHANNELS))
    assert max(map(len, runner.forwards)) > 1
    assert crowded(runner.forwards, channel_of) == []
