"""Breakers, back-pressure and hot spots of a running engine, as callers and operators see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from common.config import load_config
from common.types import BreakerState, Diversion, FinishReason
from kev.engine import AsyncEngine
from kev.gateway.app import create_app
from kev.gateway.encoding import jsonable
from kev.stats import GrpcSource, HttpSource, Picture
from kev.stats_view import as_json, render
from kev.testing import scripted_engine
from tests.integration.grpc_cluster import open_cluster
from tests.integration.scripted_runners import GuidedRunner, until, until_idle

CHANNELS = 4
LONG_MS = 60_000


@pytest.fixture
def runner() -> Iterator[GuidedRunner]:
    """A runner whose gate is open at the end, whatever the test did."""
    runner = GuidedRunner(lambda prompt: prompt)
    yield runner
    runner.gate.set()


def config(**router: object) -> dict[str, Any]:
    sizes = {"max_parallel_queries": 4, "channel_pool_size": CHANNELS, "channel_queue_size": 8}
    return {"kev": {"router": {**sizes, **router}}}


class Door:
    """An engine and its HTTP routes."""

    def __init__(self, engine: AsyncEngine, http: httpx.AsyncClient) -> None:
        self.engine, self.http = engine, http

    async def get(self, path: str) -> Any:
        response = await self.http.get(path)
        assert response.status_code == 200
        return response.json()

    async def query(self, queries: list[str], **options: object) -> httpx.Response:
        body = {"queries": queries, "timeout_ms": LONG_MS, **options}
        return await self.http.post("/v1/query", content=json.dumps(body), timeout=20)

    async def breakers(self) -> set[tuple[str, str | None]]:
        return {(channel["breaker"], channel["breaker_why"]) for channel in await self.get("/v1/channels")}


@asynccontextmanager
async def opened(runner: GuidedRunner, **router: object) -> AsyncIterator[Door]:
    async with scripted_engine(str, config(**router), runner=runner) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev") as http:
            yield Door(engine, http)
        runner.gate.set()
        await until_idle(engine)


async def test_a_diverted_question_says_why_in_its_answer(runner: GuidedRunner) -> None:
    """The audit would show that a question is elsewhere, and nobody would know what for."""
    async with opened(runner) as door:
        results = (await door.query(["the same question"] * 8, strategy="semantic_hash")).json()["results"]
        diverted = [result for result in results if result["diverted_from"] is not None]
        assert len(diverted) == 6
        assert {result["diverted_why"] for result in diverted} == {"queue_length"}
        assert {result["diverted_why"] for result in results if result["diverted_from"] is None} == {None}


async def test_a_question_that_waited_says_so(runner: GuidedRunner) -> None:
    """A question on another channel than it was registered for would look like a mistake."""
    async with opened(runner, overflow_policy="queue", channel_queue_size=1) as door:
        runner.gate.clear()
        held = await door.engine.submit(["held"] * CHANNELS, timeout_ms=LONG_MS)
        late = await door.engine.submit(["late"] * 3, timeout_ms=LONG_MS)
        runner.gate.set()
        results = [*await door.engine.wait(held), *await door.engine.wait(late)]
        moved = [result for result in results if result.diverted_from is not None and result.text == "late"]
        assert all(result.diverted_why in (Diversion.WAITED, Diversion.FULL) for result in moved)
        assert any(result.diverted_why is Diversion.WAITED for result in moved)
        assert all((result.diverted_why is None) == (result.diverted_from is None) for result in results)


async def test_a_stuck_channel_is_seen_avoided_and_taken_back(runner: GuidedRunner) -> None:
    """New questions would queue behind a giant although other channels are free, and nobody would see it."""
    rules = {"breaker_queue_length": 8, "breaker_max_age_ms": 50, "breaker_cooldown_ms": 0}
    async with opened(runner, **rules) as door:
        runner.gate.clear()
        giant = await door.engine.submit(["the same"], timeout_ms=LONG_MS, strategy="semantic_hash")
        async with asyncio.timeout(10):
            while ("open", "age") not in await door.breakers():
                await asyncio.sleep(0.01)
        stuck = [channel for channel in await door.get("/v1/channels") if channel["breaker"] == "open"]
        assert [(c["breaker_open"], c["num_queued"], c["oldest_ms"] >= 50) for c in stuck] == [(True, 1, True)]
        second = await door.engine.submit(["the same"], timeout_ms=LONG_MS, strategy="semantic_hash")
        runner.gate.set()
        [first], [other] = await door.engine.wait(giant), await door.engine.wait(second)
        assert (first.diverted_why, first.channel_id) == (None, stuck[0]["channel_id"])
        assert (other.diverted_why, other.diverted_from) == (Diversion.AGE, first.channel_id)
        async with asyncio.timeout(10):
            while await door.breakers() != {("half_open", "age"), ("closed", None)}:
                await asyncio.sleep(0.01)
        [probe] = await door.engine.ask(["the same"], strategy="semantic_hash")
        assert (probe.channel_id, probe.diverted_why) == (first.channel_id, None)
        assert await door.breakers() == {("closed", None)}


async def test_a_channel_on_which_all_times_out_is_left_alone(runner: GuidedRunner) -> None:
    """It would go on getting its share of questions, and time them out."""
    rules = {"breaker_queue_length": 8, "breaker_min_outcomes": 3, "breaker_cooldown_ms": LONG_MS}
    async with opened(runner, **rules) as door:
        runner.gate.clear()
        lost = await door.engine.ask(["the same"] * 3, timeout_ms=30, strategy="semantic_hash")
        assert {result.finish_reason for result in lost} <= {FinishReason.TIMEOUT_QUEUED, FinishReason.TIMEOUT_RUNNING}
        assert await door.breakers() == {("open", "failures"), ("closed", None)}
        runner.gate.set()
        [result] = await door.engine.ask(["the same"], strategy="semantic_hash")
        assert (result.text, result.diverted_why) == ("the same", Diversion.FAILURES)
        assert result.diverted_from == lost[0].channel_id != result.channel_id


async def test_all_breakers_open_and_still_everything_is_answered(runner: GuidedRunner) -> None:
    """Kev would refuse or hold everything because everything is slow."""
    rules = {"breaker_max_age_ms": 1, "breaker_failure_rate": 0.01, "breaker_min_outcomes": 1}
    async with opened(runner, **rules, breaker_cooldown_ms=LONG_MS) as door:
        runner.step_s = 0.005
        results = await door.engine.ask([f"question {i}" for i in range(40)], timeout_ms=LONG_MS)
        assert [result.text for result in results] == [f"question {i}" for i in range(40)]
        more = await door.engine.ask([f"more {i}" for i in range(40)], timeout_ms=LONG_MS)
        assert [result.text for result in more] == [f"more {i}" for i in range(40)]
        assert {channel.breaker for channel in await door.engine.channels()} == {BreakerState.OPEN}


@pytest.mark.parametrize("policy", ["wait", "queue", "reject"])
async def test_without_room_each_policy_does_as_it_says(runner: GuidedRunner, policy: str) -> None:
    """A caller would hang, be dropped, or come back at the wrong time."""
    sizes = {"channel_queue_size": 1, "overflow_queue_size": 2, "max_wait_ms": 50}
    async with opened(runner, overflow_policy=policy, **sizes) as door:
        assert (await door.query(["warm"])).status_code == 200
        runner.gate.clear()
        held = await door.engine.submit(["held"] * CHANNELS, timeout_ms=LONG_MS)
        waiting = [await door.engine.submit([f"waits {i}"], timeout_ms=LONG_MS) for i in range(2 * (policy == "queue"))]
        refused = await door.query(["too many"])
        assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "QUEUE_FULL")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ("nothing was run" in refused.text) == (policy == "wait")
        late = asyncio.ensure_future(door.query(["late"], timeout_ms=LONG_MS))
        if policy == "wait":
            await until(lambda: door.engine._started().router.stats().num_overflow == 1)
        runner.gate.set()
        assert {result.text for result in await door.engine.wait(held)} == {"held"}
        assert [(await door.engine.wait(request_id))[0].text for request_id in waiting] == [
            f"waits {i}" for i in range(len(waiting))
        ]
        answer = await late
        if policy == "wait":
            assert answer.json()["results"][0]["text"] == "late"
        else:
            assert answer.status_code in (200, 429)
        assert runner.num_forwards_of("too many") == 0
        assert (await door.get("/v1/stats"))["router"]["releases_per_s"] > 0


async def test_a_hot_bucket_is_named_over_every_door(runner: GuidedRunner) -> None:
    """An operator would have to count hash_bucket in the outputs by hand."""
    settings = config(hot_spot_min_questions=20)
    async with open_cluster(settings, runner=runner) as cluster:
        hot = await cluster.engine.ask(["how do I get a refund"] * 15, strategy="semantic_hash")
        await cluster.engine.ask([f"{i} other things {i * i}" for i in range(10)], strategy="semantic_hash")
        seen = await picture_of(GrpcSource(cluster.client()))
        [spot] = [spot for spot in seen.stats.router.hot_spots if spot.hash_bucket == hot[0].hash_bucket]
        assert spot.num_questions >= 15 and spot.share >= 0.6 and "consistent_hash" in spot.remedy
        assert seen.stats.router.bucket_heat[0].hash_bucket == spot.hash_bucket
        told = json.loads(as_json(seen))
        transport = httpx.ASGITransport(create_app(cluster.engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev") as http:
            over_http = [(await http.get(path)).content for path in ("/v1/channels", "/v1/stats")]
        assert [json.loads(content) for content in over_http] == [told["channels"], told["stats"]]
        source = HttpSource("http://kev")
        source._fetch = lambda url: over_http["/stats" in url]  # type: ignore[method-assign]
        again = await source.read()
        assert jsonable(again.stats) == told["stats"] and again.channels == seen.channels
        render(again)


async def picture_of(source: GrpcSource) -> Picture:
    try:
        return await source.read()
    finally:
        await source.close()


def test_the_defaults_divert_nothing_that_is_well() -> None:
    """A fresh deployment would see breakers open without a cause."""
    router = load_config(None, env={}).router
    assert router.breaker_max_age_ms > load_config(None, env={}).aggregator.timeout_ms
    assert router.breaker_failure_rate >= 0.5 and router.breaker_min_outcomes >= 20
