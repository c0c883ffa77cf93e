"""The fault matrix on a real cluster: one test per row, each sure that its fault has happened.

Every run is judged by the same checker; what a row demands beyond that stands in its test. Nodes answer with their
question, one byte per step.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from common.errors import KevError, QueueFullError, RequestNotFoundError
from common.redis_keys import DEAD_LETTERS, WORK, WORK_GROUP, RedisKeys
from common.types import FinishReason
from inference_svc.scripted import POISON
from kev.client import AsyncClient
from tests.chaos.checker import Report, check
from tests.chaos.cluster import Cluster, ClusterSettings, until
from tests.chaos.history import Broken, Committed, Granted, History, make_nonce
from tests.chaos.processes import ServiceProcess
from tests.chaos.proxy import CutBeforeReply, Delay, FaultProxy, Throttle
from tests.chaos.workload import Workload, WorkloadSettings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

LOAD = WorkloadSettings(
    num_requests=10**9, duration_s=6.0, settle_s=40.0, filler_chars=(0, 60), num_clients=6, max_questions=3
)
PLAIN = replace(LOAD, cancel_share=0.0, deadline_share=0.0)
"""Nothing but answers may come of it."""
LEASE_S = 2.0
SWEEP_S = LEASE_S / 2
HEARTBEAT_S = 3.0
LONG = "." * 220
ANSWERED = {FinishReason.STOP, FinishReason.LENGTH}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as cluster:
        yield cluster


@asynccontextmanager
async def loaded(cluster: Cluster, settings: WorkloadSettings = LOAD) -> AsyncIterator[Workload]:
    """A workload goes on inside the block, and to its end after it."""
    async with cluster.client() as client:
        workload = Workload(client, settings)
        running = asyncio.create_task(workload.run())
        try:
            await until(lambda: _has_outcomes(workload), 20, "the first outcomes")
            yield workload
            workload.stop()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _has_outcomes(workload: Workload) -> bool:
    return len(workload.latencies_s) >= LOAD.num_clients


async def judged(cluster: Cluster, history: History, **fired: int) -> Report:
    """The checker's verdict; the records are kept if it is bad."""
    for fault, number in fired.items():
        assert number > 0, f"{fault} never happened"
        history.add(Broken(fault=fault, num_fired=number))
    await cluster.note_attempts(history)
    report = check(history)
    if not report.clean:
        history.write(Path(cluster.redis.log_path.parent) / "history.jsonl")
    assert report.clean, report.summary()
    assert report.num_answers > 0
    assert "INTERNAL_BUG" not in report.reasons, report.reasons
    return report


def recomputed(history: History) -> set[tuple[str, int]]:
    """Questions that were begun again after their commit."""
    done: set[tuple[str, int]] = set()
    again: set[tuple[str, int]] = set()
    for record in history:
        if isinstance(record, Committed):
            done.add((record.request_id, record.question_index))
        elif isinstance(record, Granted) and (record.request_id, record.question_index) in done:
            again.add((record.request_id, record.question_index))
    return again


def second_attempts(history: History) -> int:
    return sum(isinstance(record, Granted) and record.attempt > 1 for record in history)


def texts(*more: str) -> list[str]:
    numbers = random.Random(7)
    return [make_nonce(numbers) + text for text in more]


# --- nodes


async def test_node_killed_mid_pass(cluster: Cluster) -> None:
    """What the dead node had is lost, comes late, or is computed again although it was finished."""
    async with loaded(cluster, replace(PLAIN, duration_s=30.0, filler_chars=(100, 150))) as workload:
        cluster.nodes[0].kill()
        killed_s = time.monotonic()
        num_before = len(workload.latencies_s)
        await until(lambda: _count(workload, num_before + 6), 20, "answers from the node that is left")
        assert time.monotonic() - killed_s < HEARTBEAT_S + LEASE_S + SWEEP_S + 15
        cluster.nodes[0].start()
        await cluster.nodes[0].wait_healthy()
    report = await judged(cluster, workload.history, kills=1)
    assert second_attempts(workload.history) > 0, "the node held nothing when it was killed"
    assert recomputed(workload.history) == set()
    assert report.num_answers == report.num_questions
    assert max(workload.latencies_s) < HEARTBEAT_S + LEASE_S + SWEEP_S + 10


