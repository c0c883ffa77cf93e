"""The Redis transport keeps the contract of ``common.ports`` on every server that is here, and its own promises.

Not here: the contract's tests (``transport_suite``), lost connections and servers (``test_redis_faults``).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.codec import seal
from common.ending import Ending
from common.errors import ConfigError, EngineDeadError, OutOfMemoryError
from common.ports import Report, ReportState, ResultStream
from common.redis_keys import (
    DEAD_LETTERS,
    LEASED,
    NODES,
    NOTICES,
    ORDER,
    QUESTIONS,
    READERS,
    RESULTS,
    WAITING,
    WORK_BELL,
    WORK_GROUP,
    KeyKind,
    RedisKeys,
)
from common.redis_settings import RedisTransportSettings
from common.redis_streams import RedisTransport
from common.types import ChannelResult, FinishReason, Prompt
from tests.contract.redis_harness import RedisHarness
from tests.contract.transport_suite import (
    LONG_S,
    TransportHarness,
    TransportSuite,
    delta,
    keys,
    make_item,
    outcome,
    started,
)
from tests.work_calls import commit, emit, hand_back, publish, renew

pytestmark = [pytest.mark.store, pytest.mark.usefixtures("nothing_stays_for_ever")]


class TestRedisTransport(TransportSuite):
    @pytest.fixture(autouse=True)
    def _at(self, redis_url: str) -> None:
        self.url = redis_url

    def make_harness(self) -> TransportHarness:
        return RedisHarness(self.url)


async def pending(deployment: RedisHarness, channel_id: int = 0) -> list[tuple[str, int]]:
    """(consumer, delivery count) of every pending entry."""
    rows = await deployment.client.xpending_range(deployment.work(channel_id), WORK_GROUP, "-", "+", 1000)
    return [(row["consumer"].decode(), row["times_delivered"]) for row in rows]


async def read_all(results: ResultStream) -> list[object]:
    read: list[object] = []
    while events := await results.read(7, 0):
        read += events
    return read


# ---- leases


async def test_a_stale_renewal_does_not_steal_the_item_back(deployment: RedisHarness) -> None:
    """Plain XCLAIM would give the entry to whoever asks."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lost] = await ends.node.lease(1, 0)
    await deployment.expire_leases()
    [held] = await ends.other_node.lease(1, 0)
    before = await pending(deployment)
    assert not await renew(ends.node, lost)
    assert await pending(deployment) == before
    assert before[0][0].startswith("other-node/")
    assert await commit(ends.other_node, held, outcome(held)) is ReportState.COMMITTED


async def test_renewals_are_no_deliveries(deployment: RedisHarness) -> None:
    """Long answers would be counted towards the dead letters, and their commit refused."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    for _ in range(5):
        assert await renew(ends.node, lease)
    assert [count for _, count in await pending(deployment)] == [1]
    assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED


@pytest.mark.parametrize("how", ["expired", "handed back"])
async def test_fencing_needs_no_state_beside_the_stream(deployment: RedisHarness, how: str) -> None:
    """A former holder would pass for the new one once the question's state has expired."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [former] = await ends.node.lease(1, 0)
    if how == "expired":
        await deployment.expire_leases()
        [lease] = await ends.node.lease(1, 0)
    else:
        await hand_back(ends.node, former)
        [lease] = await ends.other_node.lease(1, 0)
    await deployment.client.delete(deployment.key(QUESTIONS, "r"))
    assert not await renew(ends.node, former)
    assert await commit(ends.node, former, outcome(former, "former")) is ReportState.STALE
    holder = ends.node if how == "expired" else ends.other_node
    assert await commit(holder, lease, outcome(lease)) is ReportState.COMMITTED
    assert await ends.results.read(10, 0) == [outcome(lease)]


