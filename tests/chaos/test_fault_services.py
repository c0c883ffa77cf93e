"""Routers, aggregators and clients that go away or do not keep up; the fault matrix, one test per row."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from common.types import FinishReason
from kev.client import AsyncClient
from tests.chaos import sabotage
from tests.chaos.cluster import Cluster, ClusterSettings, until
from tests.chaos.history import Granted
from tests.chaos.processes import ServiceProcess
from tests.chaos.proxy import Blackhole, Direction, FaultProxy
from tests.chaos.trial import LONG, PLAIN, judged, loaded, progress, recomputed, texts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

NUM_RESTARTS = 20
NUM_SLOW = 20


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    """As everywhere; with ``by_num_aggregators`` also with two aggregators."""
    async with Cluster(tmp_path, ClusterSettings(num_aggregators=getattr(request, "param", 1))) as cluster:
        yield cluster


by_num_aggregators = pytest.mark.parametrize("cluster", [1, 2], indirect=True, ids=["one", "two"])


@by_num_aggregators
@pytest.mark.parametrize("tier", ["aggregators", "routers"])
async def test_crash_of_a_service(cluster: Cluster, tier: str) -> None:
    """Streams rewind or end early, or a retry starts the same work a second time."""
    victim: ServiceProcess = getattr(cluster, tier)[0]
    async with loaded(cluster, replace(PLAIN, stream_share=1.0)) as workload:
        async with cluster.client() as client:
            asked = texts(LONG)
            options = {"request_id": "asked-twice", "timeout_ms": 60_000, "max_tokens": 256}
            await client.submit(asked, **options)
            await victim.restart()
            assert await client.submit(asked, **options) == "asked-twice"
            results = await client.wait("asked-twice", 60)
            assert [result.text for result in results] == asked
            await victim.restart()
        await progress(workload, PLAIN.num_clients)
    await judged(cluster, workload.history, crashes=victim.num_starts - 1)
    assert {g.attempt for g in workload.history if isinstance(g, Granted) and g.request_id == "asked-twice"} <= {1}


async def test_client_leaves_or_runs_out_of_time(cluster: Cluster) -> None:
    """A slot stays taken for nobody."""
    async with cluster.client() as client:
        for _ in range(5):
            call = asyncio.create_task(client.ask(texts(LONG, LONG), timeout_ms=60_000, max_tokens=256))
            await until(lambda: _runs(client), 10, "the questions to run")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await cluster.until_idle(2.0)
        results = await client.ask(texts(LONG, LONG), timeout_ms=60, max_tokens=256)
        assert {r.finish_reason for r in results} <= {FinishReason.TIMEOUT_QUEUED, FinishReason.TIMEOUT_RUNNING}
        await cluster.until_idle(2.0)
    assert await sabotage.leave_a_stream(cluster) > 0
    await cluster.until_idle(10.0)


async def _runs(client: AsyncClient) -> bool:
    return any(channel.num_queued for channel in await client.channels())


async def test_slow_stream_readers(cluster: Cluster) -> None:
    """Readers that do not read fill the aggregator's memory, hold up the others, or miss something afterwards."""
    aggregator = cluster.aggregators[0]
    async with FaultProxy(cluster.doors["aggregator-0"].port) as narrow, loaded(cluster, PLAIN) as workload:
        usual_s = statistics.median(workload.latencies_s)
        before, num_before = aggregator.resident_bytes(), len(workload.latencies_s)
        async with AsyncClient(cluster.address("router-0"), f"127.0.0.1:{narrow.port}") as slow:
            await slow.ready()  # connected, so that only what is read stands still
            asked = texts(*[LONG] * 8)
            request_ids = [await slow.submit(asked, timeout_ms=60_000, max_tokens=256) for _ in range(NUM_SLOW)]
            async with narrow.broken_by(Blackhole(Direction.REPLY)) as fault:
                readers = [asyncio.create_task(_read(slow, request_id)) for request_id in request_ids]
                await fault.wait_fired(10)
                async with cluster.client() as quick:
                    for request_id in request_ids:  # all of it is there to be read, and nobody takes it
                        await quick.wait(request_id, 60)
                await progress(workload, 4 * PLAIN.num_clients)
                grown = aggregator.resident_bytes() - before
                meanwhile_s = statistics.median(workload.latencies_s[num_before:])
            assert [await reader for reader in readers] == [asked] * NUM_SLOW
    await judged(cluster, workload.history, held_back=fault.num_fired)
    assert grown < 50 << 20
    assert meanwhile_s < 4 * usual_s + 0.5


async def _read(client: AsyncClient, request_id: str) -> list[str]:
    """The texts that a stream adds up to."""
    found = {}
    async with aclosing(client.stream(request_id)) as events:  # type: ignore[type-var]
        async for event in events:
            if event.result is not None:
                found[event.result.question_index] = event.result.text
    return [found[index] for index in sorted(found)]


@by_num_aggregators
async def test_rolling_restarts_under_load(cluster: Cluster) -> None:
    """A restart that was announced costs a caller its answer."""
    async with loaded(cluster, PLAIN) as workload:
        for number in range(NUM_RESTARTS):
            await sabotage.replace(cluster.services[number % len(cluster.services)])
        await progress(workload, PLAIN.num_clients)
    report = await judged(cluster, workload.history, restarts=NUM_RESTARTS)
    assert report.reasons == {}, "a caller saw an error"
    assert (report.num_placeholders, report.num_unknown) == (0, 0)
    assert report.num_answers == report.num_questions
    assert recomputed(workload.history) == set()
