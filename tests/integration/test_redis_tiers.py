"""The three tiers over Redis, each with its own connection as if in a process of its own; the forward is a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from aggregator_svc.service import AggregatorService
from aggregator_svc.settings import AggregatorSettings
from common.clock import SystemClock
from common.config import Config, load_config
from common.errors import StoreUnavailableError
from common.redis_link import RedisLink
from common.redis_registry import RedisRegistry
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_source import RedisSource
from common.redis_streams import RedisTransport
from common.request import RequestRules, parse_request
from common.tokenization import Detokenizer
from common.types import (
    BreakerState,
    ChannelSnapshot,
    FinishReason,
    RequestSpec,
    RequestState,
    RequestView,
    StreamEvent,
    StreamEventType,
)
from inference_svc.plan import StepOutput, StepPlan
from inference_svc.worker import Worker, WorkerSettings
from kev.testing import ScriptedNode, ScriptedRunner, byte_tokenizer
from router_svc.service import RouterService
from router_svc.settings import RouterSettings
from tests.contract.redis_servers import running_server
from tests.integration.scripted_runners import GuidedRunner

CONFIG = load_config({"kev": {"router": {"max_parallel_queries": 4, "channel_pool_size": 8}}}, env={})
TOKENIZER = byte_tokenizer()


class SlowRunner(ScriptedRunner):
    """Takes its time over every token, as a model does."""

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(0.002)
        return super().execute(plan)


@dataclass
class Deployment:
    """Starts tiers against one server."""

    url: str
    name: str
    lease_timeout_s: float = 10.0
    """Longer than a starved process sleeps: who is slow must not pass for dead."""

    async def transport(self, node_id: str) -> tuple[RedisLink, RedisTransport]:
        link = await RedisLink.connect(LinkSettings(url=self.url, deployment=self.name, block_s=0.5))
        lease_s = self.lease_timeout_s
        settings = RedisTransportSettings(
            num_channels=8, node_id=node_id, lease_timeout_s=lease_s, heartbeat_ttl_s=0.6 * lease_s
        )
        return link, RedisTransport(link=link, clock=SystemClock(), settings=settings)

    @asynccontextmanager
    async def router(self, config: Config = CONFIG) -> AsyncIterator[RouterService]:
        link, transport = await self.transport("router")
        service = RouterService(
            tokenizer=TOKENIZER,
            work=transport,
            registry=RedisRegistry(link=link),
            clock=SystemClock(),
            settings=RouterSettings.from_config(config),
            board=transport,
        )
        async with _running(service.run(), link, transport):
            yield service

    @asynccontextmanager
    async def aggregator(self) -> AsyncIterator[AggregatorService]:
        link, transport = await self.transport("aggregator")
        source = RedisSource(link=link, settings=transport.settings)
        service = AggregatorService(
            results=source, work=transport, clock=SystemClock(), settings=AggregatorSettings(), source=source
        )
        async with _running(service.run(), link, transport):
            yield service

    @asynccontextmanager
    async def node(
        self, node_id: str, script: Callable[[str], str], runner: ScriptedRunner | None = None
    ) -> AsyncIterator[ScriptedNode]:
        link, transport = await self.transport(node_id)
        node = ScriptedNode(CONFIG, runner or SlowRunner(script), SystemClock())
        settings = WorkerSettings(
            node_id=node_id,
            max_slots=4,
            fingerprint=TOKENIZER.fingerprint,
            eos_ids=TOKENIZER.eos_ids,
            lease_timeout_s=self.lease_timeout_s,
        )
        worker = Worker(transport, SystemClock(), settings, lambda: Detokenizer(TOKENIZER))
        engine = node.start(worker.events_from(asyncio.get_running_loop()))
        try:
            async with _running(worker.run(engine), link, transport):
                yield node
        finally:
            await asyncio.to_thread(node.close)


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None], link: RedisLink, transport: RedisTransport) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await transport.close()
        await link.close()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server("valkey", tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def deployment(redis_url: str) -> Deployment:
    return Deployment(redis_url, f"test-{uuid4().hex}")


def _spec(texts: list[str], **options: object) -> RequestSpec:
    rules = replace(RequestRules.from_config(CONFIG, vocab_size=TOKENIZER.vocab_size), timeout_ms=20_000)
    return parse_request(texts, {"strategy": "round_robin", **options}, rules)


async def test_questions_cross_three_tiers(deployment: Deployment) -> None:
    """Answers, order, audit fields and stream of a request whose tiers meet in Redis only."""
    async with (
        deployment.aggregator() as aggregator,
        deployment.router() as router,
        deployment.node("node-a", lambda q: q[::-1]),
    ):
        texts = [f"question {i} 你好" for i in range(12)]
        request_id = await router.submit(_spec(texts))
        view = await aggregator.wait(request_id, 20)
        assert view.state is RequestState.COMPLETE
        assert [result.text for result in view.results] == [text[::-1] for text in texts]
        assert {result.node_id for result in view.results} == {"scripted-0"}
        events = [event async for event in aggregator.stream(request_id)]
        assert [event.event_index for event in events] == list(range(len(events)))
        async with asyncio.timeout(10):
            while any(channel.num_queued for channel in router.channels()):
                await asyncio.sleep(0.02)


async def test_a_request_may_come_before_any_node(deployment: Deployment) -> None:
    """The backlog of a deployment whose nodes start last is served, not lost."""
    async with deployment.aggregator() as aggregator, deployment.router() as router:
        request_id = await router.submit(_spec(["early"]))
        async with deployment.node("node-a", lambda q: q.upper()):
            view = await aggregator.wait(request_id, 20)
    assert [result.text for result in view.results] == ["EARLY"]


async def test_a_dead_nodes_questions_go_to_another(deployment: Deployment) -> None:
    """A node that vanishes in mid-answer delays its questions by a heartbeat, not for ever."""

    def stuck(_: str) -> str:
        return "never finished " * 200

    async with deployment.aggregator() as aggregator, deployment.router() as router:
        async with deployment.node("node-a", stuck):
            request_id = await router.submit(_spec(["a", "b"], max_tokens=3000))
            await asyncio.sleep(0.2)
        async with deployment.node("node-b", lambda q: q * 2):
            view = await aggregator.wait(request_id, 20)
    assert all(result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for result in view.results)


async def test_a_router_hears_what_nodes_failed_of(deployment: Deployment) -> None:
    """Channels whose node has no memory would get their share until their questions run out of time."""
    config = load_config(
        {"kev": {"router": {"max_parallel_queries": 4, "channel_pool_size": 8, "breaker_min_outcomes": 2}}}, env={}
    )

    def break_always(_: StepPlan) -> None:
        raise MemoryError

    broken = GuidedRunner(lambda q: q)
    broken.before = break_always

    async def idle(router: RouterService) -> list[ChannelSnapshot]:
        async with asyncio.timeout(10):
            while any(channel.num_queued for channel in router.channels()):
                await asyncio.sleep(0.02)
        return router.channels()

    async with deployment.aggregator() as aggregator:
        async with deployment.router(config) as router, deployment.node("node-a", lambda q: q, broken):
            view = await aggregator.wait(await router.submit(_spec(["a"] * 16)), 20)
            reasons = {result.error.reason for result in view.results if result.error is not None}
            assert {result.finish_reason for result in view.results} == {FinishReason.ERROR} and len(reasons) == 1
            seen = await idle(router)
            assert {(c.breaker, c.num_recent_failures) for c in seen} == {(BreakerState.OPEN, 2)}
            assert {channel.main_failure for channel in seen} == reasons
        # Both begin anew: a router without a past, and a node that works.
        async with deployment.router(config) as router, deployment.node("node-a", lambda q: q * 2):
            view = await aggregator.wait(await router.submit(_spec(["b"] * 16)), 20)
            assert {result.text for result in view.results} == {"bb"}
            assert {(c.breaker, c.main_failure) for c in await idle(router)} == {(BreakerState.CLOSED, "")}


async def test_a_question_that_lost_two_nodes_has_its_last_try_alone(deployment: Deployment) -> None:
    """Neighbours of a question that kills its nodes would become dead letters with it."""
    runner = GuidedRunner(lambda q: q.upper())
    deployment = replace(deployment, lease_timeout_s=1.0)
    async with deployment.aggregator() as aggregator, deployment.router() as router:
        suspect = await router.submit(_spec(["suspect"]))
        link, lost_node = await deployment.transport("lost")
        for attempt in (1, 2):
            [lease] = await lost_node.lease(1, 10)
            assert lease.attempt == attempt
        siblings = await router.submit(_spec([f"sibling {i}" for i in range(3)]))
        async with deployment.node("node-a", str.upper, runner):
            views = [await aggregator.wait(request_id, 20) for request_id in (suspect, siblings)]
        await lost_node.close()
        await link.close()
    assert [result.text for view in views for result in view.results] == [
        "SUSPECT",
        *(f"SIBLING {i}" for i in range(3)),
    ]
    assert [result.attempt for view in views for result in view.results] == [3, 1, 1, 1]
    assert {forward for forward in runner.forwards if "suspect" in forward} == {frozenset({"suspect"})}


async def test_a_restarted_aggregator_knows_everything(deployment: Deployment) -> None:
    """Results, running requests and deadlines survive the aggregator's restart."""
    async with deployment.router() as router:
        async with deployment.aggregator() as aggregator, deployment.node("node-a", lambda q: q * 2):
            finished = await router.submit(_spec(["done"]))
            await aggregator.wait(finished, 20)
        running = await router.submit(_spec(["later"]))
        dying = await router.submit(_spec(["nobody answers"], timeout_ms=700))
        async with deployment.aggregator() as aggregator:
            assert [r.text for r in (await aggregator.poll(finished)).results] == ["donedone"]
            view = await aggregator.wait(dying, 20)
            assert [r.finish_reason for r in view.results] == [FinishReason.TIMEOUT_QUEUED]
            async with deployment.node("node-b", lambda q: q * 2):
                assert [r.text for r in (await aggregator.wait(running, 20)).results] == ["laterlater"]


