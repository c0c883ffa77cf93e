"""Counts and times the calls of a gRPC server.

Not here: where the calls are seen (``common.grpc_interceptors``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from common.metrics import catalogue as names
from common.metrics.port import Reading, Recorder


class CallMetrics:
    """``common.grpc_interceptors.CallWatcher`` for one server."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: Counter[str] = Counter()

    def began(self, method: str) -> None:
        """A call has arrived."""
        self._open[method] += 1

    def ended(self, method: str, reason: str, seconds: float) -> None:
        """It is over."""
        self._open[method] -= 1
        self._recorder.count(names.GRPC_CALLS, method, reason)
        self._recorder.observe(names.GRPC_SECONDS, seconds, method)

    def readings(self) -> Iterable[Reading]:
        """Calls that run."""
        return [Reading(names.GRPC_OPEN, number, (method,)) for method, number in self._open.items()]
