"""Counts, times and traces HTTP requests.

Invariants and semantics: labels are the templates of the routes, known methods and status codes; whatever else a client
makes up is ``other``. A request that its client left before an answer began has status 499. The caller's traceparent
is the running call's from here on; questions get a span, looking around does not.

Not here: the values (``common.metrics``), the routes (``gateway.app``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.metrics import catalogue as names
from common.metrics.port import Reading
from common.telemetry import Telemetry
from common.tracing.context import HEADER, accept, current_trace
from common.tracing.port import SpanKind

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_CLIENT_GONE = 499


class HttpWatch:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry
        self._num_open = 0
        telemetry.metrics.add_source(self._readings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, watched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = time.monotonic(), _CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        current_trace.set(accept(_header(scope, HEADER)))
        self._num_open += 1
        try:
            with self._span(scope):
                await self._app(scope, receive, watched)
        finally:
            self._num_open -= 1
            self._count(scope, status, time.monotonic() - started_s)

    def _span(self, scope: Scope) -> AbstractContextManager[None]:
        if scope["method"] != "POST":
            return nullcontext()
        return self._telemetry.tracer.span("kev.http", SpanKind.SERVER, {"http.request.method": "POST"})

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        path = _template(scope)
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        self._telemetry.metrics.count(names.HTTP_REQUESTS, path, method, str(status))
        self._telemetry.metrics.observe(names.HTTP_SECONDS, seconds, path)

    def _readings(self) -> Iterable[Reading]:
        return [Reading(names.HTTP_OPEN, self._num_open)]


def _template(scope: Scope) -> str:
    """The path of the route that a request met, with the names of its parameters."""
    routes = (route for route in scope["app"].routes if isinstance(route, Route))
    return next((route.path for route in routes if route.matches(scope)[0] is not Match.NONE), _OTHER)


def _header(scope: Scope, name: str) -> str | None:
    values = (value.decode("latin-1") for key, value in scope["headers"] if key == name.encode())
    return next(values, None)
