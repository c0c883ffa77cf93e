"""Driving the gateway in tests: a client, an event-stream reader, and an exchange that can be dropped at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Scope

from kev.gateway.settings import GatewaySettings

SETTINGS = GatewaySettings(max_body_bytes=4096, ping_interval_s=30.0)
ERROR_KEYS = {"reason", "message", "violations", "request_id"}


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://kev")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after checking that its body is ASCII, valid JSON and of the one shape."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = json.loads(response.content.decode("ascii"))["error"]
    assert set(error) <= ERROR_KEYS
    assert error["reason"] and error["message"]
    return error


def events_of(content: bytes) -> Iterator[tuple[str, str | None, Any]]:
    """(event, id, data) of an event stream, read as the standard says; comments are skipped."""
    text = content.decode("ascii")
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines:
            pairs = dict(line.split(": ", 1) for line in lines)
            assert len(pairs) == len(lines), "a field appears twice in one event"
            yield pairs["event"], pairs.get("id"), json.loads(pairs["data"])


class Connection:
    """One HTTP exchange, driven by hand, that can be dropped at any moment."""

    def __init__(
        self, app: ASGIApp, method: str, path: str, body: bytes | None = b"", *, stalled: bool = False
    ) -> None:
        self.sent: list[Message] = []
        self._stalled = stalled
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        if body is not None:
            self.receive(body, more_body=False)
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path.partition("?")[0],
            "query_string": path.partition("?")[2].encode(),
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if self._stalled:
            await asyncio.Event().wait()

    def receive(self, body: bytes, *, more_body: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    def drop(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def query(*questions: object, **options: object) -> bytes:
    return json.dumps({"queries": questions, **options}).encode()