async def test_cancel_crosses_redis(deployment: Deployment) -> None:
    """A cancelled request frees its slots on the node and its channels at the router."""
    async with (
        deployment.aggregator() as aggregator,
        deployment.router() as router,
        deployment.node("node-a", lambda q: "x" * 3000) as node,
    ):
        request_id = await router.submit(_spec(["a"] * 4, max_tokens=3000))
        async with asyncio.timeout(10):
            while node.stats().num_running < 4:
                await asyncio.sleep(0.02)
        assert await aggregator.cancel(request_id) == 4
        async with asyncio.timeout(10):
            while node.stats().num_running or any(channel.num_queued for channel in router.channels()):
                await asyncio.sleep(0.02)
        assert node.stats().kv_bytes_used == 0


async def _answered(aggregator: AggregatorService, request_id: str) -> RequestView:
    """Wait as a client does who was told to try again."""
    async with asyncio.timeout(20):
        while True:
            with suppress(StoreUnavailableError):
                return await aggregator.wait(request_id, 20)
            await asyncio.sleep(0.05)


async def test_a_flushed_store_costs_an_attached_request_nothing(deployment: Deployment) -> None:
    """FLUSHALL while a client waits: the router registers and publishes again what nobody has, and nobody is told
    meanwhile that the request does not exist."""
    async with deployment.router() as router:
        request_id = await router.submit(_spec(["a", "b", "c"]))
        async with Redis.from_url(deployment.url) as client:
            await client.flushall()
        async with deployment.aggregator() as aggregator, deployment.node("node-a", lambda q: q * 2):
            view = await _answered(aggregator, request_id)
    assert [result.text for result in view.results] == ["aa", "bb", "cc"]


