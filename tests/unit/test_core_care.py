"""Restarts are bounded, patient and earned again; a step is long only as far as somebody looked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core_care import HEALTHY_S, Restarts, StepClock

lives = st.lists(st.floats(0, 3 * HEALTHY_S), max_size=12)


@given(lives, st.integers(0, 6), st.floats(0.001, 100))
def test_a_core_starts_again_a_bounded_number_of_times_in_a_row(
    lives_s: list[float], most: int, first_s: float
) -> None:
    """Pauses grow within a row; a life that was long enough begins a new one; without a restart left there is none."""
    restarts, now_s, in_a_row, last_s = Restarts(most, first_s), 0.0, 0, 0.0
    for life_s in lives_s:
        restarts.started(now_s)
        started_s, now_s = now_s, now_s + life_s
        if now_s - started_s >= HEALTHY_S:
            in_a_row, last_s = 0, 0.0
        pause_s = restarts.ended(now_s)
        if in_a_row == most:
            assert pause_s is None and not restarts.is_left
            return
        assert pause_s is not None and first_s <= pause_s <= max(60.0, first_s)
        assert pause_s >= last_s
        in_a_row, last_s, now_s = in_a_row + 1, pause_s, now_s + pause_s


@given(st.integers(1, 6), st.floats(HEALTHY_S, 1e6))
def test_tries_that_fail_are_spent_whatever_time_passes(most: int, between_s: float) -> None:
    """A core that cannot be started has not been well meanwhile."""
    restarts = Restarts(most, 1.0)
    restarts.started(0.0)
    tries = [restarts.ended(index * between_s if index else 1.0) for index in range(most + 1)]
    assert tries[-1] is None and None not in tries[:-1]


looks = st.lists(st.tuples(st.floats(0, 1e5), st.none() | st.integers(1, 3)), max_size=12)


@given(looks, st.floats(0.01, 1.0))
def test_a_step_is_as_long_as_it_was_looked_at(seen: list[tuple[float, int | None]], interval_s: float) -> None:
    """Never longer than it took, never more than two intervals a look, and nothing of the step before it."""
    clock, now_s = StepClock(interval_s), 0.0
    since_s, num_looks, before = 0.0, 0, None
    for passed_s, step in seen:
        now_s += passed_s
        if step is None or step != before:
            since_s, num_looks = now_s, 0
        else:
            num_looks += 1
        found_s = clock.look(now_s, step)
        assert 0 <= found_s <= min(now_s - since_s, 2 * interval_s * num_looks) * (1 + 1e-9) + 1e-9
        before = step


@given(st.floats(0.01, 1.0), st.integers(1, 50))
def test_a_step_that_hangs_is_found_in_time(interval_s: float, intervals: int) -> None:
    """With looks on time nothing of it is missed."""
    clock = StepClock(interval_s)
    found_s = [clock.look(index * interval_s, 7) for index in range(intervals + 1)][-1]
    assert abs(found_s - intervals * interval_s) < 1e-6
