"""What the running call belongs to: its trace and its request.

Invariants and semantics: one value per task, inherited by the tasks it starts. A traceparent is taken from outside only
if it is well-formed (W3C Trace Context, section 3.2; future versions are read as version 00), so that nothing else
travels in its place.

Not here: spans (``common.tracing.port``).
"""

from __future__ import annotations

import re
from contextvars import ContextVar

HEADER = "traceparent"
"""Name of the header, and of the gRPC metadata."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")

current_trace: ContextVar[str] = ContextVar("kev_trace", default="")
"""W3C traceparent of the running call; empty without one."""
current_request_id: ContextVar[str] = ContextVar("kev_request_id", default="")
"""Request that the running call is about; empty without one."""


def traceparent() -> str:
    """W3C traceparent of the running call; empty without one."""
    return current_trace.get()


def accept(text: str | None) -> str:
    """A traceparent from outside, or the empty text if it is none."""
    return text if text and parts_of(text) is not None else ""


def parts_of(text: str) -> tuple[int, int, int] | None:
    """Trace id, span id and flags; None when the text is no traceparent."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    trace_id, span_id, flags = (int(match[name], 16) for name in ("trace", "span", "flags"))
    return (trace_id, span_id, flags) if trace_id and span_id else None


def format_traceparent(trace_id: int, span_id: int, flags: int) -> str:
    """The text of a traceparent."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"
