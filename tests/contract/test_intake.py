"""What takes a request in keeps its contract, in one act and in two.

Not here: registrations and publications by themselves (``test_redis_registry``, ``transport_suite``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from aggregator_svc.service import AggregatorService
from aggregator_svc.settings import AggregatorSettings
from common.clock import ManualClock
from common.errors import QueueFullError, RequestConflictError, StoreUnavailableError
from common.memory import MemoryTransport
from common.ports import Intake, RequestRegistry, WorkStreams
from common.redis_intake import RedisIntake
from common.redis_keys import REQUEST
from common.redis_link import RedisLink
from common.redis_registry import RedisRegistry
from common.redis_streams import RedisTransport
from router_svc.intake import TwoSteps
from tests.contract.redis_harness import RedisHarness
from tests.contract.redis_proxy import lossy_proxy
from tests.contract.test_redis_registry import make_record
from tests.contract.transport_suite import keys, make_item

pytestmark = pytest.mark.store


@dataclass
class Door:
    """An intake and what is behind it."""

    intake: Intake
    registry: RequestRegistry
    work: WorkStreams


def redis_door(link: RedisLink, transport: RedisTransport, max_requests: int) -> Door:
    registry = RedisRegistry(link=link, max_requests=max_requests)
    return Door(RedisIntake(link=link, registry=registry, transport=transport), registry, transport)


def memory_door(max_requests: int) -> Door:
    clock = ManualClock()
    transport = MemoryTransport(num_channels=2, clock=clock, max_entries_per_channel=2)
    registry = AggregatorService(
        results=transport, work=transport, clock=clock, settings=AggregatorSettings(max_requests=max_requests)
    )
    return Door(TwoSteps(registry, transport), registry, transport)


@pytest.fixture(params=["memory", "redis in one act", "redis in two steps"])
async def door(request: pytest.FixtureRequest, deployment: RedisHarness) -> AsyncIterator[Door]:
    """An intake with two channels of two items each, for three requests."""
    if request.param == "memory":
        yield memory_door(3)
        return
    ends = await deployment.create(num_channels=2, max_entries_per_channel=2)
    made = redis_door(deployment.links[0], ends.router, 3)
    yield made if request.param.endswith("act") else replace(made, intake=TwoSteps(made.registry, made.work))


async def test_a_new_request_is_registered_and_published(door: Door) -> None:
    """Its outcomes would come for a request that nobody knows, or it would wait for nodes that were never told."""
    record = make_record("r", "d", 5_000, 5_000, 5_000)
    assert await door.intake.accept(record, [make_item(0), make_item(1, channel_id=1)]) == [None, None]
    assert await door.registry.lookup("r", "d")
    assert keys(await door.work.lease(9, 0)) == [("r", 0), ("r", 1)]
    assert await door.intake.accept(make_record("empty"), []) == []
    assert await door.registry.lookup("empty", "d")


async def test_the_same_request_publishes_nothing(door: Door) -> None:
    """A retry would run everything twice."""
    await door.intake.accept(make_record("r"), [make_item(0)])
    assert await door.intake.accept(make_record("r"), [make_item(0), make_item(1, channel_id=1)]) is None
    assert await door.work.depths() == [1, 0]


async def test_a_refused_request_publishes_nothing(door: Door) -> None:
    """Questions of a caller who was told that they do not run would run."""
    await door.intake.accept(make_record("r"), [make_item(0)])
    with pytest.raises(RequestConflictError, match="'r'"):
        await door.intake.accept(make_record("r", "other"), [make_item(0, channel_id=1)])
    for name in "st":
        await door.intake.accept(make_record(name), [])
    with pytest.raises(QueueFullError):
        await door.intake.accept(make_record("u"), [make_item(0, channel_id=1, request_id="u")])
    assert await door.work.depths() == [1, 0]


async def test_a_full_channel_refuses_its_questions_only(door: Door) -> None:
    """One hot channel would refuse whole requests, or accepted questions would be lost without a word."""
    items = [make_item(0), make_item(1), make_item(2), make_item(3, channel_id=1)]
    found = await door.intake.accept(make_record("r", "d", *[5_000] * 4), items)
    assert found is not None and [type(refusal) for refusal in found] == [
        type(None),
        type(None),
        QueueFullError,
        type(None),
    ]
    assert await door.work.depths() == [2, 1]


async def test_racing_calls_have_one_winner(door: Door) -> None:
    """Two calls of a request would both publish it, or neither."""
    found = await asyncio.gather(*(door.intake.accept(make_record("r"), [make_item(0)]) for _ in range(8)))
    assert sorted(found, key=str) == [None] * 7 + [[None]]
    assert await door.work.depths() == [1, 0]


async def test_an_acceptance_whose_reply_was_lost_was_new(deployment: RedisHarness) -> None:
    """The router would take it for a repetition, and drop a request whose questions run."""
    async with lossy_proxy(deployment.url) as proxy:
        await deployment.create(num_channels=1)
        transport = await deployment.join("far", proxy.url)
        door = redis_door(deployment.links[-1], transport, 9)
        await door.intake.accept(make_record("warm-up"), [])
        proxy.lose_reply_to(b"EVALSHA")
        assert await door.intake.accept(make_record("r"), [make_item(0)]) == [None]
        assert proxy.num_lost == 1
        assert await door.work.depths() == [1]


async def test_a_large_request_is_taken_in_part_by_part(deployment: RedisHarness) -> None:
    """A request of many long questions would block the server for everybody, or be too large for it."""
    ends = await deployment.create(num_channels=1, max_entries_per_channel=1_000)
    door = redis_door(deployment.links[0], ends.router, 9)
    items = [make_item(index) for index in range(300)]
    assert await door.intake.accept(make_record("r", "d", *[5_000] * 300), items) == [None] * 300
    assert await door.work.depths() == [300]


async def test_a_doubtful_registration_takes_no_other_calls_request(deployment: RedisHarness) -> None:
    """A call that never learned what became of it would withdraw the request of its own retry at another router."""
    ends = await deployment.create(num_channels=1)
    doubting, other = (redis_door(link, ends.router, 9) for link in deployment.links[:2])
    await other.intake.accept(make_record("theirs"), [make_item(0, request_id="theirs")])
    registry = doubting.registry
    assert isinstance(registry, RedisRegistry)
    for name in ("theirs", "ours"):
        registration = registry.registration_of(make_record(name))
        with pytest.raises(StoreUnavailableError), registry.doubting(registration):
            raise StoreUnavailableError("no reply")
        if name == "ours":  # the call took effect all the same
            await deployment.client.hset(deployment.key(REQUEST, name), "token", registration.token)
        await registry.withdraw(name)
    assert await other.registry.lookup("theirs", "d") and await other.work.depths() == [1]
    assert not await deployment.client.exists(deployment.key(REQUEST, "ours"))
    await registry.withdraw("theirs")
    assert await other.work.depths() == [0], "the doubt has ended"
