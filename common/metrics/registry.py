"""Keeps the metrics of one process and writes them in Prometheus' text format.

Invariants and semantics: a metric has at most ``MAX_SERIES`` combinations of labels; further ones are counted under
``other``, so that no caller can make a process grow. A source that fails is left out of that scrape and logged: the
others are still told. Nothing is global; two registries know nothing of each other.

The only file that imports prometheus_client. Not here: the port (``server``), what the numbers mean (``catalogue``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from common.metrics.catalogue import Kind, Metric
from common.metrics.port import Reading, Source

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 512
OTHER = "other"
_REFRESH_TIMEOUT_S = 2.0

_log = logging.getLogger("kev.metrics")


class Metrics:
    """A ``Recorder`` with its readers. Counting is safe from any thread; everything else is for one event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._kept: dict[Metric, Counter | Histogram] = {}
        self._making = threading.Lock()
        self._children: dict[tuple[Metric, tuple[str, ...]], Counter | Histogram] = {}
        self._num_series: Tally[Metric] = Tally()
        self._sources: list[Source] = []
        self._refreshers: list[Callable[[], Awaitable[None]]] = []
        ProcessCollector(registry=self._registry)

    # ---- what happened

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        child = self._children.get((metric, labels)) or self._child(metric, labels)
        if isinstance(child, Counter):
            child.inc(by)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        child = self._children.get((metric, labels)) or self._child(metric, labels)
        if isinstance(child, Histogram):
            child.observe(value)

    def expect(self, *metrics: Metric) -> None:
        """Show these from the start: a counter that is not there yet hides its first step from ``rate``."""
        for metric in metrics:
            if not metric.is_read:
                self._keep(metric)

    # ---- what is read

    def add_source(self, source: Source) -> None:
        """Ask ``source`` at every scrape."""
        self._sources.append(source)

    def add_refresher(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Await ``refresh`` before every scrape, for at most two seconds; what it raises is logged only."""
        self._refreshers.append(refresh)

    async def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        await asyncio.gather(*(_refreshed(refresh) for refresh in self._refreshers))
        families = (*map(_plain, self._registry.collect()), *self._read())
        # State is read here, on the event loop that owns it; writing it down can be left to a thread.
        return await asyncio.to_thread(generate_latest, _Fixed(families))

    # ---- inside

    def _keep(self, metric: Metric) -> Counter | Histogram:
        kept = self._kept.get(metric)
        if kept is None:
            with self._making:
                kept = self._kept.get(metric) or self._make(metric)
                self._kept[metric] = kept
        return kept

    def _make(self, metric: Metric) -> Counter | Histogram:
        name, meaning, labels = metric.name, metric.meaning, metric.labels
        if metric.kind is Kind.HISTOGRAM:
            return Histogram(name, meaning, labels, registry=self._registry, buckets=metric.buckets)
        return Counter(name, meaning, labels, registry=self._registry)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Counter | Histogram:
        """What keeps one series; it is remembered while there is room for it."""
        kept = self._keep(metric)
        if not labels:
            self._children[metric, ()] = kept
            return kept
        with self._making:
            if self._num_series[metric] >= MAX_SERIES:
                return kept.labels(*(OTHER,) * len(labels))
            self._num_series[metric] += 1
            child = self._children[metric, labels] = kept.labels(*labels)
            return child

    def _read(self) -> Iterator[Family]:
        families: dict[Metric, CounterMetricFamily | GaugeMetricFamily] = {}
        for source in self._sources:
            for reading in _asked(source):
                metric = reading.metric
                family = families.get(metric)
                if family is None:
                    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                    family = families[metric] = make(metric.name, metric.meaning, labels=metric.labels)
                family.add_metric(reading.labels, reading.value)
        yield from families.values()


def _plain(family: Family) -> Family:
    """Without the series that say when each counter was made."""
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


class _Fixed(Collector):
    def __init__(self, families: tuple[Family, ...]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _asked(source: Source) -> list[Reading]:
    try:
        return list(source())
    except Exception:
        _log.exception("some metrics could not be read")
        return []


async def _refreshed(refresh: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(_REFRESH_TIMEOUT_S):
            await refresh()
    except Exception as error:
        _log.warning("some metrics could not be read: %s", type(error).__name__)
