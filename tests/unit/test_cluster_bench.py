"""The pure parts of the cluster benchmark: percentiles, goals, the report."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster import GOALS, Goal, Reading, added_latency, percentile, report, rows

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(VALUES, st.floats(0.01, 1.0))
def test_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    """A percentile between two values, or one place off, flatters or blames."""
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_percentile_of_known_values() -> None:
    """p50 of two is the lower, p99 of a hundred the ninety-ninth."""
    assert percentile([2.0, 1.0], 0.5) == 1.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
    for values, share in [([], 0.5), ([1.0], 0.0), ([1.0], 1.5)]:
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, share)


def test_added_latency_is_the_difference_in_milliseconds() -> None:
    """Seconds read as milliseconds would miss the goal by a thousand."""
    readings = {reading.name: reading for reading in added_latency([0.001, 0.002, 0.003], [0.005, 0.007, 0.013])}
    assert readings["added latency p50"].value == pytest.approx(5.0)
    assert readings["added latency p99"].value == pytest.approx(10.0)
    assert "3 rounds" in readings["added latency p50"].note


@pytest.mark.parametrize(
    ("goal", "value", "reached", "wording"),
    [
        (Goal(name="a", unit="s", limit=2.0), 2.0, True, "<= 2"),
        (Goal(name="a", unit="s", limit=2.0), 2.1, False, "<= 2"),
        (Goal(name="a", unit="1/s", limit=1000, at_most=False), 999.0, False, ">= 1,000"),
        (Goal(name="a", unit="1/s", limit=1000, at_most=False), 1000.0, True, ">= 1,000"),
        (Goal(name="a", unit="s"), math.inf, None, ""),
    ],
)
def test_goal(goal: Goal, value: float, reached: bool | None, wording: str) -> None:
    """A goal read the wrong way round is always reached."""
    assert goal.reached(value) is reached
    assert goal.wording() == wording


def test_the_report_has_every_reading_in_the_order_of_the_goals() -> None:
    """A reading that is dropped silently looks like a goal that was never missed."""
    readings = [Reading(name=goal.name, value=3.0) for goal in reversed(GOALS)]
    assert [row[0] for row in rows(readings)] == [goal.name for goal in GOALS]
    assert [row[3] for row in rows(readings)] == ["yes", "", "no", "no", "yes", "no", ""]
    assert [row[0] for row in rows(readings[:2])] == [goal.name for goal in GOALS[-2:]]
    with pytest.raises(ValueError, match="no goal is known for speed"):
        rows([Reading(name="speed", value=1.0)])


def test_the_report_is_json() -> None:
    """The file is for comparing runs; it must say what was reached and on which machine."""
    content = json.loads(json.dumps(report([Reading(name=GOALS[0].name, value=9.0, note="n")], {"cores": 2})))
    assert content["machine"] == {"cores": 2}
    assert content["readings"] == [
        {"name": "added latency p50", "value": 9.0, "note": "n", "unit": "ms", "reached": False}
    ]


def test_the_published_figures_are_the_goals() -> None:
    """A goal lowered in passing would hide a regression."""
    limits = {goal.name: (goal.limit, goal.at_most) for goal in GOALS if goal.limit is not None}
    assert limits == {
        "added latency p50": (8.0, True),
        "submits per second and router core": (1_000.0, False),
        "question outcomes per second": (2_000.0, False),
        "recovery from a killed node": (5.0, True),
        "recovery from a Redis restart": (2.0, True),
    }
