"""Links to Redis that end or crawl, and calls cancelled meanwhile; the fault matrix, one test per row."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.chaos.cancellation import cancelled_at
from tests.chaos.cluster import Cluster
from tests.chaos.history import make_nonce
from tests.chaos.proxy import CutBeforeReply, Delay
from tests.chaos.trial import LOAD, LONG, judged, loaded, texts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

NUM_CUTS = 20
NUM_CANCELLED = 60


@pytest.mark.parametrize("victim", ["router-0", "inference-0", "aggregator-0"])
async def test_connection_cut_before_the_reply(cluster: Cluster, victim: str) -> None:
    """A write that took effect is done again because its reply was lost, and somebody sees it twice."""
    link = cluster.links[victim]
    async with loaded(cluster) as workload:
        num_cuts = 0
        for _ in range(NUM_CUTS):
            async with link.broken_by(CutBeforeReply(b"EVALSHA")) as fault:
                await fault.wait_fired(20)
                num_cuts += fault.num_fired
            await asyncio.sleep(0.05)
    await judged(cluster, workload.history, cuts=num_cuts)
    await cluster.until_idle()


async def test_cancelled_calls_over_slow_links(cluster: Cluster) -> None:
    """A call cancelled half way gives its reply to the next caller, or leaves a place, a slot or a lease behind."""
    numbers = random.Random(5)
    delays = {name: Delay(0.01) for name in cluster.links}
    async with loaded(cluster, replace(LOAD, cancel_share=0.3)) as workload, cluster.client() as client:
        for name, link in cluster.links.items():
            link.fault = delays[name]
        num_cancelled = 0
        for _ in range(NUM_CANCELLED):
            call = asyncio.create_task(client.ask(texts(LONG), timeout_ms=20_000, max_tokens=256))
            await asyncio.sleep(numbers.uniform(0, 0.2))
            num_cancelled += call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        for link in cluster.links.values():
            link.fault = None
    await judged(
        cluster, workload.history, cancelled=num_cancelled, delays=min(delay.num_fired for delay in delays.values())
    )
    await cluster.until_idle()


async def test_a_client_cancelled_at_every_await(cluster: Cluster) -> None:
    """A client that gives up anywhere gets a stranger's reply at its next call, or leaves something behind."""
    numbers = random.Random(3)
    place, num_cancelled = 1, 0
    async with cluster.client() as client:
        while True:
            is_cut = await cancelled_at(client.ask([make_nonce(numbers)], timeout_ms=20_000), place)
            own = make_nonce(numbers)
            assert [result.text for result in await client.ask([own], timeout_ms=20_000)] == [own]
            if not is_cut:
                break
            place, num_cancelled = place + 1, num_cancelled + 1
    assert num_cancelled >= 2, "one await to submit, one to wait"
    await cluster.until_idle()
