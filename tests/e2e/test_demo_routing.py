"""Overflow policies and the breaker on the real demo model: who waits, is refused or diverted, and what is answered.

The answers are those of the questions alone, whatever the router did.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.clock import SystemClock
from common.config import load_config
from common.errors import QueueFullError
from common.types import Diversion, FinishReason, Result
from kev.engine import AsyncEngine
from kev.parts import EngineParts, load_parts

pytestmark = [pytest.mark.demo, pytest.mark.timeout(300)]

NUM_CHANNELS = 4
QUESTIONS = [f"Name a city that begins with {letter}." for letter in "ABCDEFGHIJKL"]
OPTIONS = {"max_tokens": 8, "timeout_ms": 240_000}


def settings_with(**router: object) -> dict[str, object]:
    sizes = {"max_parallel_queries": NUM_CHANNELS, "channel_pool_size": NUM_CHANNELS, "channel_queue_size": 1}
    return {"kev": {"core": {"model_path": "demo", "max_context": 256}, "router": {**sizes, **router}}}


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    """The model loaded and probed once."""
    return load_parts(load_config(settings_with(), env={}), SystemClock(), print)


@asynccontextmanager
async def opened(parts: EngineParts, **router: object) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(load_config(settings_with(**router), env={}), parts) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(parts: EngineParts) -> list[tuple[int, ...]]:
    """The token ids of each question by itself."""

    async def ask_each() -> list[tuple[int, ...]]:
        async with opened(parts) as engine:
            return [(await engine.ask([question], **OPTIONS))[0].token_ids for question in QUESTIONS]

    return asyncio.run(ask_each())


def tokens_of(results: list[Result]) -> list[tuple[int, ...]]:
    assert all(result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for result in results)
    return [result.token_ids for result in results]


async def test_wait_takes_more_than_there_is_room_for(parts: EngineParts, alone: list[tuple[int, ...]]) -> None:
    """Three times what fits is refused or lost, or answered otherwise."""
    async with opened(parts, overflow_policy="wait") as engine:
        assert tokens_of(await engine.ask(QUESTIONS, **OPTIONS)) == alone


async def test_queue_takes_what_its_queue_holds_and_refuses_the_rest(
    parts: EngineParts, alone: list[tuple[int, ...]]
) -> None:
    """The queue has no bound, or what it refuses does not say when to come again."""
    async with opened(parts, overflow_policy="queue", overflow_queue_size=len(QUESTIONS) - NUM_CHANNELS) as engine:
        request_id = await engine.submit(QUESTIONS, **OPTIONS)
        with pytest.raises(QueueFullError) as refused:
            await engine.submit(["one more"], **OPTIONS)
        assert refused.value.retry_after_s > 0
        assert (await engine.stats()).router.num_overflow > 0
        assert tokens_of(await engine.wait(request_id)) == alone
        assert tokens_of(await engine.ask(QUESTIONS[:1], **OPTIONS)) == alone[:1]


async def test_reject_takes_what_fits_now(parts: EngineParts, alone: list[tuple[int, ...]]) -> None:
    """A refused question runs all the same, or who comes again when told is never served."""
    async with opened(parts, overflow_policy="reject") as engine:
        num_refused = 0

        async def ask(question: str) -> Result:
            nonlocal num_refused
            while True:
                try:
                    return (await engine.ask([question], **OPTIONS))[0]
                except QueueFullError as error:
                    num_refused += 1
                    await asyncio.sleep(error.retry_after_s)

        assert tokens_of(list(await asyncio.gather(*map(ask, QUESTIONS)))) == alone
        assert num_refused >= len(QUESTIONS) - NUM_CHANNELS
        assert (await engine.stats()).router.num_questions == len(QUESTIONS)


async def test_the_breaker_spreads_one_topic_and_says_so(parts: EngineParts, alone: list[tuple[int, ...]]) -> None:
    """Questions of one bucket queue on its channel while others are free, or are answered otherwise elsewhere."""
    for breaker, num_home in ((1, 1), (0, NUM_CHANNELS)):
        async with opened(parts, channel_queue_size=8, breaker_queue_length=breaker) as engine:
            results = await engine.ask(QUESTIONS[:1] * NUM_CHANNELS, strategy="semantic_hash", **OPTIONS)
            assert tokens_of(results) == alone[:1] * NUM_CHANNELS
            assert len({result.hash_bucket for result in results}) == 1
            diverted = [result for result in results if result.diverted_from is not None]
            assert len(diverted) == NUM_CHANNELS - num_home
            assert {result.diverted_why for result in diverted} <= {Diversion.QUEUE_LENGTH}
            assert len({result.channel_id for result in results}) == NUM_CHANNELS + 1 - num_home
