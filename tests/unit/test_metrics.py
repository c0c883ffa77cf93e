"""Metrics: their names, how they are kept, and that nobody can make them grow."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from common.ending import Ending
from common.metrics import catalogue as names
from common.metrics.catalogue import METRICS, Kind, Metric, Tier
from common.metrics.port import MAX_CHANNEL_LABELS, Reading, by_channel
from common.metrics.registry import MAX_SERIES, OTHER, Metrics
from router_svc.metrics import WatchedBoard

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"method", "reason", "verdict", "outcome", "channel", "delivery", "state", "finish_reason", "kind", "why"} | {
    "route",
    "status",
    "rank",
}
"""Of small sets, all of them: no id, no text, no tenant, no model."""


def parsed(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and label values, as Prometheus would read them; it refuses a page that says a thing twice."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    values = {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


# --- names


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_say_kind_and_unit(metric: Metric) -> None:
    """A dashboard takes milliseconds for seconds, or the rate of a gauge."""
    assert re.fullmatch(r"kev(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM) and list(metric.buckets) == sorted(metric.buckets)
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith("_seconds")
    assert not re.search(r"_(ms|millis|count|sum|bucket)(_|$)", metric.name)
    assert set(metric.labels) <= LABELS and len(metric.labels) <= 3
    assert metric.meaning.endswith(".") and "|" not in metric.meaning


def test_names_are_given_once() -> None:
    """Two meanings add up to one number."""
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40
    assert {metric.tier for metric in METRICS} == set(Tier)


def test_every_metric_is_told_by_somebody() -> None:
    """A dashboard waits for ever for a value that no process has."""
    rooms = ("common", "router_svc", "inference_svc", "aggregator_svc", "kev")
    code = "".join(
        path.read_text(encoding="utf-8")
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if path.name != "catalogue.py"
    )
    unused = [name for name, value in vars(names).items() if isinstance(value, Metric) and name not in code]
    assert unused == []


# --- the registry


async def test_what_was_counted_is_told() -> None:
    """Counters, histograms and readings of the moment reach Prometheus under their names and labels."""
    metrics = Metrics()
    metrics.count(names.COMMITS, "stale")
    metrics.count(names.COMMITS, "stale", by=2)
    metrics.count(names.REPEATED)
    metrics.observe(names.QUEUE_SECONDS, 0.2)
    metrics.add_source(lambda: [Reading(names.SLOTS_USED, 3), Reading(names.REQUESTS, 7)])
    metrics.add_source(lambda: by_channel(names.QUEUE_ENTRIES, [4, 0]))
    told = parsed(await metrics.render())
    assert told["kev_node_commits_total", ("stale",)] == 3 and told["kev_aggregator_repeated_total", ()] == 1
    assert told["kev_node_queue_seconds_count", ()] == 1 and told["kev_node_queue_seconds_sum", ()] == 0.2
    assert (
        told["kev_node_queue_seconds_bucket", ("0.1",)] == 0 and told["kev_node_queue_seconds_bucket", ("0.25",)] == 1
    )
    assert told["kev_node_slots_used", ()] == 3 and told["kev_router_requests_total", ()] == 7
    assert told["kev_queue_entries", ("0",)] == 4 and told["kev_queue_entries", ("1",)] == 0


async def test_expected_counters_start_at_zero() -> None:
    """An alert on an increase misses the first dead letter, because there was no 0 before the 1."""
    metrics = Metrics()
    metrics.expect(*METRICS)
    told = parsed(await metrics.render())
    assert told["kev_aggregator_repeated_total", ()] == 0 and told["kev_node_queue_seconds_count", ()] == 0


@given(num_values=st.integers(1, 2 * MAX_SERIES), num_rounds=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_series_are_bounded_and_nothing_is_lost(num_values: int, num_rounds: int) -> None:
    """A client that makes up labels makes the process grow, or its requests are not counted at all."""
    metrics = Metrics()
    for _ in range(num_rounds):
        for number in range(num_values):
            metrics.count(names.COMMITS, f"made up {number}")
    told = {
        sample.labels["state"]: sample.value
        for family in metrics._registry.collect()
        for sample in family.samples
        if sample.name == "kev_node_commits_total"
    }
    assert len(told) == min(num_values, MAX_SERIES) + (num_values > MAX_SERIES)
    assert sum(told.values()) == num_values * num_rounds
    assert told.get(OTHER, 0) == max(0, num_values - MAX_SERIES) * num_rounds


@given(depths=st.lists(st.integers(0, 100), max_size=3 * MAX_CHANNEL_LABELS))
def test_channels_beyond_the_bound_are_added_up(depths: list[int]) -> None:
    """A pool of 4,096 channels has as many series in each of 20 routers."""
    readings = by_channel(names.QUEUE_ENTRIES, depths)
    assert len(readings) <= MAX_CHANNEL_LABELS + 1
    assert sum(reading.value for reading in readings) == sum(depths)
    assert [reading.value for reading in readings[:MAX_CHANNEL_LABELS]] == depths[:MAX_CHANNEL_LABELS]


async def test_a_source_that_fails_hides_nobody_else() -> None:
    """One broken reading takes the whole page, and with it every alert."""

    def broken() -> list[Reading]:
        raise RuntimeError("no")

    async def failing() -> None:
        raise RuntimeError("no")

    metrics = Metrics()
    metrics.add_source(broken)
    metrics.add_refresher(failing)
    metrics.add_source(lambda: [Reading(names.SLOTS, 8)])
    assert parsed(await metrics.render())["kev_node_slots", ()] == 8


async def test_a_refresher_that_hangs_does_not_hold_up_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is away, and Prometheus gets nothing from the process at all."""
    monkeypatch.setattr("common.metrics.registry._REFRESH_TIMEOUT_S", 0.01)
    metrics = Metrics()
    metrics.add_refresher(asyncio.Event().wait)  # type: ignore[arg-type]
    metrics.add_source(lambda: [Reading(names.SLOTS, 8)])
    assert parsed(await metrics.render())["kev_node_slots", ()] == 8


async def test_threads_may_count_together() -> None:
    """The engine thread and the event loop meet in one counter, and steps are lost."""
    metrics = Metrics()
    await asyncio.gather(*(asyncio.to_thread(_count_many, metrics) for _ in range(8)))
    assert parsed(await metrics.render())["kev_node_tokens_total", ("decode",)] == 8_000


def _count_many(metrics: Metrics) -> None:
    for _ in range(1_000):
        metrics.count(names.TOKENS, "decode")


# --- what stands in front of the router


class Board:
    """Has lost one question of two."""

    async def settled(self, questions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Ending]:
        return dict.fromkeys(questions, Ending())

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return list(questions)[::2]


async def test_lost_questions_are_counted() -> None:
    """The store forgets questions, the router publishes them again, and no operator knows."""
    metrics = Metrics()
    board = WatchedBoard(Board(), metrics)
    questions = [("r", index) for index in range(5)]
    assert await board.lost(questions) == questions[::2] and list(await board.settled(questions)) == questions
    assert parsed(await metrics.render())["kev_router_lost_questions_total", ()] == 3