async def test_nodes_share_a_busy_channel(deployment: RedisHarness) -> None:
    """A hot channel would be served by one node while the others idle."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item(0))
    await publish(ends.router, make_item(1))
    assert keys(await ends.node.lease(8, 0)) == [("r", 0)]
    assert keys(await ends.other_node.lease(8, 0)) == [("r", 1)]


async def test_what_is_published_before_the_first_node_is_delivered(deployment: RedisHarness) -> None:
    """A group made at the end of its stream never sees the entries before it."""
    router = await deployment.join("router")
    await publish(router, make_item(0))
    await deployment.client.xgroup_destroy(deployment.work(0), WORK_GROUP)
    node = await deployment.join("node")
    assert keys(await node.lease(1, 0)) == [("r", 0)]


async def test_a_waiting_lease_sees_another_one_run_out(deployment: RedisHarness) -> None:
    """Work of a dead node would lie there until something else happens."""
    deployment.settings = replace(deployment.settings, lease_timeout_s=0.1)
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    await ends.node.lease(1, 0)
    [again] = await asyncio.wait_for(ends.other_node.lease(1, LONG_S), 5)
    assert again.attempt == 2


async def test_a_trace_travels_with_the_item(deployment: RedisHarness) -> None:
    """A trace would end at Redis."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    router = await deployment.join("router", trace_of=lambda item: trace)
    node = await deployment.join("node")
    await publish(router, make_item())
    [lease] = await node.lease(1, 0)
    assert lease.trace == trace


async def test_an_interrupted_lease_is_handed_back(deployment: RedisHarness) -> None:
    """A lease granted to a caller that is gone would hold up its channel until it runs out."""
    ends = await deployment.create(num_channels=1)
    for num_turns in range(25):
        await publish(ends.router, make_item(num_turns))
        interrupted = asyncio.create_task(ends.node.lease(1, 0))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        interrupted.cancel()
        [end] = await asyncio.gather(interrupted, return_exceptions=True)
        leases = [] if isinstance(end, BaseException) else end
        [lease] = leases or await ends.other_node.lease(1, 0)
        assert lease.attempt == 1
        node = ends.node if leases else ends.other_node
        assert await commit(node, lease, outcome(lease)) is ReportState.COMMITTED


# ---- dead letters, dead nodes


async def lose(deployment: RedisHarness, node: RedisTransport, times: int) -> None:
    for attempt in range(1, times + 1):
        [lease] = await node.lease(1, 0)
        assert lease.attempt == attempt
        await deployment.expire_leases()


@pytest.mark.parametrize("finder", ["lease", "sweep"])
async def test_a_question_that_kills_its_nodes_is_set_aside(deployment: RedisHarness, finder: str) -> None:
    """It would kill one node after the other, and everything behind it would starve."""
    deployment.settings = replace(deployment.settings, max_deliveries=3)
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item(0))
    await publish(ends.router, make_item(1))
    await lose(deployment, ends.node, 3)
    if finder == "sweep":
        await ends.other_node._upkeep.sweep()
        assert await deployment.client.xlen(deployment.key(DEAD_LETTERS)) == 1
    [lease] = await ends.other_node.lease(1, 0)
    assert lease.item.key == ("r", 1)
    [reported] = await ends.results.read(10, 0)
    assert isinstance(reported, ChannelResult)
    assert (reported.key, reported.finish_reason) == (("r", 0), FinishReason.ERROR)
    [(_, letter)] = await deployment.client.xrange(deployment.key(DEAD_LETTERS))
    assert (letter[b"r"], letter[b"i"], letter[b"deliveries"]) == (b"r", b"0", b"3")
    assert letter[b"e"] == seal(make_item(0))
    assert await ends.router.depths() == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {b"x": b"no payload"},
        {b"r": b"r", b"i": b"0", b"e": b"\xff\xfe not protobuf"},
        {b"r": b"r", b"i": b"0", b"e": b"\x08\x63"},
        {b"r": b"r", b"i": b"-1\xff", b"e": b"{}"},
        {b"r": b"r", b"i": b"5", b"e": seal(make_item(0))},
    ],
    ids=["no payload", "damaged", "unknown version", "damaged address", "another question's"],
)
async def test_what_cannot_be_read_is_set_aside_as_it_is(deployment: RedisHarness, fields: dict[bytes, bytes]) -> None:
    """A foreign entry would be delivered for ever, or crash its reader, or answer another question."""
    ends = await deployment.create(num_channels=1)
    await deployment.client.xadd(deployment.work(0), fields)
    await deployment.client.zadd(deployment.key(WAITING), {0: 0})
    await publish(ends.router, make_item(7))
    assert keys(await ends.node.lease(1, 0) or await ends.node.lease(1, 0)) == [("r", 7)]
    [(_, letter)] = await deployment.client.xrange(deployment.key(DEAD_LETTERS))
    assert fields.items() <= letter.items()
    assert await ends.router.depths() == [1]
    errors = await ends.results.read(10, 0)
    assert [event.finish_reason for event in errors if isinstance(event, ChannelResult)] == (
        [FinishReason.ERROR] if fields.get(b"i", b"").isdigit() else []
    )


