"""Spans by OpenTelemetry, sent by OTLP over HTTP as the standard ``OTEL_*`` variables say.

Invariants and semantics: parents are traceparents, not OpenTelemetry's own context, so that a trace is followed where
OpenTelemetry is not. Whether a trace is kept is decided by its first span (``OTEL_TRACES_SAMPLER``, by default the
caller's decision, else all). Spans are sent in batches from a thread; when nobody takes them they are dropped.

The only file that imports opentelemetry; needs the extra ``tracing``. Not here: which spans there are
(``common.tracing.work``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter

from common.errors import KevError
from common.tracing.context import current_trace, format_traceparent, parts_of
from common.tracing.port import Attributes, SpanKind

_KINDS = {
    SpanKind.SERVER: otel.SpanKind.SERVER,
    SpanKind.CONSUMER: otel.SpanKind.CONSUMER,
    SpanKind.INTERNAL: otel.SpanKind.INTERNAL,
}
_FLUSH_MS = 3_000


class OtelTracer:
    """Makes spans with OpenTelemetry."""

    def __init__(self, process: str, exporter: SpanExporter | None = None) -> None:
        """Prepare the exporter.

        Args:
            process: the service's name, unless ``OTEL_SERVICE_NAME`` gives one.
            exporter: takes every span at once (for tests); None sends batches by OTLP.
        """
        name = os.environ.get("OTEL_SERVICE_NAME") or f"kev-{process}"
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_otlp_exporter()) if exporter is None else SimpleSpanProcessor(exporter)
        )
        self._tracer = self._provider.get_tracer("kev")

    def span(self, name: str, kind: SpanKind, attributes: Attributes) -> AbstractContextManager[None]:
        """A span below the running call's; see ``common.tracing.port``."""
        return self._open(name, kind, attributes)

    @contextmanager
    def _open(self, name: str, kind: SpanKind, attributes: Attributes) -> Iterator[None]:
        parent = _parent(current_trace.get())
        span = self._tracer.start_span(name, context=parent, kind=_KINDS[kind], attributes=attributes)
        context = span.get_span_context()
        token = current_trace.set(format_traceparent(context.trace_id, context.span_id, int(context.trace_flags)))
        try:
            yield
        except Exception as error:
            # The reason only: the text of an error may quote the question.
            reason = error.reason if isinstance(error, KevError) else type(error).__name__
            span.set_status(otel.StatusCode.ERROR, reason)
            raise
        finally:
            current_trace.reset(token)
            span.end()

    def record(self, name: str, trace: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """A span that is over; see ``common.tracing.port``."""
        span = self._tracer.start_span(
            name,
            context=_parent(trace),
            kind=otel.SpanKind.CONSUMER,
            attributes=attributes,
            start_time=int(start_s * 1e9),
        )
        if "kev.error_reason" in attributes:
            span.set_status(otel.StatusCode.ERROR, str(attributes["kev.error_reason"]))
        span.end(int(end_s * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def _otlp_exporter() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _parent(trace: str) -> Context:
    parts = parts_of(trace)
    if parts is None:
        return Context()
    trace_id, span_id, flags = parts
    context = otel.SpanContext(trace_id, span_id, is_remote=True, trace_flags=otel.TraceFlags(flags))
    return otel.set_span_in_context(otel.NonRecordingSpan(context), Context())
