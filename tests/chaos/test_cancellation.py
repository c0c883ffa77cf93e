"""A call cancelled at its first await, at its second, at every one: what it held is given back, replies stay apart.

The tiers are those of ``tests.integration.test_redis_tiers``: each with connections of its own, over a real server,
here through a slow proxy. The cancelled call is the router's or aggregator's own, as gRPC cancels it when a client
goes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from aggregator_svc.service import AggregatorService
from common.request import RequestRules, parse_request
from common.types import FinishReason, RequestSpec
from inference_svc.scripted import ScriptedNode
from router_svc.service import RouterService
from tests.chaos.cancellation import cancelled_at
from tests.chaos.cluster import until
from tests.chaos.proxy import Delay, FaultProxy
from tests.contract.redis_servers import running_server
from tests.integration.test_redis_tiers import CONFIG, TOKENIZER, Deployment
from tests.ports import free_port

pytestmark = [pytest.mark.store, pytest.mark.timeout(120)]

DELAY_S = 0.001
RULES = replace(RequestRules.from_config(CONFIG, vocab_size=TOKENIZER.vocab_size), timeout_ms=60_000)


def spec(text: str, request_id: str | None = None) -> RequestSpec:
    """A request of one question; the script answers with it."""
    return parse_request([text], {} if request_id is None else {"request_id": request_id}, RULES)


@dataclass
class Tiers:
    """The three tiers, those that are called behind slow links."""

    router: RouterService
    aggregator: AggregatorService
    node: ScriptedNode
    delays: Delay

    async def answer(self, request: RequestSpec) -> str:
        """Submit and wait; the only text."""
        view = await self.aggregator.wait(await self.router.submit(request), 60)
        [result] = view.results
        assert result.finish_reason is FinishReason.STOP, result
        return result.text

    async def until_idle(self) -> None:
        """Return when nothing is held anywhere."""
        await until(self._is_idle, 30, "places, slots and cache to be given back")

    async def _is_idle(self) -> bool:
        stats = self.node.stats()
        queued = sum(channel.num_queued for channel in self.router.channels())
        overflow = self.router.stats().num_overflow
        return not any((stats.num_running, stats.num_waiting, stats.kv_bytes_used, queued, overflow))


@pytest.fixture
async def tiers(tmp_path: Path) -> AsyncIterator[Tiers]:
    port = free_port()
    with running_server("valkey", tmp_path, port) as url:
        async with FaultProxy(port) as proxy, proxy.broken_by(Delay(DELAY_S)) as delays:
            far = Deployment(f"redis://127.0.0.1:{proxy.port}/0", "cancelled")
            near = Deployment(url, "cancelled")
            async with far.router() as router, far.aggregator() as aggregator, near.node("node", str) as node:
                assert isinstance(delays, Delay)
                yield Tiers(router, aggregator, node, delays)


async def test_a_submission_cancelled_at_every_await(tiers: Tiers) -> None:
    """A place stays taken, the next caller reads the reply of this one, or a repetition gets a cancellation."""
    place = 1
    while await cancelled_at(tiers.router.submit(spec(f"cut {place}", f"cut-{place}")), place):
        assert await tiers.answer(spec(f"other {place}")) == f"other {place}"
        assert await tiers.answer(spec(f"cut {place}", f"cut-{place}")) == f"cut {place}"
        place += 1
    assert place >= 2, "there was nowhere to cancel it"
    assert tiers.delays.num_fired > 0
    await tiers.until_idle()


async def _read(aggregator: AggregatorService, request_id: str) -> None:
    async with aclosing(aggregator.stream(request_id)) as events:  # type: ignore[type-var]
        async for _ in events:
            pass


READERS: list[Callable[[AggregatorService, str], Coroutine[Any, Any, Any]]] = [
    lambda aggregator, request_id: aggregator.wait(request_id, 60),
    lambda aggregator, request_id: aggregator.poll(request_id),
    _read,
]


@pytest.mark.parametrize("read", READERS, ids=["wait", "poll", "stream"])
async def test_a_reader_cancelled_at_every_await(
    tiers: Tiers, read: Callable[[AggregatorService, str], Coroutine[Any, Any, Any]]
) -> None:
    """A reader that leaves takes the answer along, or leaves its reply to the next one."""
    place = 1
    while True:
        request_id = await tiers.router.submit(spec(f"read {place}"))
        is_cut = await cancelled_at(read(tiers.aggregator, request_id), place)
        view = await tiers.aggregator.wait(request_id, 60)
        assert [result.text for result in view.results] == [f"read {place}"]
        if not is_cut:
            break
        place += 1
    await tiers.until_idle()


async def test_a_withdrawal_cancelled_at_every_await(tiers: Tiers) -> None:
    """A caller that leaves while it withdraws leaves a question that runs for nobody, or without an outcome."""
    place = 1
    while True:
        request_id = await tiers.router.submit(spec("." * 200))
        is_cut = await cancelled_at(tiers.aggregator.cancel(request_id), place)
        [result] = (await tiers.aggregator.wait(request_id, 60)).results
        assert result.finish_reason in (FinishReason.CANCELLED, FinishReason.STOP, FinishReason.LENGTH)
        if not is_cut:
            break
        place += 1
    await tiers.until_idle()
