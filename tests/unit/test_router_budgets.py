"""Budgets of tenants in the router: who is refused, with which words, and that nothing leaks on any way out."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import InvalidRequestError, QueueFullError, StoreUnavailableError
from common.types import FinishReason, OverflowPolicy
from router_svc.budgets import InFlight
from tests.unit.test_router_service import Board, House, spec_of, turns


def roomy(board: Board | None = None, **changes: object) -> House:
    """A pool that never is the bottleneck."""
    return House(board, **{"channel_pool_size": 4, "channel_queue_size": 8, **changes})


def in_flight(house: House, tenant: str) -> InFlight:
    house.router.check_integrity()
    return house.router._budgets.in_flight(tenant)


async def test_a_tenant_at_its_limit_is_told_when_to_come_back() -> None:
    """One tenant could fill the pool, or its client would not know whether trying again helps."""
    house = roomy(max_tenant_questions=3)
    await house.router.submit(spec_of("a", 2, tenant="acme"))
    with pytest.raises(QueueFullError) as caught:
        await house.router.submit(spec_of("b", 2, tenant="acme"))
    assert str(caught.value).startswith(
        "tenant 'acme' has 2 of 3 questions in flight, and this request has 2 more; try"
    )
    first_s = caught.value.retry_after_s
    with pytest.raises(QueueFullError) as caught:
        await house.router.submit(spec_of("b2", 2, tenant="acme"))
    assert 0 < first_s < caught.value.retry_after_s, "who was refused later comes back later"
    await house.router.submit(spec_of("c", 3, tenant="other"))
    assert house.router.stats().num_rejected == 2
    assert "b" not in house.registry.records, "nothing was registered"
    house.end("a", 0)
    await house.router.submit(spec_of("b", 2, tenant="acme"))
    assert in_flight(house, "acme").num_questions == 3


async def test_tokens_count_prompt_and_answer() -> None:
    """A tenant with long answers would have as many questions in flight as one with short ones."""
    house = roomy(max_tenant_tokens=40)
    await house.router.submit(spec_of("a", texts=["x" * 20]))
    assert in_flight(house, "") == InFlight(1, 28)
    with pytest.raises(QueueFullError, match=r"tenant without a name has 28 of 40 tokens .* request has 13 more"):
        await house.router.submit(spec_of("b", texts=["x" * 5]))
    await house.router.submit(spec_of("c", texts=["x" * 4]))
    assert in_flight(house, "") == InFlight(2, 40)


async def test_what_no_idle_tenant_could_ask_is_a_bad_request() -> None:
    """A client would try again for ever."""
    house = roomy(max_tenant_questions=2, max_tenant_tokens=30)
    with pytest.raises(InvalidRequestError, match=r"have 3 questions, but tenant 'acme' may have 2 .*tenant_questions"):
        await house.router.submit(spec_of("a", 3, tenant="acme"))
    with pytest.raises(InvalidRequestError, match=r"have 48 tokens, .* 30 in flight .*tenant_tokens.*lower max_tok"):
        await house.router.submit(spec_of("a", texts=["x" * 40], tenant="acme"))
    assert house.router.stats().num_rejected == 0


async def test_a_weight_multiplies_the_limits() -> None:
    """A tenant that pays for more would get the same."""
    house = roomy(max_tenant_questions=2, tenant_weights=(("big", 2.0),))
    await house.router.submit(spec_of("a", 4, tenant="big"))
    with pytest.raises(QueueFullError, match="4 of 4 questions"):
        await house.router.submit(spec_of("b", 1, tenant="big"))


async def test_joining_what_is_under_way_costs_nothing() -> None:
    """A retry of the same request would be refused by the request itself."""
    house = roomy(max_tenant_questions=2)
    await house.router.submit(spec_of("a", 2, tenant="acme"))
    assert not await house.router.accept(spec_of("a", 2, tenant="acme"))
    assert in_flight(house, "acme").num_questions == 2


@pytest.mark.parametrize("reason", list(FinishReason))
async def test_every_outcome_gives_back_once(reason: FinishReason) -> None:
    """A kind of outcome would eat the budget, or two reports of one would double it."""
    house = roomy(max_tenant_questions=2)
    await house.router.submit(spec_of("a", 2, tenant="acme"))
    for _ in range(3):
        house.end("a", 1, reason)
    assert in_flight(house, "acme").num_questions == 1
    house.end("a", 0, reason)
    assert in_flight(house, "acme") == InFlight()


@pytest.mark.parametrize("policy", list(OverflowPolicy))
async def test_a_refusal_for_want_of_room_takes_nothing(policy: OverflowPolicy) -> None:
    """Each refused request would shrink the budget of its tenant."""
    house = House(max_tenant_questions=50, overflow_policy=policy, overflow_queue_size=1, max_waiting_queries=1)
    await house.router.submit(spec_of("a", 2, tenant="acme"))
    for number in range(3):
        with pytest.raises((QueueFullError, InvalidRequestError)):
            await house.router.submit(spec_of(f"b{number}", 4, tenant="acme"))
    assert in_flight(house, "acme").num_questions == 2


async def test_a_store_that_fails_takes_nothing() -> None:
    """After an outage every tenant would be at its limit."""
    house = roomy(max_tenant_questions=2)
    for number in range(3):
        house.registry.register_errors = [StoreUnavailableError("away")]
        with pytest.raises(StoreUnavailableError):
            await house.router.submit(spec_of(f"r{number}", 2, tenant="acme"))
    assert in_flight(house, "acme") == InFlight()


async def test_a_call_that_is_cancelled_while_it_waits_gives_back() -> None:
    """A client that hangs up would leave its questions in the budget."""
    house = House(max_tenant_questions=4)
    async with house.running():
        await house.router.submit(spec_of("a", 2, tenant="acme"))
        task = asyncio.create_task(house.router.submit(spec_of("b", 2, tenant="acme")))
        await turns()
        assert in_flight(house, "acme").num_questions == 4, "waiting questions are in flight"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert in_flight(house, "acme").num_questions == 2


async def test_a_lost_question_counts_again_while_it_is_open_again() -> None:
    """A question that is published a second time would run outside the budget."""
    board = Board()
    house = roomy(board=board, max_tenant_questions=2)

    async def comes_to(num_questions: int) -> None:
        async with asyncio.timeout(10):
            while in_flight(house, "acme").num_questions != num_questions:
                await asyncio.sleep(0.01)

    async with house.running():
        await house.router.submit(spec_of("a", 2, tenant="acme", timeout_ms=60_000))
        board.done = {("a", 0), ("a", 1)}
        await comes_to(0)
        board.done, board.gone = set(), {("a", 0)}
        house.clock.advance(1.5)
        await comes_to(1)
        house.end("a", 0)
        assert in_flight(house, "acme") == InFlight()
