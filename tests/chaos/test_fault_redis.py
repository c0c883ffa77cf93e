"""A Redis that dies, forgets, fails over, fills up, or is not fit; the fault matrix, one test per row.

A request is attached when a reader has got something of it: such a request is answered, whatever Redis forgot. One that
nobody had attached to may be forgotten, loudly.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from common.errors import RequestNotFoundError, StoreUnavailableError
from kev.client import AsyncClient
from tests.chaos import sabotage
from tests.chaos.checker import ANSWERS
from tests.chaos.cluster import Cluster, ClusterSettings, until
from tests.chaos.history import Closed, Forgotten, History, Opened, Seen
from tests.chaos.processes import ServiceProcess
from tests.chaos.proxy import Rewrite
from tests.chaos.redis_server import RedisServer
from tests.chaos.trial import LONG, PLAIN, judged, loaded, progress, texts
from tests.ports import free_port

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

NUM_ATTACHED = 4
LENGTHY = "." * 900
MAX_TOKENS = 1_000
RECONNECT_S = 2.0
OUTAGE_S = 12.0
"""Longer than any call is repeated."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """As everywhere, with answers long enough to be in the middle of one."""
    async with Cluster(tmp_path, ClusterSettings(sections={"core": {"max_tokens": MAX_TOKENS}})) as cluster:
        yield cluster


# ---- what happens to Redis


async def _restart(cluster: Cluster, _: RedisServer) -> int:
    return await sabotage.kill_redis(cluster, away_s=1.0)


async def _restart_empty(cluster: Cluster, _: RedisServer) -> int:
    cluster.redis.kill()
    cluster.redis.forget()
    cluster.redis.start()
    await cluster.redis.wait_healthy()
    return 1


async def _roll_back(cluster: Cluster, _: RedisServer) -> int:
    return await sabotage.roll_back_redis(cluster)


async def _flush(cluster: Cluster, _: RedisServer) -> int:
    async with cluster.redis.client() as redis:
        num_keys = await redis.dbsize()
        await redis.flushall()
    return int(num_keys)


async def _destroy_groups(cluster: Cluster, _: RedisServer) -> int:
    return await sabotage.destroy_groups(cluster)


async def _turn_read_only(cluster: Cluster, _: RedisServer) -> int:
    """A replica of nobody, for a second: what a fail-over looks like from a connection that is kept."""
    async with cluster.redis.client() as redis:
        await redis.replicaof("127.0.0.1", free_port())
        await asyncio.sleep(1.0)
        refused = (await redis.info("stats"))["total_error_replies"]
        await redis.replicaof("NO", "ONE")
    return int(refused)


async def _lose_primary(cluster: Cluster, standby: RedisServer) -> int:
    return await sabotage.fail_over(cluster, standby)


async def _hand_over(cluster: Cluster, standby: RedisServer) -> int:
    return await sabotage.fail_over(cluster, standby, orderly=True)


KEEPS = [_restart, _destroy_groups, _turn_read_only, _hand_over]
FORGETS = [_restart_empty, _roll_back, _flush, _lose_primary]
"""What was acknowledged may be gone."""


@pytest.mark.parametrize("fault", [*KEEPS, *FORGETS], ids=lambda fault: fault.__name__.strip("_"))
async def test_redis_loses_something(
    cluster: Cluster, tmp_path: Path, fault: Callable[[Cluster, RedisServer], Awaitable[int]]
) -> None:
    """Attached requests hang or time out, unattached ones hang silently, or nobody comes back to Redis."""
    async with sabotage.standby_of(cluster, tmp_path / "standby") as standby:
        async with loaded(cluster, PLAIN) as workload, cluster.client() as client:
            unattached = await client.submit(texts(LONG), timeout_ms=20_000, max_tokens=256)
            usual_s = await _timed_answer(client)
            async with _Attached(client) as attached:
                num_fired = await fault(cluster, standby)
                recovery_s = await _timed_answer(client)
                texts_of_attached = await attached.answers()
            await _is_loud(client, unattached)
            await progress(workload, PLAIN.num_clients)
        _forgive(workload.history, all_kept=fault in KEEPS)
        report = await judged(cluster, workload.history, **{fault.__name__: num_fired})
        assert texts_of_attached == attached.asked
        assert report.num_placeholders == 0, "a question that was asked for ran out of time"
        assert recovery_s <= RECONNECT_S + usual_s
        await cluster.until_idle(30)


async def _timed_answer(client: AsyncClient) -> float:
    begin_s = time.monotonic()
    [result] = await client.ask(texts("?"), timeout_ms=20_000)
    assert result.finish_reason in ANSWERS
    return time.monotonic() - begin_s


async def _is_loud(client: AsyncClient, request_id: str) -> None:
    """Answered, or said to be unknown."""
    with suppress(RequestNotFoundError):
        assert len(await client.wait(request_id, 25)) == 1


@dataclass
class _Attached:
    """Streams of which something was seen before the fault."""

    client: AsyncClient
    asked: list[list[str]] = field(default_factory=list)
    _readers: list[asyncio.Task[list[str]]] = field(default_factory=list)

    async def __aenter__(self) -> _Attached:
        begun = [asyncio.Event() for _ in range(NUM_ATTACHED)]
        for number, event in enumerate(begun):
            asked = texts(*[LENGTHY] * (number % 2 + 1))
            self.asked.append(asked)
            request_id = await self.client.submit(asked, timeout_ms=30_000, max_tokens=MAX_TOKENS)
            self._readers.append(asyncio.create_task(self._read(request_id, event)))
        async with asyncio.timeout(20):
            await asyncio.gather(*(event.wait() for event in begun))
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, request_id: str, begun: asyncio.Event) -> list[str]:
        found = {}
        async with aclosing(self.client.stream(request_id)) as events:  # type: ignore[type-var]
            async for event in events:
                begun.set()
                if (result := event.result) is not None:
                    is_answer = result.finish_reason in ANSWERS
                    found[result.question_index] = result.text if is_answer else f"{result.finish_reason}: {result}"
        return [found[index] for index in sorted(found)]

    async def answers(self) -> list[list[str]]:
        """What the streams came to, or the error that ended one."""
        ended = await asyncio.gather(*self._readers, return_exceptions=True)
        return [[repr(end)] if isinstance(end, BaseException) else end for end in ended]


def _forgive(history: History, *, all_kept: bool) -> None:
    """A request of which no reader had seen anything may be said to be unknown, unless Redis kept everything."""
    if all_kept:
        return
    attached = {record.request_id for record in history if isinstance(record, Seen)}
    denied = {r.request_id for r in history if isinstance(r, Closed) and r.reason == RequestNotFoundError.reason}
    assert denied <= {record.request_id for record in history if isinstance(record, Opened)}
    for request_id in denied - attached:
        history.add(Forgotten(request_id=request_id))


async def test_a_long_outage_is_sat_out(cluster: Cluster) -> None:
    """Processes that wait for Redis keep the cores busy, or lose patience and end with all they have."""
    async with cluster.client() as client:
        request_id = await client.submit(texts(LONG), timeout_ms=60_000, max_tokens=256)
        waiting = asyncio.create_task(client.wait(request_id, 60))
        cluster.redis.kill()
        used_s = sum(service.cpu_s() for service in cluster.services)
        await asyncio.sleep(OUTAGE_S)
        used_s = sum(service.cpu_s() for service in cluster.services) - used_s
        cluster.redis.start()
        await cluster.redis.wait_healthy()
        [result] = await waiting
    assert result.finish_reason in ANSWERS
    assert all(service.running for service in cluster.services)
    assert used_s < 0.15 * OUTAGE_S * len(cluster.services), f"{used_s:.2f} s of processor time in {OUTAGE_S} s"


async def test_redis_is_full(cluster: Cluster) -> None:
    """What was accepted cannot be finished, or what cannot be kept is accepted, or nobody recovers."""
    async with loaded(cluster, replace(PLAIN, pause_s=0.3)) as workload, cluster.client() as client:
        async with _Attached(client) as attached:
            async with cluster.redis.client() as redis:
                await redis.config_set("maxmemory", 1)
                num_refused = 0
                for _ in range(5):
                    with pytest.raises(StoreUnavailableError, match="memory"):
                        await client.submit(texts("too much"), timeout_ms=5_000)
                    num_refused += 1
                answers = await attached.answers()
                await redis.config_set("maxmemory", 0)
        assert answers == attached.asked
        await progress(workload, PLAIN.num_clients)
    await judged(cluster, workload.history, refused=num_refused)
    await cluster.until_idle(30)


# ---- servers that are not fit


@pytest.mark.parametrize("flaw", ["evicts", "old"])
async def test_an_unfit_redis(cluster: Cluster, flaw: str) -> None:
    """A deployment starts on a server that will lose accepted questions, or says nothing when it becomes one."""
    said = "noeviction" if flaw == "evicts" else r"needs 7\.0"
    async with cluster.redis.client() as redis:
        version = (await redis.info("server"))["redis_version"].encode()
        old = b"6" + version[1:]
        rewrites = {name: Rewrite(b"redis_version:" + version, b"redis_version:" + old) for name in cluster.links}
        if flaw == "evicts":
            await redis.config_set("maxmemory-policy", "allkeys-lru")
        else:
            for name, link in cluster.links.items():
                link.fault = rewrites[name]
        for service in cluster.services:
            await until(lambda service=service: _is_unready(service), 20, f"{service.name} to say it is not ready")
        for service in cluster.services:
            service.terminate()
            await service.wait_ended()
            num_chars = len(service.log)
            service.start()
            assert await service.wait_ended() == 1
            end = service.log[num_chars:].strip().splitlines()
            assert len(end) == 1 and re.search(said, end[0]), end
        await redis.config_set("maxmemory-policy", "noeviction")
        for link in cluster.links.values():
            link.fault = None
    if flaw == "old":
        assert min(rewrite.num_fired for rewrite in rewrites.values()) > 0
    for service in cluster.services:
        service.start()
    for service in cluster.services:
        await service.wait_healthy()
    async with cluster.client() as client:
        assert (await client.ask(texts("well again")))[0].finish_reason in ANSWERS


async def _is_unready(service: ServiceProcess) -> bool:
    return not await service.healthy()
