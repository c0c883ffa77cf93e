"""The request registry in Redis keeps its contract.

Not here: the work streams (``test_redis_transport``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from common.errors import InvalidRequestError, QueueFullError, RequestConflictError
from common.redis_keys import DEADLINES, EVENTS, QUESTIONS, REQUEST, STORE
from common.redis_link import RedisLink
from common.redis_registry import RedisRegistry
from common.redis_source import RedisSource
from common.types import AggregateMode, IsolationLevel, QuestionRecord, RequestRecord, Route, Strategy
from tests.contract.redis_harness import RedisHarness
from tests.contract.redis_proxy import lossy_proxy
from tests.contract.transport_suite import keys, make_item, outcome
from tests.work_calls import commit, publish

pytestmark = [pytest.mark.store, pytest.mark.usefixtures("nothing_stays_for_ever")]


def make_record(request_id: str = "r", digest: str = "d", *timeouts_ms: int) -> RequestRecord:
    route = Route(channel_id=0, strategy=Strategy.ROUND_ROBIN, hash_bucket=0)
    questions = [
        QuestionRecord(question_index=index, route=route, timeout_ms=timeout_ms)
        for index, timeout_ms in enumerate(timeouts_ms or (10_000,))
    ]
    return RequestRecord(
        request_id=request_id,
        content_digest=digest,
        mode=AggregateMode.SLOT_MAP,
        isolation=IsolationLevel.STRICT,
        questions=tuple(questions),
    )


@pytest.fixture
async def link(deployment: RedisHarness) -> AsyncIterator[RedisLink]:
    link = await RedisLink.connect(deployment.link_settings)
    yield link
    await link.close()


@pytest.fixture
def registry(link: RedisLink) -> RedisRegistry:
    return RedisRegistry(link=link, retention_s=30.0)


@pytest.fixture
def source(deployment: RedisHarness, link: RedisLink) -> RedisSource:
    settings = replace(deployment.settings, node_id="aggregator", retention_s=30.0)
    return RedisSource(link=link, settings=settings)


async def age_store(deployment: RedisHarness, source: RedisSource) -> None:
    """Let the store be old enough to know what does not exist."""
    await source.overdue()
    await deployment.client.hset(deployment.key(STORE), "ms", 1)


async def test_a_request_is_registered_once(registry: RedisRegistry) -> None:
    """A repeated submit would run its questions twice, or the first one not at all."""
    assert not await registry.lookup("r", "d")
    assert await registry.register(make_record())
    assert not await registry.register(make_record())
    assert await registry.lookup("r", "d")


async def test_an_id_belongs_to_its_content(registry: RedisRegistry) -> None:
    """A caller would get the answers to another caller's questions."""
    await registry.register(make_record())
    with pytest.raises(RequestConflictError, match="'r'"):
        await registry.register(make_record(digest="other"))
    with pytest.raises(RequestConflictError):
        await registry.lookup("r", "other")


async def test_racing_registrations_have_one_winner(registry: RedisRegistry) -> None:
    """Two routers would both publish a request that was sent twice."""
    new = await asyncio.gather(*(registry.register(make_record()) for _ in range(8)))
    assert sorted(new) == [False] * 7 + [True]


async def test_a_registration_whose_reply_was_lost_was_new(deployment: RedisHarness) -> None:
    """The router would take it for a repetition and never publish the questions."""
    async with lossy_proxy(deployment.url) as proxy:
        link = await RedisLink.connect(replace(deployment.link_settings, url=proxy.url))
        registry = RedisRegistry(link=link)
        await registry.register(make_record("warm-up"))
        proxy.lose_reply_to(b"EVALSHA")
        assert await registry.register(make_record())
        assert proxy.num_lost == 1
        assert not await registry.register(make_record())
        await link.close()


async def test_the_record_is_found_unchanged(registry: RedisRegistry, source: RedisSource) -> None:
    """An aggregator that takes over would wait for other questions, or for another time."""
    record = make_record("r", "d", 5_000, 7_000)
    await registry.register(record)
    await asyncio.sleep(0.02)
    found = await source.find("r")
    assert found is not None
    assert found.record == record
    assert 15 <= found.age_ms < 5_000


async def test_requests_without_a_record_are_told(deployment: RedisHarness, registry: RedisRegistry) -> None:
    """A router would not notice that the store has lost what it had accepted."""
    await registry.register(make_record("kept"))
    await registry.register(make_record("lost"))
    await deployment.client.delete(deployment.key(REQUEST, "lost"))
    assert await registry.unregistered(["kept", "lost", "never"]) == ["lost", "never"]
    assert await registry.unregistered([]) == []


