"""Ten times more than fits: what is refused, what waits, and that every accepted question ends once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from common.errors import InvalidRequestError, KevError, QueueFullError
from common.types import FinishReason, Result
from kev import Question
from kev.engine import AsyncEngine
from kev.gateway.app import create_app
from kev.testing import scripted_engine
from tests.integration.scripted_runners import GuidedRunner, leftovers, until, until_idle

CHANNELS, PER_CHANNEL, OVERFLOW = 4, 2, 8
ROUTER = {
    "max_parallel_queries": 2,
    "channel_pool_size": CHANNELS,
    "channel_queue_size": PER_CHANNEL,
    "overflow_queue_size": OVERFLOW,
}
POLICIES = ("wait", "queue", "reject")
ROOM = {"queue": CHANNELS * PER_CHANNEL + OVERFLOW, "reject": CHANNELS * PER_CHANNEL}


@pytest.fixture
def runner() -> Iterator[GuidedRunner]:
    """A runner whose gate is open at the end, whatever the test did."""
    runner = GuidedRunner(lambda prompt: prompt)
    yield runner
    runner.gate.set()


@asynccontextmanager
async def overloaded(runner: GuidedRunner, policy: str, **router: object) -> AsyncIterator[AsyncEngine]:
    """A small engine with a policy, which holds nothing at the end."""
    config = {"kev": {"router": {**ROUTER, "overflow_policy": policy, **router}}}
    async with scripted_engine(str, config, runner=runner) as engine:
        yield engine
        runner.gate.set()
        await until_idle(engine)


def num_outcomes(engine: AsyncEngine) -> int:
    """Outcomes given since start, placeholders included."""
    assert engine._tiers is not None
    return engine._tiers.aggregator.counters.num_outcomes


async def watch_bounds(engine: AsyncEngine, seen: Counter[str]) -> None:
    """Remember the fullest state of every queue."""
    while True:
        channels = await engine.channels()
        seen["channel"] = max(seen["channel"], *(channel.num_queued for channel in channels))
        seen["overflow"] = max(seen["overflow"], (await engine.stats()).router.num_overflow)
        seen["work stream"] = max(seen["work stream"], *(await engine._tiers.router._publisher._work.depths()))  # type: ignore[union-attr]
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("policy", POLICIES)
async def test_ten_times_the_capacity(runner: GuidedRunner, policy: str) -> None:
    """Under load a queue grows without end, a question is lost or answered twice, or room is never given back."""
    async with overloaded(runner, policy) as engine:
        seen: Counter[str] = Counter()
        watching = asyncio.ensure_future(watch_bounds(engine, seen))
        asks = [engine.ask([f"question {i}", f"other {i}"], timeout_ms=60_000) for i in range(80)]
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        watching.cancel()
        answered = [outcome for outcome in outcomes if isinstance(outcome, list)]
        refused = [outcome for outcome in outcomes if not isinstance(outcome, list)]
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, list):
                assert [result.text for result in outcome] == [f"question {i}", f"other {i}"]
        assert all(isinstance(error, QueueFullError) for error in refused), refused
        assert all(0 < error.retry_after_s <= 60 for error in refused)  # type: ignore[union-attr]
        if policy == "wait":
            assert refused == []
        else:
            assert refused and len(answered) >= ROOM[policy] // 2, "it refused although there was room"
        stats = await until_idle(engine)
        assert num_outcomes(engine) == stats.router.num_questions == 2 * len(answered)
        assert stats.router.num_rejected == len(refused)
        assert seen["channel"] <= PER_CHANNEL and seen["work stream"] <= PER_CHANNEL
        assert policy == "wait" or seen["overflow"] <= (OVERFLOW if policy == "queue" else 0)
        assert (await engine.ask(["after the load"]))[0].text == "after the load"


@pytest.mark.parametrize("policy", ["queue", "reject"])
async def test_exactly_what_has_room_is_accepted(runner: GuidedRunner, policy: str) -> None:
    """A request is refused too early or too late, in part, or without saying when to come back."""
    async with overloaded(runner, policy) as engine:
        runner.gate.clear()
        ids = [await engine.submit([f"question {i}"]) for i in range(ROOM[policy])]
        for queries in (["one too many"], ["two", "more"]):
            with pytest.raises(QueueFullError, match=f"overflow_policy {policy}.*try again in about") as refused:
                await engine.submit(queries)
            assert 0 < refused.value.retry_after_s <= 60
        with pytest.raises(QueueFullError):
            await engine.submit(["x"] * (ROOM[policy] + 1))
        runner.gate.set()
        assert [(await engine.wait(request_id))[0].text for request_id in ids] == [
            f"question {i}" for i in range(ROOM[policy])
        ]
        await until_idle(engine)
        with pytest.raises(InvalidRequestError, match="do not fit into the channels even when all are idle"):
            await engine.submit(["x"] * (ROOM[policy] + 1))
        assert runner.num_forwards_of("one too many") == 0
        assert len(await engine.ask(["x"] * ROOM[policy])) == ROOM[policy]


async def test_one_hot_channel_cannot_fill_more_than_the_queue(runner: GuidedRunner) -> None:
    """Questions of one bucket pile up without end while other channels are idle."""
    async with overloaded(runner, "queue", breaker_queue_length=0) as engine:
        runner.gate.clear()
        ids = [await engine.submit(["hot"]) for _ in range(PER_CHANNEL + OVERFLOW)]
        with pytest.raises(QueueFullError):
            await engine.submit(["hot"])
        assert (await engine.stats()).router.num_overflow == OVERFLOW
        runner.gate.set()
        assert {(await engine.wait(request_id))[0].text for request_id in ids} == {"hot"}


async def test_http_tells_a_refused_client_when_to_come_back(runner: GuidedRunner) -> None:
    """A client of a full server gets a 5xx, or retries at once."""
    async with overloaded(runner, "reject") as engine:
        runner.gate.clear()
        held = await engine.submit(["held"] * ROOM["reject"])
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev") as client:
            for extra in ({}, {"stream": True}, {"background": True}):
                response = await client.post("/v1/query", content=json.dumps({"queries": ["more"], **extra}))
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 60
                assert response.json()["error"]["reason"] == "QUEUE_FULL"
        runner.gate.set()
        assert [result.text for result in await engine.wait(held)] == ["held"] * ROOM["reject"]


async def test_a_waiting_submission_that_is_cancelled_never_runs(runner: GuidedRunner) -> None:
    """The place of a caller who gave up is kept, its questions run for nobody, or it holds up those behind it."""
    async with overloaded(runner, "wait") as engine:
        runner.gate.clear()
        held = await engine.submit(["held"] * CHANNELS * PER_CHANNEL)
        before = asyncio.ensure_future(engine.ask(["before"]))
        leaving = [asyncio.ensure_future(engine.submit([f"leaving {i}"] * 3)) for i in range(5)]
        behind = asyncio.ensure_future(engine.ask(["behind"]))
        await until(lambda: engine._tiers is not None and engine._tiers.router.stats().num_overflow == 17)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        assert all(task.cancelled() for task in leaving)
        assert (await engine.stats()).router.num_overflow == 2
        runner.gate.set()
        assert (await before)[0].text == "before" and (await behind)[0].text == "behind"
        assert {result.finish_reason for result in await engine.wait(held)} == {FinishReason.STOP}
        assert [runner.num_forwards_of(f"leaving {i}") for i in range(5)] == [0] * 5


async def test_an_id_given_up_while_waiting_is_free_at_once(runner: GuidedRunner) -> None:
    """A retry under the id of a submission that gave up gets the cancellation, or the answer, of the first one."""
    async with overloaded(runner, "wait", max_parallel_queries=4, channel_pool_size=2, channel_queue_size=1) as engine:
        await engine.ready()
        runner.step_s = 0.01
        first = asyncio.ensure_future(engine.submit(["first content"] * 3, request_id="mine"))
        await until(lambda: runner.num_forwards_of("first content") > 2)
        first.cancel()
        await asyncio.wait({first})
        results = await engine.ask(["second content"], request_id="mine")
        assert (results[0].text, results[0].finish_reason) == ("second content", FinishReason.STOP)


async def test_what_is_out_of_time_in_the_queue_never_reaches_a_forward(runner: GuidedRunner) -> None:
    """The engine spends its time on answers nobody waits for any more."""
    async with overloaded(runner, "queue") as engine:
        runner.gate.clear()
        held = await engine.submit(["held"] * CHANNELS * PER_CHANNEL)
        await until(lambda: runner.forwards)
        stale = await engine.ask(["stale"] * OVERFLOW, timeout_ms=30)
        assert {result.finish_reason for result in stale} == {FinishReason.TIMEOUT_QUEUED}
        assert (await engine.stats()).router.num_overflow == 0
        fresh = asyncio.ensure_future(engine.ask(["fresh"] * OVERFLOW))
        runner.gate.set()
        assert [result.text for result in await fresh] == ["fresh"] * OVERFLOW
        await engine.wait(held)
        assert runner.num_forwards_of("stale") == 0


async def test_a_storm_of_impatient_clients_does_not_stop_the_answers(runner: GuidedRunner) -> None:
    """Clients that give up and retry at once keep the engine busy with work for nobody."""
    async with overloaded(runner, "queue") as engine:
        await engine.ready()
        runner.step_s = 0.002
        answers, gave_up = 0, 0

        async def client(number: int) -> None:
            nonlocal answers, gave_up
            while answers < 40:
                try:
                    async with asyncio.timeout(0.3):
                        results = await engine.ask([f"client {number:03}"], timeout_ms=300)
                    answers += results[0].finish_reason is FinishReason.STOP
                except (KevError, TimeoutError):
                    gave_up += 1
                    await asyncio.sleep(0.005)

        await asyncio.gather(*(client(number) for number in range(80)))
        stats = await until_idle(engine, 5.0)
        assert answers >= 40 and gave_up, (answers, gave_up)
        assert num_outcomes(engine) == stats.router.num_questions
        assert await leftovers(engine) == {}


@pytest.mark.parametrize("breaker", [0, 1])
async def test_the_breaker_spreads_a_hot_channel_and_says_so(runner: GuidedRunner, breaker: int) -> None:
    """Questions of one bucket queue on one channel beside idle ones, or the audit does not show where they went."""
    async with overloaded(
        runner, "wait", breaker_queue_length=breaker, channel_queue_size=8, max_parallel_queries=4
    ) as engine:
        results = await engine.ask(["the same question"] * 8, strategy="semantic_hash")
        home = {result.channel_id for result in results if result.diverted_from is None}
        diverted = [result for result in results if result.diverted_from is not None]
        channels = await engine.channels()
        assert len({result.hash_bucket for result in results}) == 1
        assert [result.text for result in results] == ["the same question"] * 8
        assert len(home) == 1
        if breaker == 0:
            assert diverted == [] and [c.num_total for c in channels if c.num_total] == [8]
        else:
            assert Counter(result.channel_id for result in results) == dict.fromkeys(range(CHANNELS), 2)
            assert {result.diverted_from for result in diverted} == home
            assert channels[home.pop()].num_diverted == len(diverted) == 6


async def test_a_long_request_shares_the_engine(runner: GuidedRunner) -> None:
    """One request of hundreds of questions starves everybody who comes after it."""
    async with overloaded(runner, "wait", max_queries_per_request=1000) as engine:
        await engine.ready()
        done: list[str] = []

        async def ask(name: str, queries: list[Question]) -> list[Result]:
            results = await engine.ask(queries, timeout_ms=60_000, max_parallel=1)
            done.append(name)
            return results

        runner.gate.clear()
        large = asyncio.ensure_future(ask("large", [Question(f"large {i}") for i in range(200)]))
        await until(lambda: runner.forwards)
        small = asyncio.ensure_future(ask("small", [Question("small")]))
        while (await engine.stats()).router.num_questions < 201:
            await asyncio.sleep(0.001)
        runner.gate.set()
        assert (await small)[0].text == "small"
        assert {result.finish_reason for result in await large} == {FinishReason.STOP}
        assert done == ["small", "large"]