async def _count(workload: Workload, number: int) -> bool:
    return len(workload.latencies_s) >= number


async def test_node_stopped_past_its_lease(cluster: Cluster) -> None:
    """A node that wakes up after others took over must not bring a second outcome."""
    async with loaded(cluster, replace(PLAIN, duration_s=15.0, filler_chars=(100, 150))) as workload:
        cluster.nodes[0].pause()
        await asyncio.sleep(HEARTBEAT_S + LEASE_S + SWEEP_S)
        cluster.nodes[0].resume()
        await asyncio.sleep(1.0)
        assert cluster.nodes[0].running, cluster.nodes[0].log[-4000:]
    await judged(cluster, workload.history, stops=1)
    assert second_attempts(workload.history) > 0, "the node held nothing when it was stopped"


async def test_poison_question(cluster: Cluster) -> None:
    """A question that kills every worker keeps killing them, or takes its siblings along."""
    async with supervised(cluster), cluster.client() as client:
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
async def supervised(cluster: Cluster) -> AsyncIterator[None]:
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


# --- Redis


async def _restart(cluster: Cluster) -> None:
    cluster.redis.kill()
    await asyncio.sleep(1.0)
    cluster.redis.start()
    await cluster.redis.wait_healthy()


async def _restart_empty(cluster: Cluster) -> None:
    cluster.redis.kill()
    cluster.redis.forget()
    cluster.redis.start()
    await cluster.redis.wait_healthy()


async def _flush(cluster: Cluster) -> None:
    async with cluster.redis.client() as redis:
        await redis.flushall()


async def _destroy_groups(cluster: Cluster) -> None:
    keys = RedisKeys(cluster.settings.name)
    num_destroyed = 0
    async with cluster.redis.client() as redis:
        for channel_id in range(16):
            if await redis.exists(keys.name(WORK, channel_id)):
                num_destroyed += await redis.xgroup_destroy(keys.name(WORK, channel_id), WORK_GROUP)
    assert num_destroyed > 0


REDIS_FAULTS = [_restart, _restart_empty, _flush, _destroy_groups]


@pytest.mark.parametrize("fault", REDIS_FAULTS, ids=lambda fault: fault.__name__.strip("_"))
async def test_redis_loses_something(cluster: Cluster, fault: Callable[[Cluster], object]) -> None:
    """Attached requests hang, unattached ones hang silently, or the processes spin while Redis is away."""
    async with loaded(cluster, replace(PLAIN, duration_s=12.0)) as workload, cluster.client() as client:
        unattached = await client.submit(texts(LONG), timeout_ms=20_000, max_tokens=256)
        begin_s = time.monotonic()
        await client.ask(texts("before"), timeout_ms=20_000)
        usual_s = time.monotonic() - begin_s
        used_s = sum(service.cpu_s() for service in cluster.services)
        begin_s = time.monotonic()
        await fault(cluster)  # type: ignore[misc]
        there_s = time.monotonic()
        answer = await client.ask(texts("again"), timeout_ms=20_000)
        recovery_s = time.monotonic() - there_s
        assert answer[0].finish_reason in ANSWERED
        assert recovery_s <= 2.0 + usual_s
        away_s = there_s - begin_s
        used_s = sum(service.cpu_s() for service in cluster.services) - used_s
        assert used_s < len(cluster.services) * (0.5 * away_s + recovery_s)
        try:
            results = await client.wait(unattached, 25)
            assert len(results) == 1
        except RequestNotFoundError:
            pass  # loud
    await judged(cluster, workload.history, faults=1)


