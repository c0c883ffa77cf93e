"""The aggregators' end of Redis: every reader is given everything, and any of them can go on where another one ended.

Not here: the contract of settling on every transport (``test_settling``), registering (``test_redis_registry``).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import StoreUnavailableError
from common.ports import ResultStream, Withdrawn
from common.redis_keys import DEADLINES, EVENTS, QUESTIONS, READERS, REQUEST, RESULTS, STORE
from common.redis_registry import RedisRegistry
from common.redis_source import RedisSource
from common.types import ChannelEvent, FinishReason
from tests.contract.redis_harness import RedisHarness
from tests.contract.redis_proxy import lossy_proxy
from tests.contract.redis_servers import running_server
from tests.contract.test_redis_registry import make_record
from tests.contract.test_settling import placeholder
from tests.contract.transport_suite import LONG_S, Ends, delta, make_item, outcome, started
from tests.ports import free_port
from tests.work_calls import commit, emit, publish

pytestmark = [pytest.mark.store, pytest.mark.usefixtures("nothing_stays_for_ever")]


@pytest.fixture
async def ends(deployment: RedisHarness) -> Ends:
    return await deployment.create(num_channels=2)


@pytest.fixture
def registry(deployment: RedisHarness, ends: Ends) -> RedisRegistry:
    return RedisRegistry(link=deployment.links[0], retention_s=60.0)


async def read_all(results: ResultStream, max_events: int = 7) -> list[ChannelEvent | Withdrawn]:
    events: list[ChannelEvent | Withdrawn] = []
    while some := await results.read(max_events, 0):
        events += some
    return events


async def answer(ends: Ends, question_index: int = 0) -> list[ChannelEvent]:
    """Publish a question and answer it; what was reported."""
    await publish(ends.router, make_item(question_index))
    [lease] = await ends.node.lease(1, 0)
    for event in (started(lease), delta(lease)):
        await emit(ends.node, lease, event)
    await commit(ends.node, lease, outcome(lease))
    return [started(lease), delta(lease), outcome(lease)]


async def fall_silent(deployment: RedisHarness, *but: RedisSource) -> None:
    """Let every reader's last sign of life be long ago, except for those given."""
    key = deployment.key(READERS)
    kept = {source._settings.consumer.encode() for source in but}
    marks: dict[Any, Any] = await deployment.client.hgetall(key)
    for reader, mark in marks.items():
        if reader not in kept:
            await deployment.client.hset(key, reader, b"1 " + mark.partition(b" ")[2])


async def age_store(deployment: RedisHarness) -> None:
    """Let the store have been what it is for long."""
    await deployment.client.hset(deployment.key(STORE), "ms", 1)


# ---- readers


async def test_each_reader_is_given_everything(deployment: RedisHarness, ends: Ends) -> None:
    """Two aggregators would each get every second piece of a text, or one nothing at all."""
    other = await deployment.read_as("other")
    assert await other.read(10, 0) == []
    waiting = asyncio.create_task(other.read(1, LONG_S))
    sent = await answer(ends)
    assert await asyncio.wait_for(waiting, 5) == sent[:1]
    assert await read_all(ends.results) == sent
    assert await read_all(other) == sent[1:]
    assert ends.results.num_gaps == other.num_gaps == 0


async def test_what_all_have_read_is_deleted(deployment: RedisHarness, ends: Ends) -> None:
    """Events would fill the server, or be gone before a slow reader has them."""
    other = await deployment.read_as("other")
    await other.read(10, 0)
    sent = await answer(ends)
    assert await read_all(ends.results) == sent
    assert await deployment.client.xlen(deployment.key(RESULTS)) == 3
    assert await other.read(2, 0) == sent[:2]
    assert await other.read(2, 0) == sent[2:]
    assert await ends.results.read(1, 0) == []
    assert await deployment.client.xlen(deployment.key(RESULTS)) == 1
    assert await other.read(2, 0) == await ends.results.read(2, 0) == []
    assert await deployment.client.xlen(deployment.key(RESULTS)) == 0


async def test_a_reader_that_is_gone_holds_up_nothing(deployment: RedisHarness, ends: Ends) -> None:
    """Every restart of an aggregator would leave a reader behind for whom events are kept until nodes have to wait."""
    gone = await deployment.read_as("gone")
    await gone.read(1, 0)
    await answer(ends)
    await read_all(ends.results)
    assert await deployment.client.xlen(deployment.key(RESULTS)) == 3
    await fall_silent(deployment, ends.results)  # type: ignore[arg-type]
    await ends.results.read(1, 0)
    assert await deployment.client.xlen(deployment.key(RESULTS)) == 0
    assert await deployment.client.hlen(deployment.key(READERS)) == 1


