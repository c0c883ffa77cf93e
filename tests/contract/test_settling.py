"""One outcome per question, whoever comes first: nodes that commit and aggregators that settle compete for one place.

On every transport; what only Redis promises, because it outlives an aggregator, stands in ``test_redis_source``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from common.ports import ReportState, Withdrawn
from common.types import ChannelEvent, ChannelResult, FinishReason
from tests.contract.redis_harness import RedisHarness
from tests.contract.redis_servers import BINARIES, running_server
from tests.contract.test_memory_transport import MemoryHarness
from tests.contract.transport_suite import Ends, TransportHarness, keys, make_item, outcome, started
from tests.work_calls import commit, emit, publish, renew

NUM_CHANNELS = 8


@pytest.fixture(
    scope="module", params=["memory", *(pytest.param(name, marks=pytest.mark.store) for name in sorted(BINARIES))]
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the transport's server is; empty for the one that needs none."""
    if request.param == "memory":
        yield ""
        return
    with running_server(request.param, tmp_path_factory.mktemp("settling")) as server_url:
        yield server_url


@pytest.fixture
async def harness(url: str) -> AsyncIterator[TransportHarness]:
    harness = RedisHarness(url) if url else MemoryHarness()
    yield harness
    await harness.close()


@pytest.fixture
async def ends(harness: TransportHarness) -> Ends:
    return await harness.create(num_channels=NUM_CHANNELS)


def placeholder(
    question_index: int = 0, reason: FinishReason = FinishReason.TIMEOUT_QUEUED, request_id: str = "r"
) -> ChannelResult:
    """An outcome that an aggregator gives."""
    return ChannelResult(
        request_id=request_id, question_index=question_index, channel_id=question_index, finish_reason=reason, attempt=1
    )


async def read_all(ends: Ends) -> list[ChannelEvent | Withdrawn]:
    events: list[ChannelEvent | Withdrawn] = []
    while some := await ends.results.read(100, 0):
        events += some
    return events


async def test_a_placeholder_ends_the_work(ends: Ends) -> None:
    """A node would go on computing for nobody, and its answer replace what callers were told."""
    await publish(ends.router, make_item(0, 0))
    await publish(ends.router, make_item(1, 1))
    [waiting, running] = [placeholder(0), placeholder(1, FinishReason.TIMEOUT_RUNNING)]
    leases = {lease.item.question_index: lease for lease in await ends.node.lease(2, 0)}
    await emit(ends.node, leases[1], started(leases[1]))
    assert await ends.results.settle([waiting, running]) == [0, 1]
    assert await ends.router.depths() == [0] * NUM_CHANNELS
    assert sorted(await ends.node.cancellations(0)) == [("r", 0), ("r", 1)]
    assert not await renew(ends.node, leases[0])
    assert await commit(ends.node, leases[1], outcome(leases[1])) is ReportState.ALREADY_COMMITTED
    assert await read_all(ends) == [started(leases[1]), waiting, running]


async def test_a_committed_answer_stands(ends: Ends) -> None:
    """A timeout would be told although the answer came first."""
    await publish(ends.router, make_item())
    [lease] = await ends.node.lease(1, 0)
    await commit(ends.node, lease, outcome(lease))
    assert await ends.results.settle([placeholder()]) == []
    assert await read_all(ends) == [outcome(lease)]


async def test_only_what_is_open_is_settled(ends: Ends) -> None:
    """The answered questions of a request would keep the others open, or be taken back with them."""
    for index in range(3):
        await publish(ends.router, make_item(index, index))
    leases = {lease.item.question_index: lease for lease in await ends.node.lease(3, 0)}
    await commit(ends.node, leases[1], outcome(leases[1]))
    settled = [placeholder(index, FinishReason.CANCELLED) for index in range(3)]
    assert await ends.results.settle(settled) == [0, 2]
    assert await read_all(ends) == [outcome(leases[1]), settled[0], settled[2]]


async def test_the_first_placeholder_stands(ends: Ends) -> None:
    """A cancelled request would read as timed out."""
    await publish(ends.router, make_item())
    cancelled, timed_out = placeholder(reason=FinishReason.CANCELLED), placeholder()
    assert await ends.results.settle([cancelled]) == [0]
    assert await ends.results.settle([timed_out]) == []
    assert await read_all(ends) == [cancelled]


async def test_a_question_that_was_never_published_is_settled_too(ends: Ends) -> None:
    """Questions that wait for a channel would never time out."""
    assert await ends.results.settle([placeholder()]) == [0]
    assert await read_all(ends) == [placeholder()]


async def test_other_requests_are_left_alone(ends: Ends) -> None:
    """Cancelling one request would end another one's questions."""
    await publish(ends.router, make_item(0, 0, request_id="mine"))
    await publish(ends.router, make_item(0, 0, request_id="other"))
    await ends.results.settle([placeholder(request_id="mine")])
    assert keys(await ends.node.lease(1, 0)) == [("other", 0)]


async def test_waiting_nodes_and_readers_are_woken(ends: Ends, harness: TransportHarness) -> None:
    """A channel would stay blocked, or a caller wait, until something else happens."""
    await publish(ends.router, make_item())
    await ends.node.lease(1, 0)
    noticing = asyncio.create_task(ends.node.cancellations(30))
    reading = asyncio.create_task(ends.results.read(10, 30))
    await harness.settle()
    await ends.results.settle([placeholder()])
    assert await asyncio.wait_for(noticing, 5) == [("r", 0)]
    assert await asyncio.wait_for(reading, 5) == [placeholder()]


async def test_races_have_one_winner(ends: Ends) -> None:
    """Node and aggregator would both be told that theirs is the outcome, or neither."""
    num_wins = {"node": 0, "aggregator": 0}
    for number in range(40):
        request_id = f"r{number}"
        await publish(ends.router, make_item(request_id=request_id))
        [lease] = await ends.node.lease(1, 0)
        calls = [
            commit(ends.node, lease, outcome(lease)),
            ends.results.settle([placeholder(request_id=request_id)]),
        ]
        if number % 2:
            calls.reverse()
        answers = await asyncio.gather(*calls)
        state, settled = reversed(answers) if number % 2 else answers
        assert (state is ReportState.COMMITTED) != (settled == [0])
        winner = outcome(lease) if state is ReportState.COMMITTED else placeholder(request_id=request_id)
        assert [event for event in await read_all(ends) if isinstance(event, ChannelResult)] == [winner]
        num_wins["node" if state is ReportState.COMMITTED else "aggregator"] += 1
        await ends.node.cancellations(0)
    assert min(num_wins.values()) > 0, num_wins
