"""Budgets of tenants: limits hold, and what is taken comes back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import InvariantError
from router_svc.budgets import InFlight, Lack, TenantBudgets

TENANTS = ["", "acme", "big"]
WEIGHTS = {"big": 2.5, "acme": 0.5}


def budgets(max_questions: int = 0, max_tokens: int = 0) -> TenantBudgets[int]:
    return TenantBudgets(max_questions=max_questions, max_tokens=max_tokens, weights=WEIGHTS)


class Traffic(RuleBasedStateMachine):
    """Requests of several tenants, whose questions end in any order and are reported ended more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets = budgets(max_questions=4, max_tokens=100)
        self.open: dict[int, tuple[str, int]] = {}
        self.last = 0

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.lists(st.integers(1, 60), min_size=1, max_size=6))
    def ask(self, tenant: str, tokens: list[int]) -> None:
        if self.budgets.lack(tenant, len(tokens), sum(tokens)) is not None:
            return
        for num_tokens in tokens:
            self.last += 1
            self.budgets.take(self.last, tenant, num_tokens)
            self.open[self.last] = tenant, num_tokens

    @rule(back=st.integers(0, 8), times=st.integers(1, 3))
    def end(self, back: int, times: int) -> None:
        for _ in range(times):
            self.budgets.give_back(self.last - back)
        self.open.pop(self.last - back, None)

    @invariant()
    def nothing_leaks_and_limits_hold(self) -> None:
        self.budgets.check_integrity()
        for tenant in TENANTS:
            held = [tokens for owner, tokens in self.open.values() if owner == tenant]
            assert self.budgets.in_flight(tenant) == InFlight(len(held), sum(held))
            weight = WEIGHTS.get(tenant, 1)
            assert len(held) <= 4 * weight and sum(held) <= 100 * weight


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 9), max_size=12))
def test_everything_ended_is_nothing_in_flight(tokens: list[int]) -> None:
    """A tenant would be shut out after a while."""
    found = budgets(max_questions=100)
    for key, num_tokens in enumerate(tokens):
        found.take(key, "acme", num_tokens)
    for key in reversed(range(len(tokens))):
        found.give_back(key)
    assert found.in_flight("acme") == InFlight()
    assert not found._in_flight, "nothing is kept of a tenant that asks nothing"


def test_the_first_unit_that_lacks_is_told_with_its_numbers() -> None:
    """A caller could not tell what to send less of."""
    found = budgets(max_questions=4, max_tokens=100)
    found.take(1, "big", 200)
    assert found.lack("big", 9, 1) is None
    assert found.lack("big", 10, 1) == Lack(unit="questions", asked=10, in_flight=1, limit=10)
    assert found.lack("big", 1, 51) == Lack(unit="tokens", asked=51, in_flight=200, limit=250)
    assert found.lack("other", 4, 100) is None, "a tenant's traffic is no other tenant's"


@pytest.mark.parametrize(("asked", "is_final", "num_excess"), [(1, False, 1), (2, False, 2), (3, True, 3)])
def test_what_never_fits_is_told_apart(asked: int, is_final: bool, num_excess: int) -> None:
    """A caller would try for ever, or would not try again although it would help."""
    found = budgets(max_questions=4)
    found.take(1, "acme", 1)
    found.take(2, "acme", 1)
    lack = found.lack("acme", asked, 1)
    assert lack is not None
    assert (lack.limit, lack.is_final, lack.num_excess) == (2, is_final, num_excess)


def test_a_small_weight_leaves_one_question() -> None:
    """A tenant would be configured into nothing, silently."""
    assert TenantBudgets[int](max_questions=1, max_tokens=0, weights={"a": 0.1}).lack("a", 1, 1) is None


def test_without_limits_nothing_is_counted() -> None:
    """Every question would pay for a limit that nobody set."""
    found = budgets()
    found.take(1, "acme", 10)
    found.take(1, "acme", 10)
    assert found.in_flight("acme") == InFlight()
    assert found.lack("acme", 10**9, 10**12) is None


def test_a_question_is_taken_once() -> None:
    """It would be given back once and counted twice."""
    found = budgets(max_questions=4)
    found.take(1, "acme", 10)
    with pytest.raises(InvariantError):
        found.take(1, "acme", 10)