async def test_an_event_that_cannot_be_read_is_set_aside(deployment: RedisHarness) -> None:
    """The aggregator would read it for ever, and nothing behind it."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    for envelope in (b"garbage\xff", seal(make_item())):
        await deployment.client.xadd(deployment.key(RESULTS), {b"e": envelope})
    await commit(ends.node, lease, outcome(lease))
    assert await ends.results.read(10, 0) == [outcome(lease)]
    assert await deployment.client.xlen(deployment.key(DEAD_LETTERS)) == 2


async def test_a_silent_node_loses_its_leases_at_once(deployment: RedisHarness) -> None:
    """After a crash its questions would wait for the whole lease; its consumer would stay for ever."""
    ends = await deployment.create(num_channels=2)
    await publish(ends.router, make_item(0, 0))
    await publish(ends.router, make_item(1, 1))
    [first, second] = await ends.node.lease(2, 0)
    waiting = asyncio.create_task(ends.other_node.lease(2, LONG_S))
    await deployment.settle()
    await deployment.client.zadd(deployment.key(NODES), {first.lease_id.split(" ")[1].rpartition("/")[0]: 1})
    await ends.other_node._upkeep.beat()
    assert [lease.attempt for lease in await asyncio.wait_for(waiting, 5)] == [2, 2]
    assert await commit(ends.node, second, outcome(second)) is ReportState.STALE
    consumers = await deployment.client.xinfo_consumers(deployment.work(0), WORK_GROUP)
    assert {info["name"].partition(b"/")[0] for info in consumers} == {b"~", b"other-node"}


async def test_consumers_do_not_accumulate(deployment: RedisHarness) -> None:
    """Every restart would leave a consumer behind; removing one that holds entries would lose them."""
    ends = await deployment.create(num_channels=2)
    for restart in range(20):
        await publish(ends.router, make_item(restart, restart % 2))
        node = await deployment.join("worker")
        [lease] = await node.lease(1, 0)
        if restart % 5:
            await commit(node, lease, outcome(lease))
            await node.close()
        else:
            deployment.abandon(node)
            await deployment.client.zadd(deployment.key(NODES), {node._consumer: 1})
    await ends.node._upkeep.beat()
    recovered = keys(await ends.node.lease(8, 0)) + keys(await ends.other_node.lease(8, 0))
    assert sorted(recovered) == [("r", restart) for restart in (0, 5, 10, 15)]
    for channel_id in range(2):
        assert len(await deployment.client.xinfo_consumers(deployment.work(channel_id), WORK_GROUP)) <= 3


@pytest.mark.parametrize("index", [WAITING, LEASED])
async def test_what_the_store_knows_by_heart_is_only_a_help(deployment: RedisHarness, index: KeyKind) -> None:
    """Items would lie there for ever once the notes about them are lost, or were never made by an earlier version."""
    ends = await deployment.create(num_channels=3)
    for number in range(3):
        await publish(ends.router, make_item(number, number))
    await ends.node.lease(1, 0)
    await deployment.client.delete(deployment.key(index))
    await deployment.expire_leases()
    await ends.other_node._upkeep.sweep()
    assert keys(await ends.other_node.lease(8, 0)) == [("r", 0), ("r", 1), ("r", 2)]


async def test_entries_of_a_version_without_head_starts_keep_their_place(deployment: RedisHarness) -> None:
    """What waits during an upgrade would jump the queue or come last: its ids tell numbers only."""
    ends = await deployment.create(num_channels=3)
    for number, priority in ((0, 9), (1, 0), (2, -9)):
        await publish(ends.router, make_item(number, number, priority=priority))
    [(entry_id, fields)] = await deployment.client.xrange(deployment.work(1))
    old_id = f"{entry_id.decode().partition('-')[0]}-40000"
    await deployment.client.delete(deployment.work(1), deployment.key(WAITING))
    await deployment.client.xadd(deployment.work(1), fields, id=old_id)
    await deployment.client.hset(deployment.key(QUESTIONS, "r"), "i:1", f"1:{old_id}")
    await ends.other_node._upkeep.sweep()
    assert keys(await ends.node.lease(8, 0)) == [("r", 0), ("r", 1), ("r", 2)]


async def test_a_lost_group_gives_back_what_was_leased(deployment: RedisHarness) -> None:
    """Items whose holders were forgotten with the group would wait for the next sweep, or be lost."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    await ends.node.lease(1, 0)
    await deployment.client.xgroup_destroy(deployment.work(0), WORK_GROUP)
    await deployment.expire_leases()
    assert keys(await ends.other_node.lease(1, 0)) == [("r", 0)]


