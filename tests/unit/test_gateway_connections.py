"""What a connection that breaks does to the request it carried."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from kev.gateway.app import Gateway, create_app
from kev.gateway.settings import GatewaySettings
from kev.gateway.testing import ScriptedBackend, silent
from tests.unit.http_probe import SETTINGS, Connection, client_of, events_of, query, until


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(backend, SETTINGS)) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slots(stream: bool) -> None:
    """Slots stay busy with answers that nobody will read."""
    backend = ScriptedBackend(silent)
    app = create_app(backend, SETTINGS)
    body = query(*"abcdefgh", stream=stream, request_id="gone")
    leaving = Connection(app, "POST", "/v1/query", body)
    staying = Connection(app, "POST", "/v1/query", query("z", stream=stream, request_id="stays"))
    await until(lambda: backend.num_running == 9 and (leaving.sent or not stream))
    leaving.drop()
    await leaving.task
    assert backend.num_running == 1 and backend.cancelled == ["gone"]
    backend.finish("stays", 0, ["Z"])
    await staying.task
    assert b'"text":"Z"' in staying.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_turns", range(12))
async def test_no_moment_to_leave_keeps_a_slot(num_turns: int, stream: bool) -> None:
    """A client that leaves while its request is being submitted slips through, and its slots stay busy."""
    backend = ScriptedBackend(silent)
    connection = Connection(create_app(backend, SETTINGS), "POST", "/v1/query", query("a", "b", stream=stream))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    connection.drop()
    await connection.task
    assert backend.num_running == 0


async def test_a_client_that_leaves_while_waiting_for_room_gives_up_its_place(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of lost clients queue for room and run when it comes."""
    outcome: list[str] = []

    async def wait_for_room(queries: object, /, **options: object) -> str:
        outcome.append("waiting")
        try:
            await asyncio.Event().wait()
        finally:
            outcome.append("left")
        return "never"

    monkeypatch.setattr(backend, "submit", wait_for_room)
    connection = Connection(create_app(backend, SETTINGS), "POST", "/v1/query", query("a"))
    await until(lambda: outcome)
    connection.drop()
    await connection.task
    assert outcome == ["waiting", "left"] and backend.cancelled == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/requests/r/stream"), ("GET", "/v1/requests/r?wait_ms=60000"), ("POST", "/v1/query")],
)
async def test_readers_of_a_background_request_never_cancel_it(method: str, path: str) -> None:
    """A closed browser tab cancels a request that others wait for."""
    backend = ScriptedBackend(silent)
    app = create_app(backend, SETTINGS)
    await Connection(app, "POST", "/v1/query", query("a", request_id="r", background=True)).task
    reader = Connection(app, method, path, query("a", request_id="r"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not reader.task.done()
    reader.drop()
    await reader.task
    assert backend.cancelled == [] and backend.num_running == 1


async def test_a_retry_keeps_the_request_of_a_broken_connection() -> None:
    """The late notice that the first connection broke cancels the retry's request."""
    backend = ScriptedBackend(silent)
    app = create_app(backend, SETTINGS)
    body = query("a", request_id="r")
    first = Connection(app, "POST", "/v1/query", body)
    await until(lambda: backend.num_running)
    retry = Connection(app, "POST", "/v1/query", body)
    for _ in range(20):
        await asyncio.sleep(0)
    first.drop()
    await first.task
    assert backend.num_running == 1
    retry.drop()
    await retry.task
    assert backend.cancelled == ["r"]


async def test_a_client_that_reads_nothing_counts_as_gone() -> None:
    """A stalled reader holds its slots until the answers are complete."""
    backend = ScriptedBackend(silent)
    app = create_app(backend, GatewaySettings(send_timeout_s=0.001))
    connection = Connection(app, "POST", "/v1/query", query("a", stream=True), stalled=True)
    await connection.task
    assert backend.num_running == 0 and len(backend.submitted) == 1


async def test_the_end_of_the_grace_period_ends_open_exchanges_with_an_error() -> None:
    """Shutdown cuts connections without a word."""
    backend = ScriptedBackend(silent)
    gateway = Gateway(SETTINGS)
    gateway.attach(backend)
    app = gateway.build_app()
    plain = Connection(app, "POST", "/v1/query", query("a"))
    stream = Connection(app, "POST", "/v1/query", query("b", stream=True))
    await until(lambda: backend.num_running == 2 and stream.sent)
    gateway.stop.set()
    await asyncio.gather(plain.task, stream.task)
    assert plain.sent[0]["status"] == 503
    assert json.loads(plain.content)["error"]["reason"] == "NODE_DRAINING"
    assert list(events_of(stream.content))[-1][2]["error"]["reason"] == "NODE_DRAINING"
    assert backend.num_running == 0
