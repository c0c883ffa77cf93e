"""What one process tells of itself: metrics and traces, opened together by its root.

Not here: what is told (the rooms' ``metrics``, ``common.tracing.work``), logs (``common.json_logs``).
"""

from __future__ import annotations

from common.metrics.catalogue import METRICS, Tier
from common.metrics.registry import Metrics
from common.tracing.port import Tracer, open_tracer
from common.tracing.work import WorkTraces


class Telemetry:
    """Metrics and traces of a process."""

    def __init__(self, process: str, *tiers: Tier, tracer: Tracer | None = None) -> None:
        """Open them.

        Args:
            process: names the process in its spans.
            tiers: whose metrics it has; their counters are there from the start.
            tracer: takes the spans; None asks the environment (``common.tracing.port.open_tracer``).
        """
        self.metrics = Metrics()
        self.metrics.expect(*(metric for metric in METRICS if metric.tier in tiers))
        self.tracer = open_tracer(process) if tracer is None else tracer
        self.traces = WorkTraces(self.tracer)

    def close(self) -> None:
        """Send what is left of the traces; blocks for a few seconds at most."""
        self.tracer.close()