async def test_a_reader_that_was_away_learns_that_it_missed_something(deployment: RedisHarness, ends: Ends) -> None:
    """After a long pause its callers would wait for outcomes that everybody else has."""
    paused = await deployment.read_as("paused")
    await paused.read(1, 0)
    await answer(ends)
    await fall_silent(deployment, ends.results)  # type: ignore[arg-type]
    await read_all(ends.results)
    await ends.results.read(1, 0)
    assert await read_all(paused) == [], "it was dropped before it had read anything: its first event is still to come"
    await answer(ends, 1)
    assert len(await read_all(paused)) == 3
    await fall_silent(deployment, ends.results)  # type: ignore[arg-type]
    await answer(ends, 2)
    await read_all(ends.results)
    await ends.results.read(1, 0)
    assert (await read_all(paused), paused.num_gaps) == ([], 1)


async def test_a_new_reader_begins_with_what_is_there(deployment: RedisHarness, ends: Ends) -> None:
    """What came while no aggregator ran would be told by the next one only when somebody asks for it."""
    sent = await answer(ends)
    assert await ends.results.read(2, 0) == sent[:2]
    successor = await deployment.read_as("aggregator")
    assert await read_all(successor) == sent


async def test_reading_goes_on_after_the_store_was_emptied(deployment: RedisHarness, ends: Ends) -> None:
    """A reader would wait past ids that the empty store begins with anew, or not know that it missed something."""
    await answer(ends)
    await read_all(ends.results)
    reading = asyncio.create_task(ends.results.read(10, LONG_S))
    await deployment.settle()
    await deployment.flush()
    sent = await answer(ends, 1)
    events = await asyncio.wait_for(reading, 5)
    events += await read_all(ends.results)
    assert [event for number, event in enumerate(events) if event not in events[:number]] == sent
    assert ends.results.num_gaps == 1


async def test_a_store_whose_clock_was_set_back_is_read_from_its_start(deployment: RedisHarness, ends: Ends) -> None:
    """Everything the new store has would be deleted as read, or wait until its clock has caught up."""
    reader = await deployment.read_as("reader")
    reader._position = "99999999999999-0"
    sent = await answer(ends)
    assert await read_all(reader) == sent
    assert reader.num_gaps == 1


async def test_readers_are_told_of_a_withdrawn_request(ends: Ends, registry: RedisRegistry) -> None:
    """Events of a retry under the same id would be taken for those of the request that was withdrawn."""
    await registry.withdraw("r")
    await registry.register(make_record())
    before = await answer(ends)
    await registry.withdraw("r")
    await registry.withdraw("r")
    await registry.register(make_record(digest="other"))
    after = await answer(ends, 1)
    assert await read_all(ends.results) == [*before, Withdrawn(request_id="r"), *after]


# ---- settling, across a crash


async def test_a_settled_outcome_is_in_the_log_like_any_other(ends: Ends, registry: RedisRegistry) -> None:
    """An aggregator that starts anew would tell a cancelled request as timed out."""
    await registry.register(make_record("r", "d", 10_000, 10_000))
    sent = await answer(ends)
    cancelled = placeholder(1, FinishReason.CANCELLED)
    await ends.results.settle([cancelled])
    for _ in range(2):  # read or not
        found = await ends.results.find("r")  # type: ignore[attr-defined]
        assert [past.event for past in found.events] == [*sent, cancelled]
        ages_ms = [past.at_ms for past in found.events]
        assert ages_ms == sorted(ages_ms) and ages_ms[-1] <= found.age_ms
        await read_all(ends.results)


async def test_settling_again_after_a_lost_reply_changes_nothing(deployment: RedisHarness, ends: Ends) -> None:
    """A cancellation would be told to have come too late, because the store had already carried it out."""
    async with lossy_proxy(deployment.url) as proxy:
        aggregator = await deployment.read_as("lossy", url=proxy.url)
        await aggregator.settle([placeholder(1)])
        proxy.lose_reply_to(b"EVALSHA")
        assert await aggregator.settle([placeholder(0)]) == [0]
        assert proxy.num_lost == 1
        assert await read_all(ends.results) == [placeholder(1), placeholder(0)]


