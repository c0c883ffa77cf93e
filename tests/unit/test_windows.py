"""Counts over a sliding window."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from router_svc.windows import SlidingCounts

STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 4)), max_size=80)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 7), st.floats(0.5, 20))
def test_counts_equal_a_naive_recount(steps: list[tuple[str, float]], num_slots: int, window_s: float) -> None:
    """A hot spot would be told of traffic that has long gone, or not be told at all."""
    counts: SlidingCounts[str] = SlidingCounts(window_s, num_slots=num_slots)
    happened: list[tuple[str, int]] = []
    now_s = 0.0
    for key, pause_s in steps:
        now_s += pause_s
        slot = int(now_s * (num_slots / window_s))
        happened.append((key, slot))
        expected = Counter(key for key, at in happened if at > slot - num_slots)
        assert counts.add(key, now_s) == expected[key]
        assert {key: counts.count(key) for key in "abcd" if counts.count(key)} == expected
        assert counts.total == expected.total()
        assert sorted(counts.most_common(9)) == sorted(expected.items())
        happened = [(key, at) for key, at in happened if at > slot - num_slots]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 4), st.integers(1, 900)), max_size=60))
def test_amounts_equal_a_naive_sum(steps: list[tuple[str, float, int]]) -> None:
    """A long question would count as one token, or stay in the window."""
    counts: SlidingCounts[str] = SlidingCounts(12.0, num_slots=3)
    happened: list[tuple[str, int, int]] = []
    now_s = 0.0
    for key, pause_s, amount in steps:
        now_s += pause_s
        slot = int(now_s / 4)
        happened = [(k, n, at) for k, n, at in [*happened, (key, amount, slot)] if at > slot - 3]
        assert counts.add(key, now_s, amount) == sum(n for k, n, _ in happened if k == key)
        assert counts.total == sum(n for _, n, _ in happened)


def test_all_leaves_after_the_window() -> None:
    """Memory would grow for as long as the router lives."""
    counts: SlidingCounts[int] = SlidingCounts(60.0)
    for key in range(1000):
        counts.add(key, key * 0.01)
    counts.move_to(75.0)
    assert (counts.total, counts.most_common(5), counts._counts) == (0, [], {})


def test_the_window_reaches_back_at_least_all_but_one_slot() -> None:
    """A burst of a few seconds ago would already be forgotten."""
    counts: SlidingCounts[str] = SlidingCounts(60.0, num_slots=12)
    counts.add("a", 4.99)
    counts.move_to(59.9)
    assert counts.count("a") == 1
    counts.move_to(60.0)
    assert counts.count("a") == 0


def test_memory_is_bounded_and_a_heavy_key_stays_named() -> None:
    """Somebody who asks something else each time would fill the memory, or hide the bucket that is hot."""
    counts: SlidingCounts[int] = SlidingCounts(12.0, num_slots=4, max_keys=10)
    for number in range(2000):
        counts.add(-1 if number % 4 == 0 else number, number * 0.004)
    assert counts.total == 2000
    assert counts.count(-1) == 500
    assert len(counts._counts) <= 4 * 10


def test_a_clock_that_stands_or_steps_back_loses_nothing() -> None:
    """Counts of one moment would replace each other."""
    counts: SlidingCounts[str] = SlidingCounts(1.0)
    for now_s in (5.0, 5.0, 4.0):
        counts.add("a", now_s)
    assert counts.count("a") == counts.total == 3
    counts.clear()
    assert counts.count("a") == counts.total == 0
    assert counts.add("a", 5.0) == 1


@pytest.mark.parametrize("sizes", [(0.0, 1, 1), (1.0, 0, 1), (1.0, 1, 0)])
def test_a_window_without_size_is_refused(sizes: tuple[float, int, int]) -> None:
    """It would divide by zero later, far from its cause."""
    with pytest.raises(InvariantError):
        SlidingCounts(sizes[0], num_slots=sizes[1], max_keys=sizes[2])
