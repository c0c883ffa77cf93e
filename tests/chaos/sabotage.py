"""Faults done to a whole cluster under load: processes killed, stopped, replaced; connections cut; things taken away.

Invariants and semantics: each returns how often it has hit, by what the store or the proxy says; a fault that hit
nothing returns 0 and must not pass for one. Those that want a node at work wait for work, strike, look whether the node
held any, and strike again if it did not. Nothing waits for a time, but for what is to happen. Unless its name ends in
``at_work``, everything runs again when a fault returns.

Not here: the order of the faults (the tests, ``campaign``), faults of one connection (``proxy``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.exceptions import ResponseError

from common.redis_keys import WORK, WORK_GROUP, RedisKeys
from kev.client import AsyncClient
from tests.chaos.cluster import Cluster, until
from tests.chaos.processes import ServiceProcess
from tests.chaos.proxy import CutBeforeReply, FaultProxy
from tests.chaos.redis_server import RedisServer

_PATIENCE_S = 60.0
"""For what must come about; never a figure of a test."""
_TRIES = 20
_LONG = "." * 220


async def num_held(cluster: Cluster, node: ServiceProcess) -> int:
    """Leases of a node by the store's record; also those of one that has died or was stopped."""
    consumer = f"-{node.pid}/".encode()  # node ids end with the process id, consumers add the incarnation
    found = 0
    async with cluster.redis.client() as redis:
        async for stream in redis.scan_iter(match=RedisKeys(cluster.settings.name).name(WORK, "*")):
            with suppress(ResponseError):  # no group yet, or no more
                consumers = await redis.xinfo_consumers(stream, WORK_GROUP)
                found += sum(info["pending"] for info in consumers if consumer in info["name"])
    return found


# ---- nodes


async def kill_at_work(cluster: Cluster, node: ServiceProcess) -> int:
    """SIGKILL while it has questions; it stays dead. Returns how many it had."""
    for _ in range(_TRIES):
        await _until_it_works(cluster, node)
        node.kill()
        if number := await num_held(cluster, node):
            return number
        node.start()
        await node.wait_healthy(_PATIENCE_S)
    return 0


async def stop_at_work(cluster: Cluster, node: ServiceProcess) -> int:
    """SIGSTOP while it has questions; it stays stopped. Returns how many it had."""
    for _ in range(_TRIES):
        await _until_it_works(cluster, node)
        node.pause()
        if number := await num_held(cluster, node):
            return number
        node.resume()
    return 0


async def _until_it_works(cluster: Cluster, node: ServiceProcess) -> None:
    await until(lambda: num_held(cluster, node), _PATIENCE_S, f"a question at {node.name}")


async def until_taken_over(cluster: Cluster, node: ServiceProcess) -> None:
    """Return when others have every question of a node that is dead or stopped."""

    async def holds_nothing() -> bool:
        return await num_held(cluster, node) == 0

    await until(holds_nothing, _PATIENCE_S, f"others to take what {node.name} had")


async def crash_node(cluster: Cluster) -> int:
    """Kill a node at work; it comes back when others have its questions."""
    node = cluster.nodes[0]
    number = await kill_at_work(cluster, node)
    await until_taken_over(cluster, node)
    node.start()
    await node.wait_healthy(_PATIENCE_S)
    return number


async def freeze_node(cluster: Cluster) -> int:
    """Stop a node at work until others have its questions; then it wakes up and goes on with them."""
    node = cluster.nodes[-1]
    number = await stop_at_work(cluster, node)
    await until_taken_over(cluster, node)
    node.resume()
    await node.wait_healthy(_PATIENCE_S)
    return number


# ---- connections


async def cut_replies(cluster: Cluster) -> int:
    """Once for each process: what it asked of Redis was done, and the connection ends before it is told so."""
    number = 0
    for link in cluster.links.values():
        async with link.broken_by(CutBeforeReply(b"EVALSHA")) as fault:
            await fault.wait_fired(_PATIENCE_S)
            number += fault.num_fired
    return number


