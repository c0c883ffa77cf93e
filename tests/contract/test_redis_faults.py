"""What the Redis transport does when connections, callers, groups, streams or the server itself go away.

Not here: the contract (``test_redis_transport``), whole processes that die (the end-to-end tests).
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio as aioredis

from common.clock import SystemClock
from common.ending import Ending
from common.errors import ConfigError, InvariantError, StoreUnavailableError
from common.ports import Report, ReportState
from common.redis_keys import RESULTS, WORK_GROUP
from common.redis_link import RedisLink
from common.redis_scripts import Script
from common.redis_settings import LinkSettings
from common.redis_streams import RedisTransport
from common.types import ChannelResult, Durability, FinishReason
from tests.contract.redis_harness import RedisHarness
from tests.contract.redis_proxy import LossyProxy, lossy_proxy
from tests.contract.redis_servers import running_server
from tests.contract.transport_suite import LONG_S, Ends, keys, make_item, outcome, started
from tests.ports import free_port
from tests.work_calls import commit, emit, publish, renew

pytestmark = [pytest.mark.store, pytest.mark.usefixtures("nothing_stays_for_ever")]

ECHO = Script.of("return ARGV[1]")
BAD = Script.of("return redis.call('NOSUCH')")


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[LossyProxy]:
    async with lossy_proxy(redis_url) as proxy:
        yield proxy


# ---- lost replies


async def test_a_commit_whose_reply_was_lost_counts_once(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """The answer would be reported twice, or not at all."""
    ends = await deployment.create(num_channels=1)
    node = await deployment.join("node", url=proxy.url)
    await publish(ends.router, make_item(0))
    await publish(ends.router, make_item(1))
    [known] = await node.lease(1, 0)
    await commit(node, known, outcome(known))  # from here on the server knows the script
    [lease] = await node.lease(1, 0)
    proxy.lose_reply_to(b"EVALSHA")
    assert await commit(node, lease, outcome(lease)) is ReportState.ALREADY_COMMITTED
    assert proxy.num_lost == 1
    assert await ends.results.read(10, 0) == [outcome(known), outcome(lease)]
    assert await ends.router.depths() == [0]


async def test_a_lease_whose_reply_was_lost_is_granted_again(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """The items would lie there, leased to nobody, until the lease runs out."""
    ends = await deployment.create(num_channels=2)
    node = await deployment.join("node", url=proxy.url)
    assert await node.lease(1, 0) == []
    await publish(ends.router, make_item(0, 0))
    await publish(ends.router, make_item(1, 1))
    proxy.lose_reply_to(b"EVALSHA")
    leases = await node.lease(2, 0)
    assert proxy.num_lost == 1
    assert sorted(keys(leases)) == [("r", 0), ("r", 1)]
    assert [lease.attempt for lease in leases] == [1, 1]
    assert [await commit(node, lease, outcome(lease)) for lease in leases] == [ReportState.COMMITTED] * 2


async def test_a_lease_call_that_failed_is_made_good_by_the_next(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """A node that gave up on a lost connection would leave leases behind that nobody knows of."""
    ends = await deployment.create(num_channels=1)
    deployment.link_settings = replace(deployment.link_settings, patience_s=0.0)
    node = await deployment.join("node", url=proxy.url)
    await publish(ends.router, make_item())
    assert keys(await node.lease(1, 0)) == [("r", 0)]
    await deployment.expire_leases()
    proxy.lose_reply_to(b"EVALSHA")
    with pytest.raises(StoreUnavailableError):
        await node.lease(1, 0)
    [lease] = await node.lease(1, 0)
    assert lease.attempt == 2
    assert await commit(node, lease, outcome(lease)) is ReportState.COMMITTED


async def test_a_publication_whose_reply_was_lost_is_there_once(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """A retried XADD is two questions."""
    ends = await deployment.create(num_channels=1)
    router = await deployment.join("router", url=proxy.url)
    await publish(router, make_item(0))
    proxy.lose_reply_to(b"EVALSHA")
    await publish(router, make_item(1))
    assert proxy.num_lost == 1
    assert await ends.router.depths() == [2]


async def test_events_whose_reply_was_lost_come_again(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """What the server handed out would never reach the aggregator."""
    ends = await deployment.create(num_channels=1)
    results = await deployment.read_as("aggregator", url=proxy.url)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    assert await results.read(10, 0) == []
    await emit(ends.node, lease, started(lease))
    proxy.lose_reply_to(b"EVALSHA")
    assert await results.read(10, 0) == [started(lease)]
    assert proxy.num_lost == 1


async def test_a_call_about_many_whose_reply_was_lost_counts_once(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """Every question of the call would be there twice, or every answer be reported twice."""
    ends = await deployment.create(num_channels=4)
    node = await deployment.join("node", url=proxy.url)
    items = [make_item(index, index) for index in range(4)]
    proxy.lose_reply_to(b"EVAL")
    assert await node.publish(items) == [None] * 4
    assert await ends.router.depths() == [1, 1, 1, 1]
    leases = await node.lease(4, 0)
    reports = [Report(lease=lease, events=(started(lease), outcome(lease))) for lease in leases]
    await node.report([Report(lease=leases[0], events=(started(leases[0]),))])  # the server knows the script now
    proxy.lose_reply_to(b"EVALSHA")
    states = await node.report([*reports[:3], Report(lease=leases[3], events=(started(leases[3]),))])
    assert states == [*[ReportState.ALREADY_COMMITTED] * 3, ReportState.HELD]
    assert proxy.num_lost == 2
    events = await ends.results.read(100, 0)
    assert sum(event == report.events[1] for event in events for report in reports) == 3


# ---- cancelled calls


async def test_a_cancelled_call_never_leaves_its_reply_to_another(redis_url: str) -> None:
    """A connection with a reply still to come would answer the next caller with somebody else's text."""
    async with lossy_proxy(redis_url, delay_s=0.002) as proxy:
        settings = LinkSettings(url=proxy.url, deployment="test-nonce", max_connections=1)
        link = await RedisLink.connect(settings)
        dice = random.Random(7)
        num_cancelled = 0
        for number in range(60):
            task = asyncio.create_task(link.unbroken(link.run(ECHO, f"cancelled-{number}")))
            for _ in range(number % 12):
                await asyncio.sleep(0)
            await asyncio.sleep(dice.choice([0, 0.001, 0.003]))
            num_cancelled += task.cancel()
            nonce = f"nonce-{number}"
            assert await link.unbroken(link.run(ECHO, nonce)) == nonce.encode()
            await asyncio.gather(task, return_exceptions=True)
        await link.close()
        assert num_cancelled >= 20