async def test_a_flushed_store_costs_a_request_that_waits_nothing(deployment: Deployment) -> None:
    """FLUSHALL while questions wait in the router only: their answers would belong to a request that nobody knows."""
    texts = [f"question {i}" for i in range(20)]
    router = {"channel_pool_size": 8, "channel_queue_size": 1, "overflow_policy": "queue"}
    config = load_config({"kev": {"router": router}}, env={})
    async with deployment.router(config) as service:
        request_id = await service.submit(_spec(texts))
        assert sum(channel.num_queued for channel in service.channels()) == 8, "the others wait in the router"
        async with Redis.from_url(deployment.url) as client:
            await client.flushall()
        async with deployment.aggregator() as aggregator, deployment.node("node-a", str.upper):
            view = await _answered(aggregator, request_id)
    assert [result.text for result in view.results] == [text.upper() for text in texts]


async def test_a_stream_goes_on_at_another_aggregator(deployment: Deployment) -> None:
    """A client that resumes by its event number after a crash would miss a piece of text, or be given one twice."""
    async with deployment.router() as router, deployment.node("node-a", lambda q: q * 100):
        request_id = await router.submit(_spec(["ab", "cd"], max_tokens=250))
        seen: list[StreamEvent] = []
        while not seen or seen[-1].type is not StreamEventType.DONE:
            async with deployment.aggregator() as aggregator:
                await aggregator.load(request_id)
                async with aclosing(aggregator.stream(request_id, len(seen))) as events:
                    async for event in events:
                        seen.append(event)
                        if len(seen) % 25 == 0:
                            break
        async with deployment.aggregator() as last:
            assert await last.poll(request_id)
            whole = [event async for event in last.stream(request_id)]
    assert [event.event_index for event in seen] == list(range(len(seen)))
    assert len(seen) > 50, "the stream ended before anything was restarted"
    assert [_told(event) for event in seen] == [_told(event) for event in whole]
    texts = {index: "".join(e.text for e in seen if e.question_index == index) for index in (0, 1)}
    assert texts == {0: "ab" * 100, 1: "cd" * 100}


