"""Metrics and traces of the embedded form: the tiers' own, put around them as in their processes.

Invariants and semantics: without telemetry nothing is put around anything.

Not here: what the tiers tell (their ``metrics`` modules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aggregator_svc import metrics as aggregator_metrics
from aggregator_svc.service import AggregatorService
from common.metrics.port import Reading
from common.ports import ResultStream, WorkStreams
from common.types import IsolationReport, NodeStats
from common.watched_work import WatchedWork
from inference_svc import metrics as node_metrics
from inference_svc.engine_core import Runner
from router_svc import metrics as router_metrics
from router_svc.entrance import Router

if TYPE_CHECKING:
    from common.telemetry import Telemetry


class EngineWatch:
    """Puts telemetry around the tiers of one engine."""

    def __init__(self, telemetry: Telemetry | None) -> None:
        self._telemetry = telemetry

    def publications(self, work: WorkStreams) -> WorkStreams:
        """The work streams for the router."""
        if self._telemetry is None:
            return work
        return WatchedWork(work, router_metrics.Publications(self._telemetry.metrics))

    def results(self, results: ResultStream) -> ResultStream:
        """The result stream for the aggregator."""
        if self._telemetry is None:
            return results
        return aggregator_metrics.WatchedResults(results, self._telemetry.metrics)

    def leases(self, work: WorkStreams) -> WorkStreams:
        """The work streams for the worker."""
        if self._telemetry is None:
            return work
        return WatchedWork(work, node_metrics.Leases(self._telemetry.metrics), self._telemetry.traces)

    def entrance(self, router: Router, aggregator: AggregatorService, results: ResultStream) -> Router:
        """The router for those who submit; tells of router and aggregator from now on."""
        if self._telemetry is None:
            return router
        metrics, traces = self._telemetry.metrics, self._telemetry.traces
        aggregator_metrics.Outcomes(aggregator, metrics)
        aggregator.add_listener(traces.told)
        metrics.add_source(lambda: router_metrics.readings(router))
        metrics.add_source(lambda: aggregator_metrics.readings(aggregator, results))
        return router_metrics.WatchedRouter(router, metrics, traces)

    def nodes(
        self, report: IsolationReport, stats: Callable[[], Sequence[NodeStats]], num_held: Callable[[], int]
    ) -> None:
        """Tells of all engine cores together from now on; they are alive while every one of them is."""

        def readings() -> Iterable[Reading]:
            cores = stats()
            together = replace(NodeStats.together(cores), alive=all(core.alive for core in cores))
            return node_metrics.readings(report, together, num_held())

        if self._telemetry is not None:
            self._telemetry.metrics.add_source(readings)

    def runner(self, runner: Runner) -> Runner:
        """What executes the steps."""
        if self._telemetry is None:
            return runner
        return node_metrics.WatchedRunner(runner, self._telemetry.metrics)
