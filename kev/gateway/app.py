"""The HTTP routes of Kev.

Invariants and semantics: nothing here computes; every handler parses, awaits the backend and encodes. ``/health``
never asks the backend, so it answers while the model is busy, loading or dead; ``/ready`` does ask. A plain or
streaming ``POST /v1/query`` lives and dies with its connection; background requests and attached streams do not.

Not here: validation of questions and options (the backend), OpenAI routes, authentication.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import DeadlineExceededError, DrainingError, InvalidRequestError, ModelError
from common.metrics.catalogue import Tier
from common.metrics.registry import CONTENT_TYPE
from common.telemetry import Telemetry
from common.types import RequestView, StreamEvent
from kev.gateway import events
from kev.gateway.backend import Backend
from kev.gateway.body import Call, read_call
from kev.gateway.encoding import encode, encode_view
from kev.gateway.exchange import Submissions, while_connected
from kev.gateway.failures import ErrorBoundary, error_response
from kev.gateway.page import page
from kev.gateway.settings import GatewaySettings
from kev.gateway.watch import HttpWatch


class Gateway:
    """The routes' shared state: the backend, once it is there, and whether new requests are taken."""

    def __init__(self, settings: GatewaySettings, telemetry: Telemetry | None = None) -> None:
        self.stop = asyncio.Event()
        """Set when open exchanges must end now."""
        self._settings = settings
        self._telemetry = telemetry or Telemetry("gateway", Tier.GATEWAY)
        self._submissions = Submissions()
        self._backend: Backend | None = None
        self._draining = False

    def attach(self, backend: Backend) -> None:
        """From now on requests go to ``backend``; until then they are refused."""
        self._backend = backend

    def begin_drain(self) -> None:
        """Refuse new requests; open exchanges go on, and polls, streams and cancellations are still answered."""
        self._draining = True

    def build_app(self) -> Starlette:
        """The ASGI application."""
        app = Starlette(
            routes=[
                Route("/", self._page, methods=["GET"]),
                Route("/v1/query", self._query, methods=["POST"]),
                Route("/v1/requests/{request_id}", self._request, methods=["GET", "DELETE"]),
                Route("/v1/requests/{request_id}/stream", self._attach, methods=["GET"]),
                Route("/v1/isolation", self._report(lambda backend: backend.isolation()), methods=["GET"]),
                Route("/v1/channels", self._report(lambda backend: backend.channels()), methods=["GET"]),
                Route("/v1/stats", self._report(lambda backend: backend.stats()), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ],
            middleware=[Middleware(HttpWatch, self._telemetry), Middleware(ErrorBoundary)],
            exception_handlers={HTTPException: _answer_http_exception},
        )
        app.router.redirect_slashes = False
        return app

    def _ask(self) -> Backend:
        if self._backend is None:
            raise ModelError("the model is still being loaded; try again when GET /ready answers 200")
        return self._backend

    async def _query(self, request: Request) -> Response:
        backend = self._ask()
        if self._draining:
            raise DrainingError("Kev is shutting down and takes no new requests; send it to another instance")
        call = await read_call(request, self._settings)
        if call.background:
            request_id = await backend.submit(call.queries, **call.options)
            location = {"location": f"/v1/requests/{quote(request_id, safe='')}"}
            view = await backend.poll(request_id)
            return _json({"request_id": request_id, "state": view.state}, 202, location)
        if call.stream:
            return events.EventStreamResponse(lambda: self._owned_stream(backend, call), self._settings, self.stop)
        content = await while_connected(request.receive, self.stop, self._answer(backend, call))
        return Response(content, media_type="application/json")

    async def _answer(self, backend: Backend, call: Call) -> bytes:
        async with self._submissions.own(backend, call.queries, call.options) as request_id:
            await backend.wait(request_id)
            return await encode_view(await backend.poll(request_id))

    @asynccontextmanager
    async def _owned_stream(self, backend: Backend, call: Call) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        async with self._submissions.own(backend, call.queries, call.options) as request_id:
            yield backend.stream(request_id, 0)

    async def _request(self, request: Request) -> Response:
        backend = self._ask()
        request_id: str = request.path_params["request_id"]
        if request.method == "DELETE":
            return _json({"request_id": request_id, "cancelled": await backend.cancel(request_id)})
        wait_ms = self._wait_ms(request)
        view = await while_connected(request.receive, self.stop, _poll(backend, request_id, wait_ms))
        return Response(await encode_view(view), media_type="application/json")

    def _wait_ms(self, request: Request) -> int:
        text = request.query_params.get("wait_ms", "0")
        limit = self._settings.max_wait_ms
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= limit):
            raise InvalidRequestError.of("wait_ms", f"must be a whole number of milliseconds from 0 to {limit}")
        return int(text)

    async def _attach(self, request: Request) -> Response:
        backend = self._ask()
        request_id: str = request.path_params["request_id"]
        from_event_index = _resume_index(request)
        await backend.poll(request_id)  # an unknown id is a 404, however late the stream would say so
        if request.method == "HEAD":
            return Response(headers=events.HEADERS, media_type=events.MEDIA_TYPE)

        @asynccontextmanager
        async def opened() -> AsyncIterator[AsyncIterator[StreamEvent]]:
            yield backend.stream(request_id, from_event_index)

        return events.EventStreamResponse(opened, self._settings, self.stop)

    def _report(self, read: Callable[[Backend], Awaitable[object]]) -> Callable[[Request], Awaitable[Response]]:
        async def report(_: Request) -> Response:
            return _json(await read(self._ask()))

        return report

    async def _page(self, _: Request) -> Response:
        return page()

    async def _health(self, _: Request) -> Response:
        return _json({"alive": True})

    async def _metrics(self, _: Request) -> Response:
        return Response(await self._telemetry.metrics.render(), media_type=CONTENT_TYPE)

    async def _ready(self, _: Request) -> Response:
        try:
            if self._draining:
                raise DrainingError("Kev is shutting down")
            async with asyncio.timeout(self._settings.ready_timeout_s):
                await self._ask().ready()
        except TimeoutError:
            message = f"the engine did not say within {self._settings.ready_timeout_s:g} s that it is ready"
            return error_response(DeadlineExceededError(message), http_status=503)
        except Exception as error:
            return error_response(error, http_status=503)
        return _json({"ready": True})


def create_app(backend: Backend, settings: GatewaySettings | None = None) -> Starlette:
    """The application over a backend that is there already."""
    gateway = Gateway(settings or GatewaySettings())
    gateway.attach(backend)
    return gateway.build_app()


async def _poll(backend: Backend, request_id: str, wait_ms: int) -> RequestView:
    if wait_ms:
        try:
            await backend.wait(request_id, wait_ms / 1000)
        except DeadlineExceededError:
            pass
    return await backend.poll(request_id)


def _resume_index(request: Request) -> int:
    text = request.headers.get("last-event-id")
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidRequestError.of("Last-Event-ID", "must be the id of the last event received, a whole number")
    return int(text) + 1


def _json(value: object, http_status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), http_status, headers, media_type="application/json")


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    return error_response(error)
