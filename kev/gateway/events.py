"""A request's events as a stream of server-sent events.

Invariants and semantics: what fails before the first byte is an ordinary HTTP error; what fails later is one ``error``
event with reason and message, and the end of the stream. A stream that ends without ``error`` ended with ``done``. A
silent stream carries comments. No context is held across a send but the submission's ownership, and the iterator of
events is always closed, by the task that read from it.

Not here: the form of an event (``gateway.encoding``), who may withdraw the request (``gateway.exchange``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import InvariantError
from common.types import StreamEvent, StreamEventType
from kev.gateway.encoding import PING, encode_error_event, encode_event
from kev.gateway.exchange import ClientGoneError, while_connected
from kev.gateway.failures import failure_of
from kev.gateway.settings import GatewaySettings

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
MEDIA_TYPE = "text/event-stream"

_REFUSAL_WINDOW_S = 0.05
"""The answer begins after this time at the latest; a stream that refuses earlier can still be an HTTP error."""

OpenStream = Callable[[], AbstractAsyncContextManager[AsyncIterator[StreamEvent]]]


class EventStreamResponse(Response):
    """Sends the events of one stream until ``done``, or until the client leaves."""

    def __init__(self, open_stream: OpenStream, settings: GatewaySettings, stop: asyncio.Event) -> None:
        super().__init__(status_code=200, headers=HEADERS, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._open_stream = open_stream
        self._settings = settings
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream.

        Raises:
            KevError: nothing has been sent yet, and the stream was refused.
            ClientGoneError: the client left, or takes nothing any more.
        """
        wire = _Wire(send, self.raw_headers, self._settings.send_timeout_s)
        try:
            await while_connected(receive, self._stop, self._run(wire))
        except ClientGoneError:
            raise
        except Exception as error:
            if not wire.started:
                raise
            await wire.send_last(encode_error_event(failure_of(error).body))

    async def _run(self, wire: _Wire) -> None:
        async with self._open_stream() as events:
            pending = _next(events)
            try:
                await asyncio.wait({pending}, timeout=_REFUSAL_WINDOW_S)
                if pending.done() and pending.result() is None:
                    await wire.send_nothing()
                    return
                await wire.start()
                while (event := await self._pinging(pending, wire)) is not None:
                    if event.type is StreamEventType.DONE:
                        await wire.send_last(encode_event(event))
                        return
                    await wire.send(encode_event(event))
                    pending = _next(events)
                raise InvariantError("a stream of events ended before done")
            finally:
                pending.cancel()
                await asyncio.wait({pending})
                if isinstance(events, AsyncGenerator):
                    await events.aclose()

    async def _pinging(self, pending: asyncio.Future[StreamEvent | None], wire: _Wire) -> StreamEvent | None:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=self._settings.ping_interval_s)
            if done:
                return pending.result()
            await wire.send(PING)


def _next(events: AsyncIterator[StreamEvent]) -> asyncio.Future[StreamEvent | None]:
    return asyncio.ensure_future(anext(events, None))


class _Wire:
    """The sending half of one connection.

    Every method raises ``ClientGoneError`` when the client took nothing for the whole send timeout.
    """

    def __init__(self, send: Send, raw_headers: list[tuple[bytes, bytes]], send_timeout_s: float) -> None:
        self._send = send
        self._raw_headers = raw_headers
        self._send_timeout_s = send_timeout_s
        self.started = False

    async def start(self) -> None:
        """Commit to an event stream."""
        self.started = True
        await self._hand_on({"type": "http.response.start", "status": 200, "headers": self._raw_headers})

    async def send_nothing(self) -> None:
        """204: there is no event after the given index, and a browser's EventSource stops asking."""
        self.started = True
        await self._hand_on({"type": "http.response.start", "status": 204, "headers": []})
        await self.send_last(b"")

    async def send(self, content: bytes) -> None:
        """Send a part of the answer; waits while the client is slow."""
        await self._hand_on({"type": "http.response.body", "body": content, "more_body": True})

    async def send_last(self, content: bytes) -> None:
        """Send the last part of the answer."""
        await self._hand_on({"type": "http.response.body", "body": content})

    async def _hand_on(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError from None
