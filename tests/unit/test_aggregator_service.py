"""The aggregator's service over the memory transport: registering, waiting, streaming, deadlines, cancelling."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from common.clock import ManualClock, SystemClock
from common.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    QueueFullError,
    RequestConflictError,
    RequestNotFoundError,
    StoreUnavailableError,
)
from common.memory import MemoryTransport
from common.ports import Report, ReportState
from common.types import (
    ChannelEvent,
    ChannelResult,
    RequestState,
    StreamEvent,
)
from tests.unit.aggregator_builders import (
    channel_of,
    delta,
    outcome,
    question,
    read_text,
    request,
    shape,
    started,
)
from tests.unit.aggregator_world import World, settle


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with world.running():
        yield world


# ---- the whole way


async def test_questions_are_answered_in_question_order(world: World) -> None:
    """The way from node to caller would be broken."""
    await world.submit(3)
    waiting = asyncio.create_task(world.service.wait("r", None))
    leases = await world.lease()
    for index in (2, 0, 1):
        assert await world.say(leases[index], started(index), delta("an", question_index=index)) is ReportState.HELD
        await world.say(leases[index], outcome(f"answer {index}", index))
    view = await asyncio.wait_for(waiting, 5)
    assert [result.text for result in view.results] == ["answer 0", "answer 1", "answer 2"]
    assert (view.state, view.done) == (RequestState.COMPLETE, True)
    assert await world.service.poll("r") == view
    assert [o.question_index for o in world.outcomes] == [2, 0, 1]


async def test_poll_shows_what_there_is(world: World) -> None:
    """A caller could not fetch early answers while others run."""
    await world.submit(2)
    await world.report(outcome("b", 1))
    view = await world.service.poll("r")
    assert (view.state, [r.question_index for r in view.results]) == (RequestState.PENDING, [1])


# ---- register, lookup, withdraw


async def test_the_same_request_joins(world: World) -> None:
    """A repeated submit would run twice, or another caller's id be taken over."""
    assert not await world.service.lookup("r", "digest")
    assert await world.service.register(request())
    assert not await world.service.register(request())
    assert await world.service.lookup("r", "digest")
    with pytest.raises(RequestConflictError):
        await world.service.register(request(content_digest="other"))
    with pytest.raises(RequestConflictError):
        await world.service.lookup("r", "other")


async def test_draining_accepts_nothing_new(world: World) -> None:
    """A request would be accepted by a process that is about to end, or a running one cut off."""
    await world.submit()
    world.service.begin_drain()
    with pytest.raises(DrainingError):
        await world.service.register(request(request_id="new"))
    assert not await world.service.register(request())
    await world.report(outcome())
    assert (await world.service.wait("r", 1)).state is RequestState.COMPLETE


async def test_a_full_store_refuses() -> None:
    """Running requests would be dropped, or memory grow without bound."""
    world = World(max_requests=1)
    async with world.running():
        await world.submit()
        with pytest.raises(QueueFullError):
            await world.service.register(request(request_id="new"))
        await world.report(outcome())
        assert await world.service.register(request(request_id="new"))
        with pytest.raises(RequestNotFoundError):
            await world.service.poll("r")


async def test_a_withdrawn_request_leaves_nothing(world: World) -> None:
    """A failed submission would hold its channels, or its retry be answered with the failure."""
    await world.submit(2)
    waiting = asyncio.create_task(world.service.wait("r", None))
    await settle()
    await world.service.withdraw("r")
    await world.service.withdraw("r")
    assert sum(await world.transport.depths()) == 0
    assert [(o.question_index, o.finish_reason) for o in world.outcomes] == [(0, "cancelled"), (1, "cancelled")]
    assert (await asyncio.wait_for(waiting, 5)).state is RequestState.FAILED
    assert not await world.service.lookup("r", "other digest")
    with pytest.raises(RequestNotFoundError):
        await world.service.poll("r")
    await world.submit(2)
    assert (await world.service.poll("r")).state is RequestState.PENDING


async def test_results_expire() -> None:
    """Results would be kept for ever, or the refusal not say why they are gone."""
    world = World(result_ttl_s=60)
    async with world.running():
        await world.submit()
        await world.report(outcome())
        world.clock.advance(59)
        assert (await world.service.poll("r")).done
        world.clock.advance(1)
        for call in (world.service.poll, lambda r: world.service.wait(r, 1), world.service.cancel):
            with pytest.raises(RequestNotFoundError, match=r"'r'.*60 s"):
                await call("r")
        with pytest.raises(RequestNotFoundError):
            world.service.stream("r")
        assert await world.service.register(request(content_digest="other"))


