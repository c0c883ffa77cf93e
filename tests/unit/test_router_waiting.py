"""Back-pressure with a limit and a deadline, what the breaker learns of outcomes, and the router's heat."""

from __future__ import annotations

import asyncio
import logging

import pytest

from common.ending import Ending
from common.errors import InvalidRequestError, QueueFullError
from common.types import BreakerState, Diversion, ErrorInfo, FinishReason, HeatUnit, OverflowPolicy, Strategy
from tests.unit.test_router_service import Board, House, spec_of, turns

SOON_S = 0.02


async def full_house(**changes: object) -> House:
    """Both places of the pool are taken."""
    house = House(**changes)
    await house.router.submit(spec_of("held", 2, timeout_ms=600_000))
    return house


@pytest.mark.parametrize("limit", ["max_wait_ms", "timeout_ms"])
async def test_a_call_that_waits_in_vain_is_refused_and_nothing_of_it_ran(limit: str) -> None:
    """A caller would be held for ever, or be told of time-outs of questions that never had a chance."""
    house = await full_house(max_wait_ms=20 if limit == "max_wait_ms" else 0)
    spec = spec_of("late", 3, timeout_ms=20 if limit == "timeout_ms" else 60_000)
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec))
        await turns()
        assert not task.done() and house.router.stats().num_overflow == 3
        house.clock.advance(SOON_S)
        with pytest.raises(
            QueueFullError, match=r"no room for any of 3 questions in 0\.02 s.*nothing was run"
        ) as caught:
            await task
        assert 0 < caught.value.retry_after_s <= 60
        assert (house.registry.withdrawn, house.router.stats().num_overflow) == (["late"], 0)
        assert (house.loads, house.router.stats().num_rejected) == ([1, 1], 1)
        house.end("held", 0)
        assert await house.router.submit(spec_of("late")) == "late", "its id is free, and a place is found for it"


async def test_time_outs_told_first_are_no_answer_either() -> None:
    """Whether the caller is refused or told of time-outs would depend on who looks at the clock first."""
    house = await full_house()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("late", 2, timeout_ms=20)))
        await turns()
        house.clock.advance(SOON_S)
        for index in (0, 1):
            house.end("late", index, FinishReason.TIMEOUT_QUEUED)
        with pytest.raises(QueueFullError, match="nothing was run"):
            await task


async def test_what_has_begun_is_not_thrown_away() -> None:
    """A large request would lose the answers it has because its last question waits too long."""
    house = await full_house(max_wait_ms=20)
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("large", 3, timeout_ms=60_000)))
        await turns()
        house.end("held", 0)
        await turns()
        assert house.work.keys[-1] == ("large", 0)
        house.clock.advance(5.0)
        await asyncio.sleep(SOON_S * 2)
        assert not task.done() and house.registry.withdrawn == []
        house.end("large", 0)
        house.end("held", 1)
        assert await task == "large"
        assert house.work.keys[2:] == [("large", index) for index in range(3)]


async def test_a_cancelled_question_is_no_reason_for_a_refusal() -> None:
    """A caller would be told to try again what somebody has cancelled."""
    house = await full_house()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("late")))
        await turns()
        house.end("late", 0, FinishReason.CANCELLED)
        assert await task == "late"


async def test_callers_of_one_request_are_refused_together() -> None:
    """The second caller would wait for a request that the first one has taken along."""
    house = await full_house(max_wait_ms=20)
    async with house.running():
        tasks = [asyncio.create_task(house.router.submit(spec_of("late", timeout_ms=60_000))) for _ in range(2)]
        await turns()
        house.clock.advance(SOON_S)
        for task in tasks:
            with pytest.raises(QueueFullError):
                await task
        assert house.registry.withdrawn == ["late"]


async def test_as_many_wait_as_may() -> None:
    """Callers that wait would fill the memory: with policy wait nothing else bounds them."""
    house = await full_house(max_waiting_queries=3)
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("waits", 3, timeout_ms=60_000)))
        await turns()
        with pytest.raises(QueueFullError, match="no room for 1 of 1 questions"):
            await house.router.submit(spec_of("one too many"))
        task.cancel()
        await turns()
        assert house.router.stats().num_overflow == 0
    empty = House(max_waiting_queries=3)
    with pytest.raises(InvalidRequestError, match="raise router\\.max_waiting_queries"):
        await empty.router.submit(spec_of("never fits", 6))


async def test_waiting_bytes_are_bounded() -> None:
    """A few callers with very long questions would fill the memory."""
    house = await full_house(overflow_queue_bytes=60, overflow_policy=OverflowPolicy.QUEUE, max_context=1000)
    await house.router.submit(spec_of("long", texts=["x" * 100]))
    with pytest.raises(QueueFullError):
        await house.router.submit(spec_of("short"))