async def test_cancelled_calls_have_happened_or_not(proxy: LossyProxy, deployment: RedisHarness) -> None:
    """A publication or commit cut in half would leave an item that nobody can finish."""
    ends = await deployment.create(num_channels=1)
    node = await deployment.join("node", url=proxy.url)
    seen: Counter[int] = Counter()
    for index in range(30):
        publication = asyncio.create_task(publish(node, make_item(index)))
        for _ in range(index):
            await asyncio.sleep(0)
        publication.cancel()
        await asyncio.gather(publication, return_exceptions=True)
        await publish(ends.router, make_item(index))
        [lease] = await node.lease(1, 0)
        committing = asyncio.create_task(commit(node, lease, outcome(lease)))
        for _ in range(index):
            await asyncio.sleep(0)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await commit(node, lease, outcome(lease))
        for event in await ends.results.read(10, 0):
            seen[event.question_index] += 1
    assert seen == dict.fromkeys(range(30), 1)
    assert await ends.router.depths() == [0]


# ---- destroyed groups and streams


async def break_store(deployment: RedisHarness, how: str) -> None:
    if how == "group":
        await deployment.client.xgroup_destroy(deployment.work(0), WORK_GROUP)
    elif how == "stream":
        await deployment.client.delete(deployment.work(0), deployment.key(RESULTS))
    else:
        await deployment.flush()