# ---- wait


async def test_a_wait_that_ends_first_says_how_far_it_got(world: World) -> None:
    """A caller would think the request is over, or not know that waiting longer helps."""
    await world.submit(3)
    await world.report(outcome(question_index=1))
    with pytest.raises(DeadlineExceededError, match=r"1 of 3 questions.*'r'.*goes on"):
        await world.service.wait("r", 0)
    assert (await world.service.poll("r")).state is RequestState.PENDING
    await world.report(outcome(), outcome(question_index=2))
    assert (await world.service.wait("r", 0)).state is RequestState.COMPLETE


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
async def test_a_senseless_wait_is_refused(world: World, timeout_s: float) -> None:
    """A wait would end at once or never, without a word."""
    await world.submit()
    with pytest.raises(InvalidRequestError, match="timeout"):
        await world.service.wait("r", timeout_s)


async def test_any_number_may_wait_and_leave(world: World) -> None:
    """One caller that gives up would take the others with it."""
    await world.submit()
    waiting = [asyncio.create_task(world.service.wait("r", None)) for _ in range(3)]
    await settle()
    waiting[0].cancel()
    await world.report(outcome())
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert ends[1] == ends[2] == await world.service.poll("r")


# ---- deadlines


async def test_a_timeout_becomes_a_placeholder_and_ends_the_work(world: World) -> None:
    """A caller would wait for ever, or the node go on computing for nobody."""
    await world.submit([question(0, timeout_ms=500), question(1, timeout_ms=500), question(2)])
    leases = await world.lease()
    await world.say(leases[1], started(1), delta("part", question_index=1))
    await world.pass_s(0.5)
    view = await world.service.poll("r")
    assert [(r.finish_reason, r.text) for r in view.results] == [("timeout_queued", ""), ("timeout_running", "part")]
    await settle()
    assert sorted(await world.transport.cancellations(0)) == [("r", 0), ("r", 1)]
    assert await world.transport.renew([leases[2]]) == [True]
    await world.say(leases[2], outcome("fine", 2))
    view = await world.service.wait("r", 1)
    assert (view.state, view.results[2].text) == (RequestState.PARTIAL, "fine")
    assert len(world.outcomes) == 3


async def test_the_loop_keeps_deadlines_on_its_own() -> None:
    """A timeout would only be noticed when somebody asks."""
    world = World(clock=SystemClock())
    async with world.running():
        await world.submit([question(0, timeout_ms=60_000)])
        await settle()
        await world.submit([question(0, timeout_ms=20)], request_id="short")
        view = await world.service.wait("short", 5)
        assert [r.finish_reason for r in view.results] == ["timeout_queued"]
        await settle()
        assert (await world.transport.depths())[channel_of(0)] == 1


async def test_an_idle_service_does_not_poll() -> None:
    """An idle process would use the processor."""

    class CountingClock(ManualClock):
        num_reads = 0

        def monotonic(self) -> float:
            self.num_reads += 1
            return super().monotonic()

    clock = CountingClock()
    world = World(clock=clock)
    async with world.running():
        await world.submit()
        await settle()
        num_reads = clock.num_reads
        await settle()
        assert clock.num_reads == num_reads


async def test_an_answer_after_its_timeout_changes_nothing(world: World) -> None:
    """A result that the caller has seen would change afterwards."""
    await world.submit([question(0, timeout_ms=500)])
    await world.pass_s(1)
    view = await world.service.poll("r")
    assert view.done
    await world.report(outcome())
    assert await world.service.poll("r") == view
    assert (world.service.counters.num_late, world.service.counters.num_outcomes, len(world.outcomes)) == (1, 1, 1)


# ---- stream


async def collect(stream: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in stream]


async def test_readers_each_get_everything(world: World) -> None:
    """A second reader, or one that comes late or again, would miss events."""
    await world.submit(2)
    early = asyncio.create_task(collect(world.service.stream("r")))
    await world.report(started(0), delta("a"), started(1), outcome("b", 1))
    middle = asyncio.create_task(collect(world.service.stream("r", 2)))
    await world.report(outcome("ab", 0))
    events = await asyncio.wait_for(early, 5)
    assert shape(events)[0] == ("started", "") and shape(events)[-1] == ("done", "")
    assert read_text(events) == {0: "ab", 1: "b"}
    assert events[-1].state is RequestState.COMPLETE
    assert await asyncio.wait_for(middle, 5) == events[2:]
    assert await collect(world.service.stream("r")) == events
    assert await collect(world.service.stream("r", len(events))) == []
    assert await collect(world.service.stream("r", len(events) + 5)) == []