async def test_two_aggregators_tell_the_same(deployment: Deployment) -> None:
    """During a rolling update a client would be told another outcome, or none, by the aggregator it comes to next."""
    async with (
        deployment.router() as router,
        deployment.aggregator() as one,
        deployment.aggregator() as other,
    ):
        dying = await router.submit(_spec(["nobody answers"] * 2, timeout_ms=500))
        cancelled = await router.submit(_spec(["nobody asks"] * 2))
        await asyncio.gather(one.load(dying), other.load(dying), one.load(cancelled), other.load(cancelled))
        withdrawn = await asyncio.gather(one.cancel(cancelled), other.cancel(cancelled))
        assert sum(withdrawn) == 2
        assert await _ends_told_by(one, other, request_id=cancelled) == {FinishReason.CANCELLED}
        assert await _ends_told_by(one, other, request_id=dying) == {FinishReason.TIMEOUT_QUEUED}
        async with deployment.node("node-a", lambda q: q * 30):
            running = await router.submit(_spec(["ab", "cd", "ef"], max_tokens=200))
            assert await _ends_told_by(one, other, request_id=running) == {FinishReason.STOP}


async def _ends_told_by(*aggregators: AggregatorService, request_id: str) -> set[FinishReason]:
    """How the questions of a request ended, after making sure that all aggregators tell every event alike."""
    views = await asyncio.gather(*(aggregator.wait(request_id, 20) for aggregator in aggregators))
    logs = [[_told(event) async for event in aggregator.stream(request_id)] for aggregator in aggregators]
    assert logs[0] == logs[1]
    return {result.finish_reason for view in views for result in view.results}


async def test_an_aggregator_that_dies_between_two_words_keeps_its_word(deployment: Deployment) -> None:
    """A cancellation that was carried out would be told as a timeout by the aggregator that comes next."""
    async with deployment.router() as router:
        async with deployment.aggregator() as aggregator:
            request_id = await router.submit(_spec(["a", "b"], timeout_ms=1_000))
            assert await aggregator.cancel(request_id) == 2
            told = await aggregator.wait(request_id, 5)
        await asyncio.sleep(1.2)
        async with deployment.aggregator() as successor, deployment.node("node-a", lambda q: q * 2):
            view = await successor.wait(request_id, 5)
            assert await successor.cancel(request_id) == 0
    assert [(r.finish_reason, r.text, r.finished_at) for r in view.results] == [
        (r.finish_reason, r.text, r.finished_at) for r in told.results
    ]
    assert {r.finish_reason for r in view.results} == {FinishReason.CANCELLED}


def _told(event: StreamEvent) -> StreamEvent:
    """An event as every aggregator tells it: how long a question took is measured when its outcome is read."""
    return event if event.result is None else replace(event, result=replace(event.result, elapsed_ms=0))
