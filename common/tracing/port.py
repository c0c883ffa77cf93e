"""Where spans go.

Invariants and semantics: attributes hold ids, counts and words of small sets, never texts of questions or answers. A
tracer neither raises nor waits. ``Untraced`` makes nothing and loads nothing.

Not here: OpenTelemetry (``common.tracing.otel``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

Attributes = Mapping[str, str | int | float]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_log = logging.getLogger("kev.tracing")


class SpanKind(StrEnum):
    """Place of a span between callers and callees."""

    SERVER = "server"
    CONSUMER = "consumer"
    INTERNAL = "internal"


class Tracer(Protocol):
    """Makes spans."""

    def span(self, name: str, kind: SpanKind, attributes: Attributes) -> AbstractContextManager[None]:
        """A span below the running call's, current while the context is open; an error marks it with its reason."""
        ...

    def record(self, name: str, trace: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """A span that is over, in Unix seconds, below the span that ``trace`` (a traceparent) names."""
        ...

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""
        ...


class Untraced:
    """Makes no spans."""

    def span(self, name: str, kind: SpanKind, attributes: Attributes) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def record(self, name: str, trace: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def wants_tracing(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's standard variables name somebody who collects spans."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environment.get(name) for name in _ENDPOINTS)


def open_tracer(process: str) -> Tracer:
    """The tracer that the environment asks for; loads OpenTelemetry only then.

    Args:
        process: names the process in its spans, unless ``OTEL_SERVICE_NAME`` does.
    """
    if not wants_tracing():
        return Untraced()
    try:
        from common.tracing.otel import OtelTracer

        return OtelTracer(process)
    except ImportError as error:
        _log.warning("no traces are sent although the environment asks for them: %s; pip install 'kev[tracing]'", error)
        return Untraced()