async def test_a_stream_from_the_future_begins_there(world: World) -> None:
    """A reader that resumes would get an event twice."""
    await world.submit()
    reader = asyncio.create_task(collect(world.service.stream("r", 2)))
    await world.report(started(), delta("a"), delta("b", 1), outcome("ab"))
    assert shape(await asyncio.wait_for(reader, 5)) == [("delta", "b"), ("result", ""), ("done", "")]


async def test_a_slow_reader_holds_up_nobody(world: World) -> None:
    """One stalled connection would stop the others."""
    await world.submit()
    slow = world.service.stream("r")
    await world.report(started())
    assert (await anext(slow)).event_index == 0
    await world.report(*(delta("x", seq) for seq in range(500)))
    await world.report(outcome("x" * 500))
    assert len(await asyncio.wait_for(collect(world.service.stream("r")), 5)) == 503
    assert read_text(await collect(slow)) == {0: "x" * 500}


async def test_a_reader_that_leaves_leaves_nothing(world: World) -> None:
    """Every broken connection would leave a task or a waiter behind."""
    await world.submit()
    tasks = len(asyncio.all_tasks())
    for _ in range(50):
        stream = world.service.stream("r")
        reader = asyncio.create_task(collect(stream))
        await settle()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await stream.aclose()
    unread = world.service.stream("r")
    await unread.aclose()
    gc.collect()
    assert len(asyncio.all_tasks()) == tasks
    stored = world.service._store.find("r")
    assert stored is not None and not stored.progressed._event._waiters  # type: ignore[attr-defined]
    await world.report(outcome())
    assert shape(await collect(world.service.stream("r")))[-1] == ("done", "")


async def test_a_stream_is_refused_at_once(world: World) -> None:
    """The refusal would come after the response has begun."""
    with pytest.raises(RequestNotFoundError):
        world.service.stream("unknown")
    await world.submit()
    with pytest.raises(InvalidRequestError, match="from_event_index"):
        world.service.stream("r", -1)


async def test_a_stream_outlives_the_expiry_of_its_request() -> None:
    """A slow reader would be cut off when the results expire."""
    world = World(result_ttl_s=1)
    async with world.running():
        await world.submit()
        stream = world.service.stream("r")
        await world.report(started(), outcome("a"))
        await anext(stream)
        world.clock.advance(5)
        with pytest.raises(RequestNotFoundError):
            await world.service.poll("r")
        assert [kind for kind, _ in shape(await collect(stream))] == ["delta", "result", "done"]


# ---- cancel


async def test_cancelling_withdraws_what_is_open(world: World) -> None:
    """Questions would run on after a cancel, or finished ones be lost."""
    await world.submit(3)
    leases = await world.lease()
    await world.say(leases[1], outcome("b", 1))
    assert await world.service.cancel("r") == 2
    assert sorted(await world.transport.cancellations(0)) == [("r", 0), ("r", 2)]
    assert sum(await world.transport.depths()) == 0
    view = await world.service.wait("r", 1)
    assert [r.finish_reason for r in view.results] == ["cancelled", "stop", "cancelled"]
    assert view.state is RequestState.PARTIAL
    assert await world.service.cancel("r") == 0
    assert len(world.outcomes) == 3
    with pytest.raises(RequestNotFoundError, match="'unknown'"):
        await world.service.cancel("unknown")


async def test_an_answer_that_came_first_is_not_cancelled(world: World) -> None:
    """A caller would be told that an answer was withdrawn, and another one be given the answer."""
    await world.submit(2)
    leases = await world.lease()
    answered = Report(lease=leases[0], events=(outcome("just in time"),))
    await world.transport.report([answered])
    assert await world.service.cancel("r") == 1
    view = await world.service.poll("r")
    assert [(r.finish_reason, r.text) for r in view.results] == [("stop", "just in time"), ("cancelled", "")]
    assert world.service.counters.num_late == 0


async def test_an_answer_that_comes_second_is_refused(world: World) -> None:
    """The node would think that its answer counted."""
    await world.submit()
    leases = await world.lease()
    assert await world.service.cancel("r") == 1
    assert await world.say(leases[0], outcome()) is ReportState.ALREADY_COMMITTED
    assert [r.finish_reason for r in (await world.service.poll("r")).results] == ["cancelled"]