async def test_a_restored_request_keeps_what_is_known_of_its_questions(
    deployment: RedisHarness, registry: RedisRegistry, source: RedisSource
) -> None:
    """An outcome that was there would be computed again, or the request never be complete."""
    ends = await deployment.create(num_channels=2)
    record = make_record("r", "d", 10_000, 10_000)
    await registry.register(record)
    for index in range(2):
        await publish(ends.router, make_item(index, channel_id=index))
    answered, running = await ends.node.lease(2, 0)
    await commit(ends.node, answered, outcome(answered, "told"))
    await deployment.client.delete(deployment.key(REQUEST, "r"))
    await registry.restore(record, 4_000)
    found = await source.find("r")
    assert found is not None and found.record == record
    assert 4_000 <= found.age_ms < 9_000
    assert [past.event for past in found.events] == [outcome(answered, "told")]
    assert await ends.router.lost([answered.item.key]) == []
    await commit(ends.node, running, outcome(running))
    assert await deployment.client.zcard(deployment.key(DEADLINES)) == 0, "with the last outcome it is complete"


async def test_a_record_that_is_there_is_not_restored(registry: RedisRegistry, source: RedisSource) -> None:
    """Two routers that both look after a request would push its deadlines about, or overwrite another one's id."""
    await registry.register(make_record())
    await registry.restore(make_record(), 60_000)
    found = await source.find("r")
    assert found is not None and found.age_ms < 50_000
    with pytest.raises(RequestConflictError):
        await registry.restore(make_record(digest="other"), 0)


async def test_a_damaged_record_is_told(deployment: RedisHarness, registry: RedisRegistry, source: RedisSource) -> None:
    """A crash of the aggregator would repeat at every start."""
    await registry.register(make_record())
    await deployment.client.hset(deployment.key(REQUEST, "r"), "e", b"\xff")
    with pytest.raises(InvalidRequestError):
        await source.find("r")


async def test_unfinished_requests_come_by_deadline(
    deployment: RedisHarness, registry: RedisRegistry, source: RedisSource
) -> None:
    """After a restart of the aggregator nobody would time out what was running, or look at it in time."""
    await registry.register(make_record("late", "d", 60_000))
    await registry.register(make_record("soon", "d", 90_000, 1))
    await registry.register(make_record("gone", "d", 1))
    await registry.register(make_record("done", "d", 1))
    await source.complete("done")
    await deployment.client.delete(deployment.key(REQUEST, "gone"))
    await asyncio.sleep(0.01)
    assert await source.overdue() == ["soon"]
    assert await deployment.client.zrange(deployment.key(DEADLINES), 0, -1) == [b"soon", b"late"]


async def test_a_full_registry_refuses(link: RedisLink, source: RedisSource) -> None:
    """Running requests would grow without bound; those known already must still be joined."""
    registry = RedisRegistry(link=link, max_requests=1)
    await registry.register(make_record("one"))
    with pytest.raises(QueueFullError) as refused:
        await registry.register(make_record("two"))
    assert refused.value.retry_after_s > 0
    assert not await registry.register(make_record("one"))
    await source.complete("one")
    assert await registry.register(make_record("two"))


async def test_a_completed_request_is_kept_for_its_time(
    deployment: RedisHarness, registry: RedisRegistry, source: RedisSource
) -> None:
    """A retry after completion would run the request again; or its traces would stay for ever."""
    await registry.register(make_record())
    ends = await deployment.create(num_channels=1)
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease))
    await source.complete("r")
    assert await registry.lookup("r", "d")
    for kind in (REQUEST, QUESTIONS, EVENTS):
        assert 29_000 < await deployment.client.pttl(deployment.key(kind, "r")) <= 30_000


async def test_an_id_is_free_after_withdrawal(
    deployment: RedisHarness, registry: RedisRegistry, source: RedisSource
) -> None:
    """A failed submit would block its id, leave questions running, or answer its retry with an earlier outcome."""
    ends = await deployment.create(num_channels=1)
    await registry.register(make_record())
    for index in range(3):
        await publish(ends.router, make_item(index))
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease))
    [held] = await ends.node.lease(1, 0)
    await registry.withdraw("r")
    assert await ends.node.cancellations(0) == [held.item.key]
    assert await ends.router.depths() == [0]
    await age_store(deployment, source)
    assert await source.find("r") is None
    assert await deployment.client.zcard(deployment.key(DEADLINES)) == 0
    assert await registry.register(make_record(digest="other"))
    await publish(ends.router, make_item(0))
    assert keys(await ends.node.lease(1, 0)) == [("r", 0)]


async def test_a_new_request_finds_no_outcome_under_its_id(
    deployment: RedisHarness, registry: RedisRegistry, source: RedisSource
) -> None:
    """An id used again after its time would be answered with what an earlier request got."""
    ends = await deployment.create(num_channels=1)
    await registry.register(make_record())
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease, "earlier"))
    await ends.results.read(10, 0)
    await deployment.client.delete(deployment.key(REQUEST, "r"))
    assert await registry.register(make_record())
    await publish(ends.router, make_item())
    assert keys(await ends.node.lease(1, 0)) == [("r", 0)]
    found = await source.find("r")
    assert found is not None and found.events == ()