@pytest.mark.parametrize("victim", ["router-0", "inference-0", "aggregator-0"])
async def test_connection_cut_before_the_reply(cluster: Cluster, victim: str) -> None:
    """A write that took effect is done again because its reply was lost, and somebody sees it twice."""
    link = cluster.links[victim]
    async with loaded(cluster) as workload:
        num_cuts = 0
        for _ in range(20):
            async with link.broken_by(CutBeforeReply(b"EVALSHA")) as fault:
                await fault.wait_fired(10)
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
        for _ in range(60):
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


# --- router and aggregator


@pytest.mark.parametrize("tier", ["aggregators", "routers"])
async def test_crash_of_a_service(cluster: Cluster, tier: str) -> None:
    """Streams rewind or end early, or a retry starts the same work a second time."""
    victim: ServiceProcess = getattr(cluster, tier)[0]
    async with loaded(cluster, replace(PLAIN, stream_share=1.0, duration_s=12.0)) as workload:
        async with cluster.client() as client:
            asked = texts(LONG)
            options = {"request_id": "asked-twice", "timeout_ms": 40_000, "max_tokens": 256}
            await client.submit(asked, **options)
            await victim.restart()
            assert await client.submit(asked, **options) == "asked-twice"
            results = await client.wait("asked-twice", 30)
            assert [result.text for result in results] == asked
            await victim.restart()
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
        leaver = AsyncClient(
            f"127.0.0.1:{cluster.doors['router-0'].port}", f"127.0.0.1:{cluster.doors['aggregator-0'].port}"
        )
        stream = leaver.stream(await leaver.submit(texts(LONG), max_tokens=256))
        await anext(stream)
        assert await cluster.doors["aggregator-0"].cut_all() > 0
        await stream.aclose()
        await leaver.close()
        await cluster.until_idle(10.0)


async def _runs(client: AsyncClient) -> bool:
    return any(channel.num_queued for channel in await client.channels())


# --- load


@pytest.mark.parametrize("policy", ["wait", "queue", "reject"])
async def test_overload(tmp_path: Path, policy: str) -> None:
    """Ten times what fits: memory grows, refusals are slow, or less gets done than at full load."""
    sections = {"router": {"overflow_policy": policy, "max_parallel_queries": 4, "channel_pool_size": 8}}
    async with Cluster(tmp_path, ClusterSettings(proxied=False, sections=sections)) as cluster:
        full = replace(PLAIN, num_clients=8, max_questions=2, stream_share=0, attach_share=0, duration_s=6.0)
        peak = await _goodput(cluster, full)
        before = sum(service.resident_bytes() for service in cluster.services)
        refusals: list[float] = []
        async with cluster.client() as client:
            refusing = asyncio.create_task(_time_refusals(client, refusals, 8.0))
            much = await _goodput(cluster, replace(full, num_clients=80, duration_s=8.0))
            await refusing
        grown = sum(service.resident_bytes() for service in cluster.services) - before
        await cluster.until_idle(20)
    assert much >= 0.9 * peak
    assert grown < 100 << 20
    if policy == "reject":
        assert len(refusals) > 10
        assert statistics.median(refusals) <= 0.05


async def _goodput(cluster: Cluster, settings: WorkloadSettings) -> float:
    """Answers per second."""
    async with cluster.client() as client:
        workload = Workload(client, settings)
        begin_s = time.monotonic()
        history = await workload.run()
        spent_s = time.monotonic() - begin_s
    return (await judged(cluster, history)).num_answers / spent_s


async def _time_refusals(client: AsyncClient, found: list[float], duration_s: float) -> None:
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s:
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(1.0):
                await client.ask(texts(""))
        except QueueFullError as error:
            found.append(time.monotonic() - begin_s)
            assert error.retry_after_s > 0
        except TimeoutError:
            pass
        await asyncio.sleep(0.02)


