"""The pace behind every Retry-After, with a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_svc.service_rate import Pace, ServiceRate


def interval_s(rate: ServiceRate, now_s: float) -> float:
    per_s = rate.per_s(now_s)
    assert per_s is not None
    return 1 / per_s


def steady(rate: ServiceRate, start_s: float, step_s: float, number: int, burst: int = 1) -> float:
    """``number`` bursts of releases; returns when the last one was."""
    for step in range(1, number + 1):
        for _ in range(burst):
            rate.release(start_s + step * step_s)
    return start_s + number * step_s


def test_nothing_is_known_before_the_first_release() -> None:
    """A refusal at the start would promise a time that nobody measured."""
    rate = ServiceRate()
    assert rate.per_s(5.0) is None
    rate.begin(5.0)
    assert rate.per_s(6.0) is None
    rate.release(7.0)
    assert interval_s(rate, 7.0) == pytest.approx(2.0)


@settings(max_examples=60, deadline=None)
@given(step_s=st.floats(0.06, 100), burst=st.integers(1, 64), number=st.integers(9, 60), late=st.floats(0, 0.999))
def test_a_steady_pace_is_met_within_an_eighth(step_s: float, burst: int, number: int, late: float) -> None:
    """Clients would come back far too early and be refused again, or leave channels idle."""
    rate = ServiceRate()
    rate.begin(100.0)
    last_s = steady(rate, 100.0, step_s, number, burst)
    true_s = step_s / burst
    assert true_s * 0.999 <= interval_s(rate, last_s) <= true_s * 1.001
    assert true_s * 0.999 <= interval_s(rate, last_s + late * step_s) <= true_s * 9 / 8 * 1.001


@settings(max_examples=10, deadline=None)
@given(per_s=st.floats(20, 1000))
def test_a_fast_pace_is_met_too(per_s: float) -> None:
    """Releases that are closer together than the grain would be counted once or for ever."""
    rate = ServiceRate()
    rate.begin(0.0)
    last_s = steady(rate, 0.0, 1 / per_s, int(per_s * 12))
    assert interval_s(rate, last_s) == pytest.approx(1 / per_s, rel=0.02)


@settings(max_examples=30, deadline=None)
@given(gap_s=st.floats(0, 1e6), is_told=st.booleans())
def test_an_idle_gap_changes_nothing(gap_s: float, is_told: bool) -> None:
    """After a quiet night the first refusal would tell clients to come back in a minute."""
    rate = ServiceRate()
    rate.begin(0.0)
    last_s = steady(rate, 0.0, 0.5, 20)
    rate.end(last_s)
    assert interval_s(rate, last_s + gap_s) == pytest.approx(0.5)
    rate.begin(last_s + gap_s if is_told else None)
    last_s = steady(rate, last_s + gap_s, 0.5, 3)
    assert interval_s(rate, last_s) == pytest.approx(0.5)


def test_a_changed_pace_is_seen_within_the_horizon() -> None:
    """A pool that became fast would go on turning clients away for as long as it was slow."""
    rate = ServiceRate()
    rate.begin(0.0)
    last_s = steady(rate, 0.0, 1.0, 100)
    last_s = steady(rate, last_s, 0.1, 101)
    assert interval_s(rate, last_s) == pytest.approx(0.1, rel=0.05)
    last_s = steady(rate, last_s, 4.0, 9)
    assert interval_s(rate, last_s) == pytest.approx(4.0, rel=0.05)


def test_a_standstill_lowers_the_pace_at_once() -> None:
    """With a stuck model every client would be told to come back in a moment."""
    rate = ServiceRate()
    rate.begin(0.0)
    last_s = steady(rate, 0.0, 0.1, 20)
    estimates = [interval_s(rate, last_s + wait_s) for wait_s in (0.0, 1.0, 10.0, 100.0)]
    assert estimates == sorted(estimates)
    assert estimates[-1] > 5.0


def test_memory_is_bounded() -> None:
    """A router that lives for months would keep every release."""
    rate = ServiceRate()
    rate.begin(0.0)
    steady(rate, 0.0, 0.001, 50_000)
    assert len(rate._moments) <= 10.0 / 0.05 + 2


def busy(pace: Pace, start_s: float, step_s: float, number: int, *, is_full: bool) -> float:
    """A release every step; returns when the last one was."""
    for step in range(1, number + 1):
        pace.note(has_work=True, is_full=is_full, now_s=start_s + (step - 1) * step_s)
        pace.release(start_s + step * step_s)
        pace.note(has_work=False, is_full=False, now_s=start_s + step * step_s)
    return start_s + number * step_s


def test_a_half_idle_pool_is_not_slow() -> None:
    """After a quiet hour of one question at a time a crowd would be told to stay away ten times too long."""
    pace = Pace()
    last_s = busy(pace, 0.0, 0.1, 20, is_full=True)
    assert pace.per_s(last_s) == pytest.approx(10.0)
    last_s = busy(pace, last_s, 1.0, 500, is_full=False)
    assert pace.per_s(last_s) == pytest.approx(10.0)


def test_before_a_pool_was_ever_full_any_work_counts() -> None:
    """A deployment in which one channel alone is full would never know its pace."""
    pace = Pace()
    assert pace.per_s(0.0) is None
    last_s = busy(pace, 0.0, 0.5, 20, is_full=False)
    assert pace.per_s(last_s) == pytest.approx(2.0)
    last_s = busy(pace, last_s, 0.05, 3, is_full=True)
    assert 1.5 < (pace.per_s(last_s) or 0.0) < 3.0, "three releases are no pace yet"
    last_s = busy(pace, last_s, 0.05, 20, is_full=True)
    assert pace.per_s(last_s) == pytest.approx(20.0, rel=0.2)