async def test_consumers_nobody_remembers_are_removed(deployment: RedisHarness) -> None:
    """After a day without any node, nobody would know whom to bury."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    await ends.node.lease(1, 0)
    await deployment.client.delete(deployment.key(NODES))
    await deployment.expire_leases()
    await ends.other_node._upkeep.sweep()
    [lease] = await ends.other_node.lease(1, 0)
    assert lease.attempt == 2
    consumers = await deployment.client.xinfo_consumers(deployment.work(0), WORK_GROUP)
    assert {info["name"].partition(b"/")[0] for info in consumers} == {b"~", b"other-node"}


# ---- outcomes and events


async def test_a_question_that_has_its_outcome_is_not_run_again(deployment: RedisHarness) -> None:
    """A publication repeated after a lost reply would compute the answer twice."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease))
    await publish(ends.router, make_item(time_budget_ms=77))
    assert await ends.router.depths() == [0]
    assert await ends.results.read(10, 0) == [outcome(lease)]
    assert await ends.results.read(10, 0) == []
    assert await ends.router.lost([("r", 0)]) == [], "that everybody has read it loses nothing"
    await publish(ends.router, make_item())
    assert await ends.results.read(10, 0) == [outcome(lease)]


async def test_another_question_under_a_used_id_is_run(deployment: RedisHarness) -> None:
    """It would be given the answer of an earlier question: somebody else's text."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease, "earlier"))
    await ends.results.read(10, 0)
    other = make_item(tenant="another")
    await publish(ends.router, other)
    [lease] = await ends.node.lease(1, 0)
    assert lease.item == other
    assert await commit(ends.node, lease, outcome(lease, "later")) is ReportState.COMMITTED
    assert await ends.results.read(10, 0) == [outcome(lease, "later")]


async def test_a_full_event_stream_takes_outcomes_only(deployment: RedisHarness) -> None:
    """A slow aggregator would fill the server, or lose text; an outcome must not wait."""
    deployment.settings = replace(deployment.settings, max_events=2)
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    for event in (started(lease), delta(lease, 0)):
        await emit(ends.node, lease, event)
    more = Report(lease=lease, events=(delta(lease, 1),))
    assert await ends.node.report([more]) == [ReportState.FULL]
    assert await ends.results.read(2, 0) == [started(lease), delta(lease, 0)]
    assert await ends.results.read(1, 0) == []
    assert await ends.node.report([more]) == [ReportState.HELD]
    assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED


# ---- what is lost


async def test_a_router_hears_how_questions_ended(deployment: RedisHarness) -> None:
    """Breakers would learn of a node without memory when questions run out of time, or never."""
    ends = await deployment.create(num_channels=5)
    items = [make_item(index, index) for index in range(5)]
    assert await ends.router.publish(items) == [None] * 5
    leases = sorted(await ends.node.lease(4, 0), key=lambda lease: lease.item.question_index)
    failed = replace(outcome(leases[1]), finish_reason=FinishReason.ERROR, error=OutOfMemoryError("no room").info)
    await commit(ends.node, leases[0], outcome(leases[0]))
    await commit(ends.node, leases[1], failed)
    assert await ends.node.dead_letter(leases[2], EngineDeadError("the device is gone"))
    late = replace(outcome(leases[3]), finish_reason=FinishReason.TIMEOUT_RUNNING)
    assert await ends.results.settle([late]) == [3]
    await ends.router.cancel("r", [4])
    endings = {
        ("r", 0): Ending(FinishReason.STOP),
        ("r", 1): Ending(FinishReason.ERROR, "OUT_OF_MEMORY"),
        ("r", 2): Ending(FinishReason.ERROR, "ENGINE_DEAD"),
        ("r", 3): Ending(FinishReason.TIMEOUT_RUNNING),
        ("r", 4): Ending(FinishReason.CANCELLED),
    }
    asked = [*endings, ("r", 5), ("unknown", 0)]
    assert await ends.router.settled(asked) == endings
    # The nodes and the router have ended; what the store knows it goes on knowing.
    deployment.abandon(ends.node)
    started_again = await deployment.join("router")
    assert await started_again.settled(asked) == endings
    # What a version wrote that knew no endings, and a new use of an id that had one.
    await deployment.client.hdel(deployment.key(QUESTIONS, "r"), "f:1")
    assert (await started_again.settled([("r", 1)]))["r", 1] == Ending()
    assert await ends.router.publish([make_item(1, 1, prompt=Prompt(ids=(9, 9)))]) == [None]
    assert await started_again.settled([("r", 1)]) == {}
    assert await ends.router.publish([make_item(0, 0, prompt=Prompt(ids=(9, 9)))]) == [None]
    await deployment.client.hset(deployment.key(QUESTIONS, "r"), "r:0", b"as an older node sets it")
    assert await started_again.settled([("r", 0)]) == {("r", 0): Ending()}


async def test_many_endings_are_told_in_one_call(deployment: RedisHarness) -> None:
    """Beyond what one look-up takes, the router would hear of other questions than those that ended."""
    ends = await deployment.create(num_channels=1)
    asked = [("r", index) for index in range(700)]
    late = [
        ChannelResult(request_id="r", question_index=index, channel_id=0, finish_reason=FinishReason.TIMEOUT_QUEUED)
        for index in range(0, 700, 3)
    ]
    await ends.results.settle(late)
    found = await ends.router.settled([*asked, ("s", 0)])
    assert sorted(found) == [result.key for result in late]
    assert set(found.values()) == {Ending(FinishReason.TIMEOUT_QUEUED)}


async def test_lost_questions_are_named(deployment: RedisHarness) -> None:
    """A client would wait in vain for what a flush took away."""
    ends = await deployment.create(num_channels=1)
    for index in range(3):
        await publish(ends.router, make_item(index))
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease))
    everything = [("r", 0), ("r", 1), ("r", 2)]
    assert await ends.router.lost(everything) == []
    assert await ends.router.lost([]) == []
    waiting = await deployment.client.xrange(deployment.work(0))
    await deployment.client.xdel(deployment.work(0), waiting[0][0])
    assert await ends.router.lost(everything) == [("r", 1)]
    await deployment.flush()
    assert await ends.router.lost(everything) == everything


async def test_entries_deleted_by_others_are_counted(deployment: RedisHarness) -> None:
    """An operator would not learn that somebody trims the streams, and the entry would stay pending for ever."""
    deployment.settings = replace(deployment.settings, lease_timeout_s=0.05)
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item(0))
    await ends.node.lease(1, 0)
    await deployment.client.xtrim(deployment.work(0), maxlen=0)
    await asyncio.sleep(0.06)
    await ends.other_node._upkeep.sweep()
    assert ends.node.num_lost_entries + ends.other_node.num_lost_entries == 1
    assert await pending(deployment) == []


@pytest.mark.parametrize("loss", ["group", "stream"])
async def test_an_answer_survives_the_loss_of_its_bookkeeping(deployment: RedisHarness, loss: str) -> None:
    """A finished answer would be thrown away although nobody else works on the question."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    if loss == "group":
        await deployment.client.xgroup_destroy(deployment.work(0), WORK_GROUP)
    else:
        await deployment.client.delete(deployment.work(0))
    assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED
    assert await commit(ends.node, lease, outcome(lease)) is ReportState.ALREADY_COMMITTED
    assert await ends.other_node.lease(1, 0) == []
    assert await ends.results.read(10, 0) == [outcome(lease)]