async def test_slow_stream_reader(cluster: Cluster) -> None:
    """One reader that does not read fills the aggregator's memory, or holds up the others."""
    aggregator = cluster.aggregators[0]
    async with FaultProxy(cluster.doors["aggregator-0"].port) as narrow:
        slow = AsyncClient(f"127.0.0.1:{cluster.doors['router-0'].port}", f"127.0.0.1:{narrow.port}", patience_s=60)
        async with slow, loaded(cluster, replace(PLAIN, duration_s=10.0)) as workload:
            usual_s = statistics.median(workload.latencies_s)
            before, num_before = aggregator.resident_bytes(), len(workload.latencies_s)
            async with narrow.broken_by(Throttle(2_000)) as fault:
                request_id = await slow.submit(texts(*[LONG] * 8), timeout_ms=30_000, max_tokens=256)
                stream = slow.stream(request_id)
                await anext(stream)
                await asyncio.sleep(5.0)
                await stream.aclose()
            assert statistics.median(workload.latencies_s[num_before:]) < 3 * usual_s + 0.05
            assert aggregator.resident_bytes() - before < 50 << 20
    await judged(cluster, workload.history, throttled=fault.num_fired)


async def test_rolling_restarts_under_load(cluster: Cluster) -> None:
    """A restart that was announced costs a caller its answer."""
    async with loaded(cluster, replace(PLAIN, duration_s=150.0)) as workload:
        for number in range(20):
            service = cluster.services[number % len(cluster.services)]
            service.terminate()
            assert await service.wait_ended() == 0, service.log[-2000:]
            service.start()
            await service.wait_healthy()
    report = await judged(cluster, workload.history, restarts=20)
    assert report.num_placeholders == 0
    assert report.num_answers == report.num_questions
    assert recomputed(workload.history) == set()


# --- bad input


BAD: list[tuple[object, dict[str, object]]] = [
    ([], {}),
    (["x"] * 257, {}),
    (["x" * 300_000], {}),
    (["good", {"text": "b", "temperature": float("nan")}], {}),
    (["good"], {"top_p": float("inf")}),
    (["half \ud83d"], {}),
    (["nul\0here"], {}),
    ("bare", {}),
    ([None], {}),
    (["good"], {"max_tokens": 0}),
    (["good"], {"max_tokens": 4_097}),
    (["good"], {"max_parallel": 9}),
    (["good"], {"request_id": "a/b"}),
    (["good"], {"isolation": "none"}),
]


async def test_bad_input_over_the_network(tmp_path: Path) -> None:
    """The network blames another field than the engine, says INTERNAL, or falls over."""
    from kev.testing import scripted_engine
    from tests.integration.surfaces import Verdict, async_verdict, http_verdict

    settings = ClusterSettings(num_nodes=1, gateway=True)
    sections = settings.config()
    embedded = {"kev": {name: sections[name] for name in ("router", "core", "aggregator")}}
    async with (
        Cluster(tmp_path, settings) as cluster,
        cluster.client() as client,
        httpx.AsyncClient(base_url=cluster.gateway_url, timeout=20) as http,
        scripted_engine(str, embedded) as engine,
    ):
        for queries, options in BAD:
            verdicts = {
                "Engine": await async_verdict(engine, queries, options),
                "gRPC": await async_verdict(client, queries, options),  # type: ignore[arg-type]
                "HTTP": http_verdict(await http.post("/v1/query", content=_json({**options, "queries": queries}))),
            }
            assert len(set(verdicts.values())) == 1, verdicts
            assert isinstance(verdicts["Engine"], Verdict)
        garbage = await http.post("/v1/query", content=b"\xff\xfe{")
        assert 400 <= garbage.status_code < 500
        with pytest.raises(KevError):
            await client.wait("never-submitted", 1)
        assert (await client.ask(texts("")))[0].finish_reason is FinishReason.STOP


def _json(value: object) -> bytes:
    import json

    return json.dumps(value).encode()
