"""When a failed gRPC call is tried again, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from common import grpc_patience
from common.errors import DrainingError, InvalidRequestError, KevError, QueueFullError, ServiceUnavailableError
from common.grpc_patience import Patience, RetryBudget

AWAY = ServiceUnavailableError("nobody there")
DRAINS = DrainingError("shutting down")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of no length, but with their place in the order of things."""
    monkeypatch.setattr(grpc_patience, "_MAX_BACKOFF_S", 0.0)
    monkeypatch.setattr(grpc_patience, "_LOOK_EVERY_S", 0.0)


def answers(*told: bool) -> Callable[[], bool]:
    """These, one after the other, and the last one from then on."""
    left: Iterator[bool] = iter(told)
    return lambda: next(left, told[-1])


async def num_tries(patience: Patience, error: KevError, most: int) -> int:
    """How often a call that always fails like this is tried again."""
    for number in range(most):
        try:
            await patience.pause_after(error)
        except type(error):
            return number
    return most


async def test_errors_of_a_server_that_is_there_spend_the_budget() -> None:
    """Retries become the load of a server that is in trouble."""
    budget = RetryBudget()
    assert await num_tries(Patience(60, budget, lambda: True), AWAY, 1_000) == 100
    assert await num_tries(Patience(60, budget, lambda: True), AWAY, 1_000) == 0
    for _ in range(15):
        budget.earn()
    assert await num_tries(Patience(60, budget, lambda: True), AWAY, 1_000) == 1


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_server_that_goes_costs_no_retries(is_connected: bool) -> None:
    """The restart of the only server is an error for its callers, because there are many of them."""
    budget = RetryBudget()
    while budget.spend():
        pass
    error = DRAINS if is_connected else AWAY
    for _ in range(200):
        connected = answers(True) if is_connected else answers(False, False, False, True)
        assert await num_tries(Patience(60, budget, connected), error, 1) == 1


async def test_nothing_is_tried_before_somebody_is_there() -> None:
    """Callers call into the void, or all of them raise while the server starts."""
    looks: list[bool] = []

    def is_connected() -> bool:
        looks.append(len(looks) > 20)
        return looks[-1]

    await Patience(60, RetryBudget(), is_connected).pause_after(AWAY)
    assert looks[-1]


async def test_patience_ends() -> None:
    """A wrong address is waited for without end; or the call outlives its own deadline."""
    patience = Patience(0.02, RetryBudget(), lambda: False)
    with pytest.raises(ServiceUnavailableError, match="nobody there"):
        await patience.pause_after(AWAY)
    with pytest.raises(ServiceUnavailableError, match="nobody there"):
        await Patience(60, RetryBudget(), lambda: False).pause_after(AWAY, asyncio.get_running_loop().time() + 0.02)
    draining = Patience(0.02, RetryBudget(), lambda: True)
    assert await num_tries(draining, DRAINS, 10**9) < 10**9


async def test_a_try_that_lasted_begins_a_new_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long wait survives the first of several restarts and not the second."""
    monkeypatch.setattr(grpc_patience, "_HAD_S", 0.01)
    patience = Patience(0.02, RetryBudget(), lambda: True)
    for _ in range(3):
        await patience.pause_after(DRAINS)
        await asyncio.sleep(0.03)  # the try, longer than patience and than what counts as lasting


@pytest.mark.parametrize(
    "error", [InvalidRequestError.of("queries", "is empty"), QueueFullError("full", retry_after_s=1.0)]
)
async def test_what_a_server_has_decided_is_not_tried_again(error: KevError) -> None:
    """A refusal is asked for again and again, behind the caller's back."""
    assert await num_tries(Patience(60, RetryBudget(), lambda: False), error, 5) == 0