async def test_a_question_settled_before_its_publication_is_not_run(ends: Ends) -> None:
    """A question that was cancelled while it waited for a channel would be computed, and have two outcomes."""
    await ends.results.settle([placeholder()])
    await publish(ends.router, make_item())
    assert await ends.node.lease(1, 0) == []
    assert await ends.router.depths() == [0, 0]
    assert set(await read_all(ends.results)) == {placeholder()}


async def test_a_new_request_is_not_settled_by_an_earlier_one(
    deployment: RedisHarness, ends: Ends, registry: RedisRegistry
) -> None:
    """An id used again would be answered with the cancellation of its predecessor."""
    await registry.register(make_record())
    await ends.results.settle([placeholder()])
    await deployment.client.delete(deployment.key(REQUEST, "r"))
    await registry.register(make_record())
    await publish(ends.router, make_item())
    assert len(await ends.node.lease(1, 0)) == 1
    assert await ends.results.settle([placeholder()]) == [0]


# ---- requests


@pytest.mark.parametrize("last", ["commit", "settle"])
async def test_the_last_outcome_completes_a_request(
    deployment: RedisHarness, ends: Ends, registry: RedisRegistry, last: str
) -> None:
    """Requests nobody asks for would count as running until their time is over, and be kept for longer than told."""
    await registry.register(make_record("r", "d", 3_600_000, 3_600_000))
    await answer(ends, 0)
    assert await deployment.client.zcard(deployment.key(DEADLINES)) == 1
    if last == "commit":
        await answer(ends, 1)
    else:
        await ends.results.settle([placeholder(1)])
    assert await deployment.client.zcard(deployment.key(DEADLINES)) == 0
    for kind in (REQUEST, QUESTIONS, EVENTS):
        assert 59_000 < await deployment.client.pttl(deployment.key(kind, "r")) <= 60_000


async def test_nobody_is_unknown_while_the_store_is_young(
    deployment: RedisHarness, ends: Ends, registry: RedisRegistry
) -> None:
    """After a flush a client would be told that its request does not exist, just before its router brings it back."""
    source = await deployment.read_as("aggregator")
    await registry.register(make_record())
    assert await source.find("r") is not None
    with pytest.raises(StoreUnavailableError, match=r"'unknown'.*began anew"):
        await source.find("unknown")
    await age_store(deployment)
    assert await source.find("unknown") is None
    await deployment.flush()
    with pytest.raises(StoreUnavailableError):
        await source.find("r")
    await registry.register(make_record())
    assert await source.find("r") is not None


async def test_a_restarted_server_is_young(server_name: str, tmp_path: Path) -> None:
    """What the append-only file had not yet taken is lost without any key being gone."""
    port = free_port()
    persistence = ("--appendonly", "yes", "--appendfsync", "always")
    with running_server(server_name, tmp_path, port, *persistence) as url:
        deployment = RedisHarness(url)
        source = await deployment.read_as("aggregator")
        await source.overdue()
        await age_store(deployment)
        assert await source.find("r") is None
    with running_server(server_name, tmp_path, port, *persistence):
        with pytest.raises(StoreUnavailableError):
            await source.find("r")
        await deployment.close()


async def test_a_request_of_an_older_router_is_let_go(
    deployment: RedisHarness, ends: Ends, registry: RedisRegistry
) -> None:
    """A request that does not say how many questions are open would never be complete."""
    await registry.register(make_record("r", "d", 1))
    await deployment.client.hdel(deployment.key(REQUEST, "r"), "open")
    await answer(ends)
    await asyncio.sleep(0.002)
    source = await deployment.read_as("aggregator")
    assert await source.overdue() == ["r"]
    await source.complete("r")
    assert await source.overdue() == []


async def test_a_damaged_event_hides_only_itself(deployment: RedisHarness, ends: Ends, registry: RedisRegistry) -> None:
    """One event that cannot be read would make a whole request unreadable."""
    await registry.register(make_record())
    sent = await answer(ends)
    await deployment.client.xadd(deployment.key(EVENTS, "r"), {b"e": b"garbage\xff"})
    found = await (await deployment.read_as("aggregator")).find("r")
    assert found is not None and [past.event for past in found.events] == sent
    assert replace(found, events=()).record == make_record()
