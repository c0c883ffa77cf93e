"""Trace context, the tracer that makes nothing, and logs that name their request."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.json_logs import JsonFormatter
from common.tracing.context import accept, current_request_id, current_trace, format_traceparent, parts_of
from common.tracing.port import SpanKind, Untraced, open_tracer, wants_tracing
from common.tracing.work import WorkTraces
from tests.contract.transport_suite import make_item

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@given(trace_id=st.integers(1, 2**128 - 1), span_id=st.integers(1, 2**64 - 1), flags=st.integers(0, 255))
def test_a_traceparent_is_read_as_it_was_written(trace_id: int, span_id: int, flags: int) -> None:
    """A trace breaks between two processes."""
    text = format_traceparent(trace_id, span_id, flags)
    assert parts_of(text) == (trace_id, span_id, flags)
    assert accept(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        TRACE + "-more",
        TRACE.upper(),
        "ff" + TRACE[2:],
        TRACE.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        TRACE.replace("b7ad6b7169203331", "0" * 16),
        TRACE + "\n",
        "x" * 10_000,
    ],
)
def test_what_is_no_traceparent_is_not_passed_on(text: str) -> None:
    """A header of a client travels into the store and into every other process."""
    assert accept(text) == ""


@given(st.text(max_size=80))
def test_any_text_is_a_traceparent_or_nothing(text: str) -> None:
    assert accept(text) in ("", text)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_the_environment_says_whether_to_trace(environment: dict[str, str], wanted: bool) -> None:
    """Spans are made for nobody, or an operator waits for spans that are never made."""
    assert wants_tracing(environment) is wanted


def test_a_missing_package_is_said_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable that a platform sets for all its pods stops the one that has no OpenTelemetry."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setitem(sys.modules, "common.tracing.otel", None)
    assert isinstance(open_tracer("router"), Untraced)
    assert "kev[tracing]" in caplog.text


def test_a_trace_is_passed_on_without_spans() -> None:
    """A caller's trace ends at Kev, although both its neighbours are traced."""
    traces = WorkTraces(Untraced())
    token = current_trace.set(TRACE)
    with traces.submission("r", 1):
        pass
    current_trace.reset(token)
    assert traces.trace_of(make_item(request_id="r")) == TRACE
    assert traces.trace_of(make_item(request_id="other")) == ""


def test_the_traces_of_a_router_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that lives long keeps the trace of every request it has seen."""
    monkeypatch.setattr("common.tracing.work._MAX_KEPT", 3)
    traces = WorkTraces(Untraced())
    token = current_trace.set(TRACE)
    for number in range(10):
        with traces.submission(str(number), 1):
            pass
    current_trace.reset(token)
    assert [number for number in range(10) if traces.of_request(str(number))] == [7, 8, 9]


def test_no_tracer_makes_nothing() -> None:
    with Untraced().span("kev.submit", SpanKind.SERVER, {}):
        assert current_trace.get() == ""


# --- logs


def line_of(message: str, *args: object, error: BaseException | None = None) -> dict[str, str]:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("kev.worker", logging.WARNING, __file__, 1, message, args, info)
    text = JsonFormatter().format(record)
    assert text.isascii() and "\n" not in text
    line: dict[str, str] = json.loads(text)
    return line


def test_a_json_line_names_request_and_trace() -> None:
    """Lines of one request cannot be found among those of a thousand others."""
    request, trace = current_request_id.set("r-1"), current_trace.set(TRACE)
    line = line_of("lease %d lost\nagain 中", 3)
    current_request_id.reset(request)
    current_trace.reset(trace)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "kev.worker",
        "message": "lease 3 lost\nagain 中",
        "request_id": "r-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
    }


def test_a_json_line_says_no_more_than_it_knows() -> None:
    assert line_of("up").keys() == {"time", "level", "logger", "message"}


def test_a_traceback_is_part_of_its_line() -> None:
    """A collector of logs takes each line of a traceback for a message of its own."""
    try:
        raise ValueError("what")
    except ValueError as error:
        assert "ValueError: what" in line_of("failed", error=error)["error"]