@pytest.mark.parametrize("how", ["group", "stream", "flush"])
async def test_an_idle_deployment_survives_a_loss(deployment: RedisHarness, how: str) -> None:
    """Every read would fail for ever, in a hot loop, until a restart."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item(0))
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease))
    await ends.results.read(10, 0)
    leasing = asyncio.create_task(ends.node.lease(1, LONG_S))
    reading = asyncio.create_task(ends.results.read(10, LONG_S))
    await deployment.settle()
    await break_store(deployment, how)
    await publish(ends.router, make_item(1))
    [lease] = await asyncio.wait_for(leasing, 5)
    assert lease.item.key == ("r", 1)
    await commit(ends.node, lease, outcome(lease))
    assert await asyncio.wait_for(reading, 5) == [outcome(lease)]


@pytest.mark.parametrize("how", ["group", "stream", "flush"])
async def test_a_loss_under_load_is_made_good(deployment: RedisHarness, how: str) -> None:
    """Questions in flight would be lost although their clients are waiting."""
    ends = await deployment.create(num_channels=2)
    questions = [("r", index) for index in range(40)]
    for _, index in questions:
        await publish(ends.router, make_item(index, index % 2))
    seen: set[tuple[str, int]] = set()
    broken = False
    async with asyncio.timeout(20):
        while len(seen) < len(questions):
            for node in (ends.node, ends.other_node):
                for lease in await node.lease(2, 0):
                    await commit(node, lease, outcome(lease))
            seen |= {(event.request_id, event.question_index) for event in await ends.results.read(100, 0)}
            if len(seen) > 10 and not broken:
                broken = True
                await ends.node.lease(2, 0)
                await break_store(deployment, how)
                await deployment.expire_leases()
            for _, index in await ends.router.lost([key for key in questions if key not in seen]):
                await publish(ends.router, make_item(index, index % 2))
    assert broken
    assert await ends.router.depths() == [0, 0]


# ---- connections and servers


async def test_blocking_reads_outlast_the_socket_timeout(deployment: RedisHarness) -> None:
    """An idle node would raise time-outs and reconnect for as long as nothing happens."""
    deployment.link_settings = replace(deployment.link_settings, socket_timeout_s=0.2, block_s=0.6)
    ends = await deployment.create(num_channels=1)
    connections = (await deployment.client.info("stats"))["total_connections_received"]
    waiting = asyncio.create_task(ends.node.lease(1, LONG_S))
    await asyncio.sleep(0.9)
    await publish(ends.router, make_item())
    assert keys(await asyncio.wait_for(waiting, 0.5)) == [("r", 0)]
    assert (await deployment.client.info("stats"))["total_connections_received"] - connections <= 4


async def open_deployment(url: str, **link_changes: float) -> tuple[RedisHarness, Ends]:
    deployment = RedisHarness(url)
    deployment.link_settings = replace(deployment.link_settings, **link_changes)
    return deployment, await deployment.create(num_channels=1)


async def test_calls_outlive_a_restart_of_the_server(server_name: str, tmp_path: Path) -> None:
    """A restart would end every node; what the append-only file kept would not be found again."""
    port = free_port()
    persistence = ("--appendonly", "yes", "--appendfsync", "always")
    with running_server(server_name, tmp_path, port, *persistence) as url:
        deployment, ends = await open_deployment(url)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        [lease] = await ends.node.lease(1, 0)
        waiting = asyncio.create_task(ends.other_node.cancellations(LONG_S))
        late = ChannelResult(request_id="s", question_index=0, channel_id=0, finish_reason=FinishReason.TIMEOUT_RUNNING)
        assert await ends.results.settle([late]) == [0]
        await deployment.settle()
    committing = asyncio.create_task(commit(ends.node, lease, outcome(lease)))
    await asyncio.sleep(0.1)
    with running_server(server_name, tmp_path, port, *persistence):
        assert await asyncio.wait_for(committing, 4) is ReportState.COMMITTED
        [held] = await ends.other_node.lease(1, 1)
        assert (held.item.key, held.attempt) == (("r", 1), 1)
        await ends.router.cancel("r", [1])
        assert await asyncio.wait_for(waiting, 4) == [("r", 1)]
        assert await ends.results.read(10, 0) == [late, outcome(lease)]
        endings = {("s", 0): Ending(FinishReason.TIMEOUT_RUNNING), ("r", 0): Ending(FinishReason.STOP)}
        assert await ends.router.settled(list(endings)) == endings
        await deployment.close()


async def test_a_read_only_server_is_waited_out(server_name: str, tmp_path: Path) -> None:
    """A failover would turn into errors for every caller, or connections would stick to the former primary."""
    with running_server(server_name, tmp_path) as url:
        deployment, ends = await open_deployment(url)
        await deployment.client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        publishing = asyncio.create_task(publish(ends.router, make_item()))
        await asyncio.sleep(0.1)
        assert not publishing.done()
        with pytest.raises(StoreUnavailableError, match="replica"):
            await deployment.links[0].check_server()
        await deployment.client.execute_command("REPLICAOF", "NO", "ONE")
        await asyncio.wait_for(publishing, 4)
        assert keys(await ends.node.lease(1, 0)) == [("r", 0)]
        await deployment.close()


async def test_a_full_server_refuses_new_work_and_finishes_the_old(server_name: str, tmp_path: Path) -> None:
    """Outcomes could not be committed, so that the memory they would free is never freed."""
    with running_server(server_name, tmp_path) as url:
        deployment, ends = await open_deployment(url)
        await publish(ends.router, make_item(0))
        [lease] = await ends.node.lease(1, 0)
        await deployment.client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailableError, match="memory"):
            await publish(ends.router, make_item(1))
        assert await renew(ends.node, lease)
        assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED
        assert await ends.results.read(10, 0) == [outcome(lease)]
        await deployment.close()


async def test_a_full_server_takes_the_outcomes_of_a_call_and_refuses_its_progress(
    server_name: str, tmp_path: Path
) -> None:
    """One running question would keep finished ones from giving their memory back."""
    with running_server(server_name, tmp_path) as url:
        deployment = RedisHarness(url)
        ends = await deployment.create(num_channels=2)
        await ends.router.publish([make_item(0, 0), make_item(1, 1)])
        [running, finished] = await ends.node.lease(2, 0)
        reports = [
            Report(lease=running, events=(started(running),)),
            Report(lease=finished, events=(started(finished), outcome(finished))),
        ]
        await deployment.client.config_set("maxmemory", 1)
        assert await ends.node.report(reports) == [ReportState.FULL, ReportState.COMMITTED]
        await deployment.client.config_set("maxmemory", 0)
        assert await ends.node.report(reports[:1]) == [ReportState.HELD]
        assert await ends.results.read(10, 0) == [started(finished), outcome(finished), started(running)]
        await deployment.close()


async def test_an_absent_store_is_told_soon_and_clearly() -> None:
    """A caller would hang, or see a stack of the Redis client."""
    settings = LinkSettings(url=f"redis://127.0.0.1:{free_port()}/0", deployment="test-absent", patience_s=0.1)
    async with asyncio.timeout(2):
        with pytest.raises(StoreUnavailableError, match="cannot be used now"):
            await RedisLink.connect(settings)


async def test_waits_do_not_spin_while_the_store_is_away(server_name: str, tmp_path: Path) -> None:
    """An outage would burn every core of every node."""
    with running_server(server_name, tmp_path) as url:
        deployment, ends = await open_deployment(url, patience_s=0.5)
        waiting = asyncio.create_task(ends.node.lease(1, LONG_S))
        await deployment.settle()
    calls = 0
    evaluate = deployment.links[1]._evaluate

    async def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return await evaluate(*arguments)  # type: ignore[arg-type]

    deployment.links[1]._evaluate = counted  # type: ignore[method-assign,assignment]
    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(waiting, 5)
    assert 1 <= calls <= 40
    await deployment.close()


async def test_a_cancelled_call_does_not_try_again(server_name: str, tmp_path: Path) -> None:
    """A publication whose caller gave up during an outage would appear when the store is back."""
    port = free_port()
    with running_server(server_name, tmp_path, port) as url:
        deployment, ends = await open_deployment(url)
    publishing = asyncio.create_task(publish(ends.router, make_item()))
    await asyncio.sleep(0.1)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert not deployment.links[0]._tasks
    with running_server(server_name, tmp_path, port):
        assert await ends.router.depths() == [0]
        await deployment.close()


# ---- servers that are not fit


async def test_a_server_that_evicts_is_refused(server_name: str, tmp_path: Path) -> None:
    """Accepted questions would vanish when memory runs short."""
    with running_server(server_name, tmp_path, None, "--maxmemory-policy", "allkeys-lru") as url:
        with pytest.raises(ConfigError, match="noeviction"):
            await RedisLink.connect(LinkSettings(url=url, deployment="test-evicts"))


@pytest.mark.parametrize(
    ("durability", "options", "refusal"),
    [
        ("memory", [], None),
        ("aof", [], "set its appendonly to yes"),
        ("aof", ["--appendonly", "yes"], None),
        ("durable", ["--appendonly", "yes", "--appendfsync", "everysec"], "set its appendfsync to always"),
        ("durable", ["--appendonly", "yes", "--appendfsync", "always"], None),
        ("durable", ["--appendonly", "yes", "--rename-command", "CONFIG", "hidden"], "allow CONFIG GET"),
    ],
)
async def test_a_server_that_keeps_less_than_was_asked_for_is_refused(
    server_name: str, tmp_path: Path, durability: str, options: list[str], refusal: str | None
) -> None:
    """An operator who asked for durable requests would learn from a crash that they are not."""
    with running_server(server_name, tmp_path, None, *options) as url:
        settings = LinkSettings(url=url, deployment="test-durable", durability=Durability(durability))
        if refusal is not None:
            with pytest.raises(ConfigError, match=refusal):
                await RedisLink.connect(settings)
        else:
            await (await RedisLink.connect(settings)).close()


async def test_wrong_credentials_are_no_outage(server_name: str, tmp_path: Path) -> None:
    """Start-up would wait for ever for a password to become right."""
    with running_server(server_name, tmp_path) as url:
        async with aioredis.Redis.from_url(url) as client:
            await client.config_set("requirepass", "right")
        wrong = url.replace("redis://", "redis://:wrong@")
        with pytest.raises(ConfigError, match="credentials"):
            await RedisLink.connect(LinkSettings(url=wrong, deployment="test-password"))
        right = url.replace("redis://", "redis://:right@")
        link = await RedisLink.connect(LinkSettings(url=right, deployment="test-password"))
        await link.close()


async def test_an_old_server_is_refused() -> None:
    """Scripts would fail one by one at run time."""
    info = b"redis_version:6.2.14\r\nmaxmemory_policy:noeviction\r\nrole:master\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            for _ in range(data.count(b"*")):
                is_info = b"INFO\r\n" in data and b"SETINFO" not in data
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info) if is_info else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address: tuple[str, int] = server.sockets[0].getsockname()
    try:
        with pytest.raises(ConfigError, match=r"6\.2\.14"):
            await RedisLink.connect(LinkSettings(url=f"redis://127.0.0.1:{address[1]}", deployment="test-old"))
    finally:
        server.close()


@pytest.mark.parametrize("url", ["http://localhost", "redis://localhost:port"])
def test_an_invalid_url_is_a_mistake_of_the_operator(url: str) -> None:
    """It would look like an outage."""
    with pytest.raises(ConfigError, match="URL"):
        RedisLink(LinkSettings(url=url, deployment="test-url"))


async def test_a_broken_script_is_a_bug_of_ours(redis_url: str) -> None:
    """It would be repeated as if the server were away."""
    link = await RedisLink.connect(LinkSettings(url=redis_url, deployment="test-bug"))
    with pytest.raises(InvariantError):
        await link.run(BAD)
    await link.close()


async def test_closing_does_not_need_the_store(server_name: str, tmp_path: Path) -> None:
    """A process could not stop during an outage."""
    with running_server(server_name, tmp_path) as url:
        link = await RedisLink.connect(LinkSettings(url=url, deployment="test-closing", patience_s=0.2))
        harness = RedisHarness(url)
        transport = RedisTransport(
            link=link, clock=SystemClock(), settings=replace(harness.settings, node_id="n", num_channels=1)
        )
        await harness.close()
        await transport.lease(1, 0)
    async with asyncio.timeout(3):
        await transport.close()
        await link.close()
        await link.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1].split("/")[0]))) != 0
