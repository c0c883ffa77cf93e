"""Nodes that die, sleep, or read what kills them; the fault matrix, one test per row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common.redis_keys import DEAD_LETTERS, RedisKeys
from common.types import FinishReason
from inference_svc.scripted import POISON
from tests.chaos import sabotage
from tests.chaos.cluster import Cluster
from tests.chaos.trial import LONG, PLAIN, judged, loaded, progress, recomputed, second_attempts, texts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

LONGER = replace(PLAIN, filler_chars=(100, 150))
HEARTBEAT_S = 3.0
LEASE_S = 2.0
SWEEP_S = LEASE_S / 2


async def test_node_killed_mid_pass(cluster: Cluster) -> None:
    """What the dead node had is lost, comes late, or is computed again although it was finished."""
    async with loaded(cluster, LONGER) as workload:
        num_lost = await sabotage.kill_at_work(cluster, cluster.nodes[0])
        begin_s = time.monotonic()
        await sabotage.until_taken_over(cluster, cluster.nodes[0])
        taken_s = time.monotonic() - begin_s
        cluster.nodes[0].start()
        await cluster.nodes[0].wait_healthy()
        await progress(workload, 2 * LONGER.num_clients)
    report = await judged(cluster, workload.history, lost_leases=num_lost)
    assert second_attempts(workload.history) >= num_lost
    assert recomputed(workload.history) == set()
    assert report.num_answers == report.num_questions
    assert taken_s < min(HEARTBEAT_S, LEASE_S) + 2 * SWEEP_S + 2.0


async def test_node_stopped_past_its_lease(cluster: Cluster) -> None:
    """A node that wakes up after others took over must not bring a second outcome."""
    node = cluster.nodes[0]
    async with loaded(cluster, LONGER) as workload:
        num_lost, num_refused = 0, 0
        for _ in range(10):
            num_lost += await sabotage.stop_at_work(cluster, node)
            await sabotage.until_taken_over(cluster, node)
            node.resume()
            await progress(workload, 2 * LONGER.num_clients)
            assert node.running, node.log[-4000:]
            num_refused = node.log.count("came too late")
            if num_refused:
                break
    await judged(cluster, workload.history, lost_leases=num_lost, refused_commits=num_refused)
    assert second_attempts(workload.history) >= 1
    await cluster.until_idle(30)


async def test_poison_question(cluster: Cluster) -> None:
    """A question that kills every worker keeps killing them, or takes its siblings along."""
    async with _supervised(cluster), cluster.client() as client:
        asked = texts("", POISON, "", LONG)
        results = await client.ask(asked, timeout_ms=100_000, max_tokens=256)
        num_kills = sum(node.num_starts for node in cluster.nodes) - len(cluster.nodes)
        async with cluster.redis.client() as redis:
            letters = await redis.xlen(RedisKeys(cluster.settings.name).name(DEAD_LETTERS))
        after = await client.ask(texts("afterwards"))
    assert [result.text for result in results if result.question_index != 1] == [asked[0], asked[2], asked[3]]
    assert results[1].finish_reason is FinishReason.ERROR
    assert (num_kills, letters) == (3, 1)
    assert after[0].finish_reason is FinishReason.STOP


@asynccontextmanager
async def _supervised(cluster: Cluster) -> AsyncIterator[None]:
    """Nodes that end are started again, as an orchestrator does."""

    async def watch() -> None:
        while True:
            for node in cluster.nodes:
                if not node.running:
                    node.start()
                    await node.wait_healthy()
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
