"""Domain values to JSON bytes and to server-sent events.

Invariants and semantics: the output is ASCII and valid JSON for every input: numbers that are not finite become
``null``, half surrogate pairs become U+FFFD, all other non-ASCII characters are escaped, so that no client takes
U+2028 or U+0085 for the end of a line. An event is one ``data:`` line. Field names are those of ``common.types``.

Not here: reading what a client sent (``gateway.body``).
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from common.errors import InvariantError
from common.types import IsolationReport, RequestView, RouterStats, StreamEvent, StreamEventType, TokenLogprob

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

PING = b": ping\n\n"

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def jsonable(value: object) -> Json:
    """``value`` as plain JSON data.

    Raises:
        InvariantError: a type that has no JSON form.
    """
    match value:
        case None | bool():
            return value
        case Enum():
            return jsonable(value.value)
        case str():
            return _HALF_PAIR.sub("\ufffd", value)
        case int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(jsonable(key)): jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item) for item in value]
    return _record(value)


def _record(value: object) -> Json:
    if not is_dataclass(value) or isinstance(value, type):
        raise InvariantError(f"{type(value).__name__} has no JSON form")
    record = {spec.name: jsonable(getattr(value, spec.name)) for spec in fields(value)}
    match value:  # pairs read better by name
        case IsolationReport():
            record["levels"] = {level.value: verdict.value for level, verdict in value.levels}
        case RouterStats():
            record["bucket_counts"] = [{"hash_bucket": b, "questions": n} for b, n in value.bucket_counts]
        case TokenLogprob():
            record["top"] = [{"token_id": t, "logprob": jsonable(p)} for t, p in value.top]
    return record


def encode(value: object) -> bytes:
    """``value`` as one line of ASCII JSON."""
    return json.dumps(jsonable(value), allow_nan=False, separators=(",", ":")).encode("ascii")


async def encode_view(view: RequestView) -> bytes:
    """A request with its results; lets other work run between results, since log-probabilities can be megabytes."""
    head = {
        "request_id": view.request_id,
        "state": view.state,
        "mode": view.mode,
        "num_questions": view.num_questions,
    }
    results: list[bytes] = []
    for result in view.results:
        results.append(encode(result))
        await asyncio.sleep(0)
    return encode(head)[:-1] + b',"results":[' + b",".join(results) + b"]}"


def encode_event(event: StreamEvent) -> bytes:
    """One event as a server-sent event whose id is its index, which ``Last-Event-ID`` later names."""
    data: dict[str, object] = {
        "type": event.type,
        "request_id": event.request_id,
        "event_index": event.event_index,
        "question_index": event.question_index,
        "channel_id": event.channel_id,
    }
    match event.type:
        case StreamEventType.DELTA | StreamEventType.ATTEMPT_CHANGED:
            data["text"] = event.text
        case StreamEventType.RESULT:
            data["result"] = event.result
        case StreamEventType.DONE:
            data["state"] = event.state
    return b"event: %s\nid: %d\ndata: %s\n\n" % (event.type.value.encode("ascii"), event.event_index, encode(data))


def encode_error_event(body: Mapping[str, object]) -> bytes:
    """A failure after the first byte. It has no id, so that a client resumes after the last real event."""
    return b"event: error\ndata: %s\n\n" % encode({"type": "error", **body})