# ---- room


async def test_memory_returns_to_its_base(deployment: RedisHarness) -> None:
    """Acknowledged entries, states and consumers would pile up."""
    deployment.settings = replace(deployment.settings, retention_s=0.1, lease_timeout_s=1.0)
    ends = await deployment.create(num_channels=4)
    for first in range(0, 1000, 100):
        items = [make_item(i, i % 4, request_id=f"r{i}", time_budget_ms=1) for i in range(first, first + 100)]
        await ends.router.publish(items)
        await ends.router.cancel(items[3].request_id)
        done = 0
        while leases := await ends.node.lease(4, 0):
            await ends.node.report([Report(lease=lease, events=(started(lease), outcome(lease))) for lease in leases])
            done += len(leases)
        assert done == 99
        assert len(await read_all(ends.results)) == 2 * 99
    await asyncio.sleep(1.15)
    names = {key.decode() async for key in deployment.client.scan_iter(match=deployment.prefix + "*", count=1000)}
    for kind in (ORDER, NODES, WORK_BELL, RESULTS):
        names.discard(deployment.key(kind))
    names.discard(deployment.key(READERS))
    withdrawn = {deployment.key(QUESTIONS, f"r{first + 3}") for first in range(0, 1000, 100)}
    assert names - withdrawn == {deployment.work(channel_id) for channel_id in range(4)}
    for name in [*names - withdrawn, deployment.key(RESULTS)]:
        assert await deployment.client.xlen(name) == 0
        assert await deployment.client.memory_usage(name) < 4_000