async def leave_a_stream(cluster: Cluster) -> int:
    """A client whose machine goes away while its answer comes; it has withdrawn nothing."""
    async with FaultProxy(cluster.doors["aggregator-0"].port) as own, cluster.client() as submitter:
        request_id = await submitter.submit([_LONG], timeout_ms=30_000, max_tokens=256)
        client = AsyncClient(cluster.address("router-0"), f"127.0.0.1:{own.port}")
        stream = client.stream(request_id)
        await anext(stream)
        number = await own.cut_all()
        await stream.aclose()
        await client.close()
    return number


async def withdraw(cluster: Cluster) -> int:
    """A client that gives up while its questions run."""
    async with cluster.client() as client:
        for _ in range(_TRIES):
            request_id = await client.submit([_LONG] * 4, timeout_ms=30_000, max_tokens=256)
            if number := await client.cancel(request_id):
                return number
    return 0


# ---- the store


async def kill_redis(cluster: Cluster, away_s: float = 0.0) -> int:
    """SIGKILL, and start again after a while; what was acknowledged is there again."""
    num_starts = cluster.redis.num_starts
    cluster.redis.kill()
    await asyncio.sleep(away_s)
    cluster.redis.start()
    await cluster.redis.wait_healthy(_PATIENCE_S)
    return cluster.redis.num_starts - num_starts


async def roll_back_redis(cluster: Cluster, lost_s: float = 1.0) -> int:
    """SIGKILL, and start again without what was written in the last ``lost_s`` seconds: a disk that was too slow."""
    num_starts = cluster.redis.num_starts
    cluster.redis.remember()
    await asyncio.sleep(lost_s)
    cluster.redis.kill()
    cluster.redis.forget(but_remembered=True)
    cluster.redis.start()
    await cluster.redis.wait_healthy(_PATIENCE_S)
    return cluster.redis.num_starts - num_starts


@asynccontextmanager
async def standby_of(cluster: Cluster, folder: Path) -> AsyncIterator[RedisServer]:
    """A replica of the cluster's Redis that has caught up."""
    folder.mkdir()
    primary = ("--replicaof", "127.0.0.1", str(cluster.redis.port), "--repl-diskless-sync-delay", "0")
    async with RedisServer(folder, cluster.settings.redis, *primary) as standby:

        async def is_in_step() -> bool:
            async with standby.client() as redis:
                return bool((await redis.info("replication"))["master_link_status"] == "up")

        await until(is_in_step, _PATIENCE_S, "the replica to catch up")
        yield standby


async def fail_over(cluster: Cluster, standby: RedisServer, *, orderly: bool = False) -> int:
    """Promote a replica and lead every new connection there; the primary is killed, or ``orderly`` becomes a replica.

    Orderly, old connections stay open, and everything written there is refused.
    """
    if orderly:
        async with cluster.redis.client() as redis:
            await redis.execute_command("FAILOVER", "TO", "127.0.0.1", standby.port)
    else:
        cluster.redis.kill()
        async with standby.client() as redis:
            await redis.replicaof("NO", "ONE")

    async def is_primary() -> bool:
        async with standby.client() as redis:
            return bool((await redis.info("replication"))["role"] == "master")

    await until(is_primary, _PATIENCE_S, "the replica to be promoted")
    for link in cluster.links.values():
        link.redirect(standby.port)
    cluster.redis = standby
    return 1


async def destroy_groups(cluster: Cluster) -> int:
    """XGROUP DESTROY on every work stream; returns on how many there was a group."""
    number = 0
    async with cluster.redis.client() as redis:
        async for stream in redis.scan_iter(match=RedisKeys(cluster.settings.name).name(WORK, "*")):
            with suppress(ResponseError):  # the stream is gone by now
                number += await redis.xgroup_destroy(stream, WORK_GROUP)
    return number


# ---- any process


async def crash(service: ServiceProcess) -> int:
    """SIGKILL, and start again."""
    if not service.running:
        return 0
    service.kill()
    service.start()
    await service.wait_healthy(_PATIENCE_S)
    return 1


async def replace(service: ServiceProcess) -> int:
    """SIGTERM, an orderly end, and start again.

    Raises:
        AssertionError: it did not end in order.
    """
    service.terminate()
    status = await service.wait_ended(_PATIENCE_S)
    assert status == 0, f"{service.name} ended with {status}\n{service.log[-4_000:]}"
    service.start()
    await service.wait_healthy(_PATIENCE_S)
    return 1
