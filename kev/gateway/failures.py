"""The one place where an exception becomes an HTTP answer.

Invariants and semantics: the body is ``{"error": {"reason", "message", ...}}``, always valid JSON. The text of an
exception that Kev did not raise on purpose never leaves the process: the caller gets an id, the log the traceback
under the same id. 429 and 503 carry Retry-After.

Not here: failures inside an event stream (``gateway.events`` sends the same body as an event).
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InvalidRequestError, InvariantError, KevError, QueueFullError
from kev.gateway.encoding import encode
from kev.gateway.exchange import ClientGoneError

_log = logging.getLogger(__name__)

_HTTP_REASONS = {
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    408: "BODY_TIMEOUT",
    413: "BODY_TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
}
_HTTP_MESSAGES = {
    404: "there is no such path; see GET /health, GET /ready and POST /v1/query",
    405: "this path does not take that method; the Allow header names those it takes",
}
_MAX_VIOLATIONS = 100
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as the caller sees it."""

    http_status: int
    body: dict[str, object]
    headers: dict[str, str]


def failure_of(error: Exception, request_id: str | None = None) -> Failure:
    """What to tell the caller about ``error``; logs it when it is a bug."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        status = error.status_code
        headers.update(error.headers or {})
        told: dict[str, object] = {
            "reason": _HTTP_REASONS.get(status, "HTTP_ERROR"),
            "message": _HTTP_MESSAGES.get(status, error.detail),
        }
    elif not isinstance(error, KevError) or isinstance(error, InvariantError) or type(error) is KevError:
        status = 500
        told = {"reason": KevError.reason, "message": _log_bug(error)}
    else:
        status = error.http_status
        told = {"reason": error.reason, "message": str(error)}
        if isinstance(error, InvalidRequestError):
            shown = error.violations[:_MAX_VIOLATIONS]
            told["violations"] = [{"field": v.field, "message": v.message} for v in shown]
    if request_id is not None:
        told["request_id"] = request_id
    if status in (429, 503):
        seconds = error.retry_after_s if isinstance(error, QueueFullError) else _RETRY_AFTER_S
        headers["retry-after"] = _whole_seconds(seconds)
        if isinstance(error, QueueFullError) and math.isfinite(seconds):
            # Not in the standard, but clients of OpenAI's API know it; in whole seconds many come back at once.
            headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
    return Failure(status, {"error": told}, headers)


def _whole_seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds))) if math.isfinite(seconds) else "60"


def _log_bug(error: Exception) -> str:
    bug_id = secrets.token_hex(8)
    _log.error("internal error %s", bug_id, exc_info=error)
    return f"internal error, id {bug_id}"


def error_response(error: Exception, request_id: str | None = None, http_status: int | None = None) -> Response:
    """``error`` as an answer; ``http_status`` overrides the error's own."""
    failure = failure_of(error, request_id)
    headers = dict(failure.headers)
    status = http_status or failure.http_status
    if status == 503:
        headers.setdefault("retry-after", _whole_seconds(_RETRY_AFTER_S))
    return Response(encode(failure.body), status, headers, media_type="application/json")


class ErrorBoundary:
    """ASGI middleware: every exception below becomes an answer, unless the answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application inside the boundary."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (ClientDisconnect, ClientGoneError):
            return
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)