async def test_retry_after_is_the_measured_pace() -> None:
    """A refused client would come back far too early or too late."""
    house = House(overflow_policy=OverflowPolicy.REJECT, channel_queue_size=4)
    await house.router.submit(spec_of("a", 8))
    for index in range(6):
        house.clock.advance(3.0)
        house.end("a", index)
    await house.router.submit(spec_of("b", 6))
    with pytest.raises(QueueFullError, match=r"in about [67]") as caught:
        await house.router.submit(spec_of("c", 2))
    assert 6.0 <= caught.value.retry_after_s <= 9.0, "two places, and up to one more drawn"
    assert house.router.stats().releases_per_s == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("reason", "opens"),
    [
        (FinishReason.ERROR, True),
        (FinishReason.TIMEOUT_RUNNING, True),
        (FinishReason.TIMEOUT_QUEUED, True),
        (FinishReason.STOP, False),
        (FinishReason.LENGTH, False),
        (FinishReason.CANCELLED, False),
    ],
)
async def test_the_breaker_hears_how_questions_ended(reason: FinishReason, opens: bool) -> None:
    """A channel on which everything fails would go on getting questions, or be avoided for clients who left."""
    house = House(channel_queue_size=8, breaker_queue_length=8, breaker_min_outcomes=3)
    for number in range(3):
        await house.router.submit(spec_of(f"r{number}", texts=["the same"], strategy=Strategy.SEMANTIC_HASH))
        house.end(f"r{number}", 0, reason)
    await house.router.submit(spec_of("last", texts=["the same"], strategy=Strategy.SEMANTIC_HASH))
    (question,) = house.registry.records["last"].questions
    assert question.route.diverted_why is (Diversion.FAILURES if opens else None)
    states = {channel.breaker for channel in house.router.channels()}
    assert states == ({BreakerState.OPEN, BreakerState.CLOSED} if opens else {BreakerState.CLOSED})


@pytest.mark.parametrize("over_the_store", [True, False])
@pytest.mark.parametrize("reason", ["OUT_OF_MEMORY", "ENGINE_DEAD", "INTERNAL_BUG"])
async def test_the_breaker_hears_what_failed_in_other_processes_too(reason: str, over_the_store: bool) -> None:
    """In several processes a node without memory would get its share until questions run out of time."""
    board = Board() if over_the_store else None
    house = House(board, channel_queue_size=8, breaker_queue_length=8, breaker_min_outcomes=3)
    async with house.running():
        for number in range(3):
            await house.router.submit(spec_of(f"r{number}", texts=["the same"], strategy=Strategy.SEMANTIC_HASH))
        home = next(channel.channel_id for channel in house.router.channels() if channel.num_queued)
        for number in range(3):
            if board is None:
                house.end(f"r{number}", 0, FinishReason.ERROR, ErrorInfo(reason=reason, message="what happened"))
            else:
                board.endings[f"r{number}", 0] = Ending(FinishReason.ERROR, reason)
                board.done.add((f"r{number}", 0))
        async with asyncio.timeout(10):
            while house.loads[home]:
                await asyncio.sleep(0.01)
        channel = house.router.channels()[home]
        assert (channel.breaker, channel.breaker_why) == (BreakerState.OPEN, Diversion.FAILURES)
        assert (channel.num_recent_failures, channel.main_failure) == (3, reason)


@pytest.mark.parametrize(
    ("ending", "num_failed"),
    [
        (Ending(), 0),
        (Ending(FinishReason.STOP), 0),
        (Ending(FinishReason.CANCELLED), 0),
        (Ending(FinishReason.TIMEOUT_RUNNING), 1),
    ],
)
async def test_what_the_store_knows_of_an_ending_decides(ending: Ending, num_failed: int) -> None:
    """An older node's answers, or those that clients cancelled, would count as failures of their channel."""
    board = Board()
    house = House(board)
    async with house.running():
        await house.router.submit(spec_of("r"))
        board.endings["r", 0] = ending
        board.done.add(("r", 0))
        async with asyncio.timeout(10):
            while any(house.loads):
                await asyncio.sleep(0.01)
        assert sum(channel.num_recent_failures for channel in house.router.channels()) == num_failed