async def test_notices_do_not_pile_up(deployment: RedisHarness) -> None:
    """A node that never asks for withdrawals would fill the server."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await ends.router.cancel("r")
    notices = deployment.key(NOTICES, ends.node._consumer)
    assert 0 < await deployment.client.pttl(notices) <= 60_000
    assert await ends.node.cancellations(0) == [lease.item.key]
    assert await deployment.client.exists(notices) == 0 or await deployment.client.xlen(notices) == 0


# ---- names and settings


async def test_deployments_share_nothing(deployment: RedisHarness, redis_url: str) -> None:
    """Two deployments on one server would answer each other's questions."""
    other = RedisHarness(redis_url)
    try:
        here, there = await deployment.create(num_channels=1), await other.create(num_channels=1)
        await publish(here.router, make_item())
        assert await there.node.lease(1, 0) == []
        assert keys(await here.node.lease(1, 0)) == [("r", 0)]
    finally:
        await other.close()


@pytest.mark.parametrize("name", ["", "a b", "a}b", "x" * 65])
def test_a_deployment_name_fits_into_a_hash_tag(name: str) -> None:
    """Its keys would be spread over a cluster, where scripts cannot run."""
    with pytest.raises(ConfigError, match="deployment"):
        RedisKeys(name)


@pytest.mark.parametrize("change", [{"num_channels": 0}, {"lease_timeout_s": 0.0}, {"node_id": "a/b"}, {"node_id": ""}])
def test_impossible_settings_are_refused(change: dict[str, object]) -> None:
    """A node would never get a lease, or pass for another one."""
    settings = {"num_channels": 1, "node_id": "n", **change}
    with pytest.raises(ConfigError):
        RedisTransportSettings(**settings).check()  # type: ignore[arg-type]


async def test_a_dead_letter_keeps_the_reason(deployment: RedisHarness) -> None:
    """What killed a question could not be looked at."""
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await ends.node.dead_letter(lease, OutOfMemoryError("no memory"))
    [(_, letter)] = await deployment.client.xrange(deployment.key(DEAD_LETTERS))
    assert (letter[b"reason"], letter[b"message"]) == (b"OUT_OF_MEMORY", b"no memory")