class FailingResults(MemoryTransport):
    """A result stream that cannot settle anything while it is away."""

    away = True

    async def settle(self, outcomes: Sequence[ChannelResult]) -> list[int]:
        if self.away:
            raise StoreUnavailableError("away")
        return await super().settle(outcomes)


async def test_a_store_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """A cancellation would be told that nobody can keep, or a timeout be forgotten."""
    world = World(transport=FailingResults)
    assert isinstance(world.transport, FailingResults)
    async with world.running():
        await world.submit([question(0, timeout_ms=500)])
        with pytest.raises(StoreUnavailableError):
            await world.service.cancel("r")
        await world.pass_s(0.5)
        assert not (await world.service.poll("r")).done
        assert "could not settle" in caplog.text
        world.transport.away = False
        await world.pass_s(5)
        assert [r.finish_reason for r in (await world.service.poll("r")).results] == ["timeout_queued"]


# ---- robustness


async def test_events_of_unknown_requests_are_counted(world: World) -> None:
    """Events of an expired request would be held against another, or stop the loop."""
    await world.submit()
    await world.report(started(request_id="gone"), outcome(request_id="gone"))
    assert world.service.counters.num_unknown == 2
    await world.report(outcome())
    assert (await world.service.poll("r")).done


@dataclass(frozen=True)
class Stranger:
    request_id: str = "r"


@pytest.mark.parametrize(
    "bad",
    [None, 42, Stranger(), outcome(question_index=9), outcome(queued_ms=float("nan")), delta("x", attempt=0)],
    ids=["none", "number", "stranger", "no such question", "not a number", "attempt 0"],
)
async def test_a_malformed_event_does_not_stop_the_loop(
    world: World, bad: object, caplog: pytest.LogCaptureFixture
) -> None:
    """One broken node would stop the answers of all."""
    await world.submit()
    await world.report(cast(ChannelEvent, bad), outcome("good"))
    assert [r.text for r in (await world.service.wait("r", 1)).results] == ["good"]
    assert world.service.counters.num_malformed == 1
    assert "malformed" in caplog.text


async def test_a_raising_listener_does_not_stop_the_others(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A channel would stay occupied because another listener failed."""

    def fail(result: ChannelResult) -> None:
        raise RuntimeError("listener")

    after: list[ChannelResult] = []
    world.service.add_listener(fail)
    world.service.add_listener(after.append)
    await world.submit(2)
    await world.report(outcome(), outcome("again"))
    await world.service.cancel("r")
    assert [(o.question_index, o.finish_reason) for o in after] == [(0, "stop"), (1, "cancelled")]
    assert world.outcomes == after
    assert "listener" in caplog.text


async def test_listeners_hear_before_waiters() -> None:
    """A caller that submits again at once would find its channel still occupied."""
    world = World()
    order: list[str] = []
    world.service.add_listener(lambda result: order.append("listener"))
    async with world.running():
        await world.submit()

        async def wait() -> None:
            await world.service.wait("r", None)
            order.append("waiter")

        waiting = asyncio.create_task(wait())
        await settle()
        await world.report(outcome())
        await asyncio.wait_for(waiting, 5)
    assert order == ["listener", "waiter"]


async def test_the_end_of_the_loops_ends_every_request() -> None:
    """Callers would wait for ever on a service that has shut down."""
    world = World()
    async with world.running():
        await world.submit(2)
        await world.report(outcome())
        waiting = asyncio.create_task(world.service.wait("r", None))
        reader = asyncio.create_task(collect(world.service.stream("r")))
        await settle()
    view = await asyncio.wait_for(waiting, 5)
    assert [r.finish_reason for r in view.results] == ["stop", "cancelled"]
    assert view.results[1].error is not None and view.results[1].error.reason == "NODE_DRAINING"
    assert shape(await asyncio.wait_for(reader, 5))[-1] == ("done", "")
    with pytest.raises(DrainingError):
        await world.service.register(request(request_id="new"))


async def test_a_backlog_does_not_block_the_event_loop(world: World) -> None:
    """Health checks would wait behind a burst of answers."""
    await world.submit()
    ticks: list[int] = []

    async def tick() -> None:
        while not ticks or ticks[-1] < 2_000:
            ticks.append(world.service.counters.num_unknown)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await world.report(*(outcome(request_id="gone") for _ in range(2_000)))
    await asyncio.wait_for(ticking, 5)
    assert len({count for count in ticks if 0 < count < 2_000}) > 3
