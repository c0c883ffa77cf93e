"""The breaker of a channel: closed, open, half-open."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InvariantError
from common.types import BreakerState, Diversion
from router_svc.breakers import Breaker, BreakerRules

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
RULES = BreakerRules(max_age_s=10.0, failure_rate=0.5, min_outcomes=4, window_s=60.0, cooldown_s=5.0)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(4):
        breaker.end(now_s, failure="ERROR", probe=None)
    assert (breaker.state, breaker.why) == (OPEN, Diversion.FAILURES)
    return breaker


def half_open() -> Breaker:
    breaker = opened()
    breaker.look(5.0, None)
    assert breaker.state is HALF_OPEN
    return breaker


def test_a_few_failures_open_nothing() -> None:
    """Three time-outs after a start would empty a healthy channel."""
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.end(0.0, failure="ERROR", probe=None)
    assert (breaker.state, breaker.takes, breaker.num_failed) == (CLOSED, True, 3)


def test_the_share_counts_not_the_number() -> None:
    """A busy channel would be cut off for a few bad questions."""
    breaker = Breaker(RULES)
    for number in range(40):
        breaker.end(0.0, failure="ERROR" if number % 3 == 2 else "", probe=None)
    assert breaker.state is CLOSED
    for _ in range(20):
        breaker.end(0.0, failure="ERROR", probe=None)
    assert breaker.state is OPEN


def test_old_failures_are_forgotten() -> None:
    """A bad minute of yesterday would open the breaker today."""
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.end(0.0, failure="ERROR", probe=None)
    breaker.end(70.0, failure="ERROR", probe=None)
    assert (breaker.state, breaker.num_failed) == (CLOSED, 1)


def test_age_opens_and_keeps_open() -> None:
    """A channel that is stuck would get a probe that gets stuck as well."""
    breaker = Breaker(RULES)
    breaker.look(9.9, 0.0)
    assert breaker.state is CLOSED
    breaker.look(10.0, 0.0)
    assert (breaker.state, breaker.why, breaker.takes) == (OPEN, Diversion.AGE, False)
    breaker.look(100.0, 0.0)
    assert breaker.state is OPEN
    breaker.look(104.9, 101.0)
    assert breaker.state is OPEN, "the cool-down begins when the channel was last seen stuck"
    breaker.look(105.0, 101.0)
    assert (breaker.state, breaker.takes) == (HALF_OPEN, True)


def test_one_probe_at_a_time() -> None:
    """A channel that has just failed would be flooded by the whole line at once."""
    breaker = half_open()
    probe = breaker.begin()
    assert probe is not None and not breaker.takes
    assert breaker.begin() is None
    breaker.end(6.0, failure="", probe=None)
    assert breaker.state is HALF_OPEN, "what was there before the probe says nothing"
    breaker.end(6.0, failure="", probe=probe)
    assert (breaker.state, breaker.why, breaker.num_failed) == (CLOSED, None, 0)


def test_a_failed_probe_opens_again() -> None:
    """A channel that is still ill would get its traffic back."""
    breaker = half_open()
    breaker.end(6.0, failure="ERROR", probe=breaker.begin())
    assert breaker.state is OPEN
    breaker.look(10.9, None)
    assert breaker.state is OPEN
    breaker.look(11.0, None)
    assert breaker.state is HALF_OPEN


def test_a_probe_that_says_nothing_makes_room_for_another() -> None:
    """A cancelled probe would leave the channel half-open for ever."""
    breaker = half_open()
    breaker.forget(breaker.begin())
    assert breaker.takes
    second = breaker.begin()
    breaker.forget(second and second - 1)
    assert not breaker.takes, "another question's end is not the probe's"


def test_a_probe_that_outlives_its_turn_decides_nothing() -> None:
    """A channel would be closed by a question that was put there before it got stuck again."""
    breaker = half_open()
    probe = breaker.begin()
    breaker.look(16.0, 6.0)
    assert breaker.state is OPEN
    breaker.end(16.5, failure="", probe=probe)
    assert breaker.state is OPEN


@pytest.mark.parametrize("changes", [{"max_age_s": -1.0}, {"cooldown_s": -1.0}, {"failure_rate": 1.5}])
def test_rules_out_of_range_are_refused(changes: dict[str, float]) -> None:
    """A breaker would never open, or never close."""
    with pytest.raises(InvariantError):
        Breaker(BreakerRules(**changes))  # type: ignore[arg-type]
    with pytest.raises(InvariantError):
        Breaker(BreakerRules(min_outcomes=0))


def test_it_names_what_fails_most() -> None:
    """An operator would see that a channel is left alone, and not that its node has no memory."""
    breaker = Breaker(RULES)
    assert breaker.main_failure == ""
    for failure in ("", "", "", "timeout_running", "OUT_OF_MEMORY", "OUT_OF_MEMORY"):
        breaker.end(1.0, failure=failure, probe=None)
    assert (breaker.main_failure, breaker.num_failed) == ("OUT_OF_MEMORY", 3)
    breaker.look(100.0, None)
    assert (breaker.main_failure, breaker.num_failed) == ("", 0)


class BreakerMachine(RuleBasedStateMachine):
    """Any order of events: only the arrows of the state diagram are taken, each for its reason."""

    @initialize(age_s=st.sampled_from([0.0, 3.0]), rate=st.sampled_from([0.0, 0.4, 1.0]), cooldown_s=st.floats(0, 8))
    def create(self, age_s: float, rate: float, cooldown_s: float) -> None:
        self.rules = BreakerRules(
            max_age_s=age_s, failure_rate=rate, min_outcomes=2, window_s=20.0, cooldown_s=cooldown_s
        )
        self.breaker = Breaker(self.rules)
        self.now_s = 0.0
        self.opened_s = 0.0
        self.on_channel: list[tuple[float, int | None]] = []

    def took(self, before: BreakerState, *allowed: BreakerState) -> None:
        state = self.breaker.state
        assert state is before or state in allowed, f"{before} -> {state}"
        if state is OPEN and before is not OPEN:
            self.opened_s = self.now_s

    @rule(pause_s=st.floats(0, 6))
    def look(self, pause_s: float) -> None:
        self.now_s += pause_s
        before = self.breaker.state
        oldest_s = min((at for at, _ in self.on_channel), default=None)
        is_stuck = bool(self.rules.max_age_s) and oldest_s is not None and self.now_s - oldest_s >= self.rules.max_age_s
        self.breaker.look(self.now_s, oldest_s)
        self.took(before, OPEN if is_stuck else HALF_OPEN)
        if is_stuck:
            self.opened_s = self.now_s
            assert self.breaker.state is OPEN
        elif before is OPEN:
            assert (self.breaker.state is HALF_OPEN) == (self.now_s >= self.opened_s + self.rules.cooldown_s)

    @rule()
    def arrive(self) -> None:
        before, took = self.breaker.state, self.breaker.takes
        probe = self.breaker.begin()
        self.on_channel.append((self.now_s, probe))
        assert (probe is not None) == (before is HALF_OPEN and took)
        self.took(before)

    @precondition(lambda self: self.on_channel)
    @rule(data=st.data(), failed=st.sampled_from([True, False, None]))
    def leave(self, data: st.DataObject, failed: bool | None) -> None:
        at = data.draw(st.integers(0, len(self.on_channel) - 1))
        _, probe = self.on_channel.pop(at)
        before = self.breaker.state
        if failed is None:
            self.breaker.forget(probe)
            self.took(before)
            return
        self.breaker.end(self.now_s, failure="ERROR" if failed else "", probe=probe)
        if before is HALF_OPEN:
            self.took(before, OPEN if failed else CLOSED)
        else:
            self.took(before, *((OPEN,) if failed and before is CLOSED else ()))

    @invariant()
    def one_probe_and_a_reason(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert (self.breaker.why is None) == (self.breaker.state is CLOSED)
        assert self.breaker.state is CLOSED or self.rules.can_open
        if self.breaker.state is HALF_OPEN and not self.breaker.takes:
            assert any(probe is not None for _, probe in self.on_channel), "waits for a probe that is not there"


BreakerMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestBreaker = BreakerMachine.TestCase
