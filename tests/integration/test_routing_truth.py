"""A real model under every strategy, overflow policy and breaker: where a question waits never changes its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.clock import SystemClock
from common.config import load_config
from common.errors import QueueFullError
from common.types import Diversion, OverflowPolicy, Result, Strategy
from kev.engine import AsyncEngine
from kev.parts import EngineParts, load_parts
from tests.integration.tiny_checkpoint import save_checkpoint, settings_for

QUESTIONS = ["the same question"] * 8 + [f"question {number} " + "x" * (number * 9 % 40) for number in range(8)]
CORE = {"precision": "bf16"}
Told = tuple[tuple[int, ...], str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    save_checkpoint(folder, "gemma3")
    return folder


@pytest.fixture(scope="module")
def parts(folder: Path) -> Iterator[EngineParts]:
    """The model loaded and probed once."""
    yield load_parts(load_config(settings_for(folder, core=CORE), env={}), SystemClock(), print)


def engine_of(folder: Path, parts: EngineParts, **router: object) -> AsyncEngine:
    return AsyncEngine(load_config(settings_for(folder, core=CORE, router=router), env={}), parts)


def told(result: Result) -> Told:
    return result.token_ids, result.text, result.logprobs


async def asked(engine: AsyncEngine, **options: object) -> list[Result]:
    """All questions at once, one request each, so that they meet in the queues; refused ones come back when told."""

    async def one(question: str) -> Result:
        while True:
            try:
                return (await engine.ask([question], logprobs=2, timeout_ms=60_000, **options))[0]
            except QueueFullError as error:
                await asyncio.sleep(min(error.retry_after_s, 0.05))

    return list(await asyncio.gather(*map(one, QUESTIONS)))


async def test_neither_strategy_nor_policy_nor_breaker_changes_an_answer(folder: Path, parts: EngineParts) -> None:
    """A question that was diverted, that waited or that was refused once gets another answer than alone."""
    async with engine_of(folder, parts) as engine:
        alone = [told((await engine.ask([question], logprobs=2, timeout_ms=60_000))[0]) for question in QUESTIONS]
    seen: set[Diversion | None] = set()
    for policy in OverflowPolicy:
        for breaker in (0, 1):
            sizes = {"channel_pool_size": 4, "channel_queue_size": 2, "breaker_queue_length": breaker}
            classes = [{"name": "same", "num_channels": 2, "patterns": ["same"]}]
            async with engine_of(
                folder, parts, overflow_policy=policy.value, prebucket_classes=classes, **sizes
            ) as engine:
                for strategy in Strategy:
                    results = await asked(engine, strategy=strategy.value)
                    assert [told(result) for result in results] == alone, (policy, breaker, strategy)
                    seen |= {result.diverted_why for result in results}
    assert {None, Diversion.QUEUE_LENGTH, Diversion.WAITED} <= seen
