"""HTTP over the real tiers with a scripted model: the same verdicts as the engine, and slots that come back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Message, Scope

from common.errors import InvalidRequestError
from kev.engine import AsyncEngine
from kev.gateway.app import create_app
from kev.testing import scripted_engine


@pytest.fixture
def gate() -> threading.Event:
    """Open; while it is closed no question gets its first token."""
    gate = threading.Event()
    gate.set()
    return gate


@pytest.fixture
async def engine(gate: threading.Event) -> AsyncIterator[AsyncEngine]:
    def script(prompt: str) -> str:
        gate.wait(10)
        return prompt * 2900

    engine = scripted_engine(script, {"kev": {"core": {"max_tokens": 3000}}})
    yield engine
    gate.set()
    await engine.close()


@pytest.mark.parametrize(
    "body",
    [
        {"queries": []},
        {"queries": ["good", ""]},
        {"queries": ["good", None, 42]},
        {"queries": ["good", "\ud83d"]},
        {"queries": ["good", "nul\0"]},
        {"queries": ["good"], "self": 1},
        {"queries": ["good"], "temperature": -1, "isolation": "none"},
        {"queries": ["good", "x" * 5000]},
    ],
)
async def test_http_and_engine_give_the_same_verdict(engine: AsyncEngine, body: dict[str, object]) -> None:
    """What one surface refuses, another runs, or names differently."""
    options = {key: value for key, value in body.items() if key != "queries"}
    with pytest.raises(InvalidRequestError) as refused:
        await engine.submit(body["queries"], **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(engine)), base_url="http://kev") as client:
        response = await client.post("/v1/query", content=json.dumps(body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["reason"], error["message"]) == (refused.value.reason, str(refused.value))
    assert [told["field"] for told in error["violations"]] == [told.field for told in refused.value.violations]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_slot_and_channel(
    engine: AsyncEngine, gate: threading.Event, stream: bool
) -> None:
    """A lost client's questions keep their slots, or their channels count them for ever."""
    gate.clear()
    body = json.dumps({"queries": [*"abcdefghijkl"], "stream": stream}).encode()
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/query", "query_string": b"", "headers": []}
    task = asyncio.ensure_future(create_app(engine)(scope, incoming.get, send))
    async with asyncio.timeout(10):
        while (await engine.stats()).node.num_running == 0:
            await asyncio.sleep(0.001)
        incoming.put_nowait({"type": "http.disconnect"})
        await task
        gate.set()
        while (await engine.stats()).node.num_running or any(c.num_queued for c in await engine.channels()):
            await asyncio.sleep(0.001)
    assert (await engine.stats()).node.kv_bytes_used == 0
    done = b'"done"' in b"".join(message.get("body", b"") for message in sent)
    assert not done, "the script was too short for the test to mean anything"
    assert [result.text for result in await engine.ask(["z"], max_tokens=3)] == ["zzz"]
