"""The three tiers over Redis, each with its own connection as if in a process of its own; the forward is a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from aggregator_svc.service import AggregatorService
from aggregator_svc.settings import AggregatorSettings
from common.clock import SystemClock
from common.config import load_config
from common.errors import RequestNotFoundError
from common.redis_link import RedisLink
from common.redis_registry import RedisRegistry
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_source import RedisSource
from common.redis_streams import RedisTransport
from common.request import RequestRules, parse_request
from common.tokenization import Detokenizer
from common.types import FinishReason, RequestSpec, RequestState
from inference_svc.plan import StepOutput, StepPlan
from inference_svc.worker import Worker, WorkerSettings
from kev.testing import ScriptedNode, ScriptedRunner, byte_tokenizer
from router_svc.service import RouterService
from router_svc.settings import RouterSettings
from tests.contract.redis_servers import running_server

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

    async def transport(self, node_id: str) -> tuple[RedisLink, RedisTransport]:
        link = await RedisLink.connect(LinkSettings(url=self.url, deployment=self.name, block_s=0.5))
        settings = RedisTransportSettings(num_channels=8, node_id=node_id, lease_timeout_s=1.0, heartbeat_ttl_s=0.6)
        return link, RedisTransport(link=link, clock=SystemClock(), settings=settings)

    @asynccontextmanager
    async def router(self) -> AsyncIterator[RouterService]:
        link, transport = await self.transport("router")
        service = RouterService(
            tokenizer=TOKENIZER,
            work=transport,
            registry=RedisRegistry(link=link),
            clock=SystemClock(),
            settings=RouterSettings.from_config(CONFIG),
            board=transport,
        )
        async with _running(service.run(), link, transport):
            yield service

    @asynccontextmanager
    async def aggregator(self) -> AsyncIterator[AggregatorService]:
        link, transport = await self.transport("aggregator")
        service = AggregatorService(
            results=transport,
            work=transport,
            clock=SystemClock(),
            settings=AggregatorSettings(),
            source=RedisSource(RedisRegistry(link=link), transport),
        )
        async with _running(service.run(), link, transport):
            yield service

    @asynccontextmanager
    async def node(self, node_id: str, script: Callable[[str], str]) -> AsyncIterator[ScriptedNode]:
        link, transport = await self.transport(node_id)
        node = ScriptedNode(CONFIG, SlowRunner(script), SystemClock())
        settings = WorkerSettings(
            node_id=node_id,
            max_slots=4,
            fingerprint=TOKENIZER.fingerprint,
            eos_ids=TOKENIZER.eos_ids,
            lease_timeout_s=1.0,
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


async def test_a_flushed_store_costs_an_attached_request_nothing(deployment: Deployment) -> None:
    """FLUSHALL while a client waits: the router registers and publishes again what nobody has."""
    async with deployment.router() as router:
        request_id = await router.submit(_spec(["a", "b", "c"]))
        async with Redis.from_url(deployment.url) as client:
            await client.flushall()
        async with deployment.aggregator() as aggregator, deployment.node("node-a", lambda q: q * 2):
            async with asyncio.timeout(20):
                while True:
                    with suppress(RequestNotFoundError):
                        view = await aggregator.wait(request_id, 20)
                        break
                    await asyncio.sleep(0.05)
    assert [result.text for result in view.results] == ["aa", "bb", "cc"]