async def test_a_hot_spot_is_told_in_the_stats_and_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """An operator would have to find the hot bucket by hand, in thousands of outputs."""
    house = House(channel_pool_size=8, channel_queue_size=8, hot_spot_min_questions=10, hot_spot_window_ms=60_000)
    caplog.set_level(logging.INFO, "router_svc.heat")
    for number in range(15):
        text = "how do I get a refund" if number % 2 else f"something else {number} entirely {number * 7}"
        await house.router.submit(spec_of(f"r{number}", texts=[text], strategy=Strategy.SEMANTIC_HASH))
        house.end(f"r{number}")
    stats = house.router.stats()
    [spot] = [spot for spot in stats.hot_spots if spot.strategy is Strategy.SEMANTIC_HASH and spot.num_questions >= 7]
    assert spot.share >= 7 / 15 and "consistent_hash" in spot.remedy
    assert stats.num_recent == sum(heat.num_questions for heat in stats.bucket_heat) == 15
    assert stats.bucket_heat[0].hash_bucket == spot.hash_bucket
    begun = [record for record in caplog.records if f"hash bucket {spot.hash_bucket}" in record.message]
    assert [record.levelno for record in begun] == [logging.WARNING]
    house.clock.advance(100.0)
    assert house.router.stats().hot_spots == ()
    assert "hot spot ended" in caplog.records[-1].message
    assert len(caplog.records) == 2 * len({r.message.partition(" has ")[0] for r in caplog.records if r.levelno > 20})


async def test_tokens_of_the_latest_questions_are_told() -> None:
    """Long questions would keep a channel busy that seems to have its share."""
    house = House(channel_pool_size=8, channel_queue_size=8, hot_spot_min_questions=10, max_context=2_000)
    for number in range(12):
        is_long = number >= 10
        text = "write a poem about refunds " + "x" * 900 if is_long else f"{number} {'abcdefghijkl'[number] * 9}"
        await house.router.submit(spec_of(f"r{number}", texts=[text], strategy=Strategy.SEMANTIC_HASH))
        house.end(f"r{number}")
    stats, channels = house.router.stats(), house.router.channels()
    told = sum(len(item.prompt.ids) + item.sampling.max_tokens for item in house.work.items)
    assert stats.num_recent_tokens == told == sum(channel.num_recent_tokens for channel in channels)
    [spot] = [spot for spot in stats.hot_spots if spot.hot_by is HeatUnit.TOKENS]
    assert spot.token_share > 0.9 and spot.share < 0.25 and "length_aware" in spot.remedy
    assert stats.hot_spots[0] is spot and stats.bucket_heat[0].hash_bucket == spot.hash_bucket


async def test_a_priority_is_a_head_start_in_the_overflow_queue() -> None:
    """An urgent question would wait behind a batch, or a batch for ever behind urgent ones."""
    house = await full_house(overflow_policy=OverflowPolicy.QUEUE, overflow_queue_size=9, priority_step_ms=100)
    async with house.running():
        for name, priority, pause_s in (("batch", 0, 0.0), ("urgent", 5, 0.4), ("late", 5, 0.2), ("last", -9, 0.0)):
            house.clock.advance(pause_s)
            await house.router.submit(spec_of(name, priority=priority, timeout_ms=600_000))
        order = []
        for key in (("held", 0), ("held", 1), ("urgent", 0), ("batch", 0)):
            house.end(*key)
            await turns()
            order.append(house.work.keys[-1][0])
        assert order == ["urgent", "batch", "late", "last"]


async def test_a_cancelled_probe_says_nothing_of_its_channel() -> None:
    """A channel on which everything fails would be taken back because a client left."""
    house = House(channel_queue_size=8, breaker_queue_length=8, breaker_min_outcomes=2, breaker_cooldown_ms=0)
    for number, reason in enumerate([FinishReason.ERROR] * 2 + [FinishReason.CANCELLED]):
        await house.router.submit(spec_of(f"r{number}", texts=["the same"], strategy=Strategy.SEMANTIC_HASH))
        house.end(f"r{number}", 0, reason)
        house.clock.advance(1.0)
    assert {channel.breaker for channel in house.router.channels()} == {BreakerState.HALF_OPEN, BreakerState.CLOSED}
    await house.router.submit(spec_of("probe", texts=["the same"], strategy=Strategy.SEMANTIC_HASH))
    house.end("probe", 0, FinishReason.STOP)
    assert {channel.breaker for channel in house.router.channels()} == {BreakerState.CLOSED}


async def test_a_hot_bucket_is_told_with_the_channel_it_belongs_to() -> None:
    """The channel that the breaker happened to choose would be taken for the hot one."""
    house = House(channel_pool_size=8, channel_queue_size=8, hot_spot_min_questions=2)
    await house.router.submit(spec_of("hot", texts=["the same"] * 8, strategy=Strategy.SEMANTIC_HASH))
    routes = [question.route for question in house.registry.records["hot"].questions]
    assert routes[-1].diverted_from == routes[0].channel_id
    [spot] = house.router.stats().hot_spots
    assert (spot.channel_id, spot.num_questions) == (routes[0].channel_id, 8)
