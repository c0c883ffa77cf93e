"""The gateway on a real port: connections that break, uploads that are refused, and how the server starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from common.errors import ConfigError, ModelError
from kev.gateway.backend import Backend
from kev.gateway.server import Lifecycle, serve
from kev.gateway.settings import GatewaySettings
from kev.gateway.testing import ScriptedBackend, silent


class Server:
    """``serve`` in a task, with what it told."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()
        self.task: asyncio.Task[None]

    async def start(self, open_backend: Callable[[], Awaitable[Backend]], settings: GatewaySettings) -> None:
        lifecycle = Lifecycle(on_listening=self.listening.set_result, on_ready=self.ready.set, stop=self.stop)
        self.task = asyncio.create_task(serve(open_backend, "127.0.0.1", 0, settings, lifecycle))
        told: set[asyncio.Future[Any]] = {self.listening, self.task}
        await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listening.result().removeprefix("http://").split(":")
        return host, int(port)


@contextlib.asynccontextmanager
async def running(
    backend: ScriptedBackend, settings: GatewaySettings | None = None
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    async def opened() -> Backend:
        return backend

    server = Server()
    await server.start(opened, settings or GatewaySettings())
    await server.ready.wait()
    async with httpx.AsyncClient(base_url=server.listening.result(), timeout=20) as client:
        yield server, client
    server.stop.set()
    await server.task
    assert backend.closed


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def send_raw(server: Server, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a query over a connection of its own and leave it open."""
    reader, writer = await asyncio.open_connection(*server.address)
    content = json.dumps(body).encode()
    writer.write(b"POST /v1/query HTTP/1.1\r\nHost: kev\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_broken_connection_frees_its_slots(stream: bool, reset: bool) -> None:
    """Slots stay busy when a client closes or resets its connection."""
    backend = ScriptedBackend(silent)
    async with running(backend) as (server, client):
        other = asyncio.create_task(client.post("/v1/query", json={"queries": ["z"], "request_id": "other"}))
        reader, writer = await send_raw(server, {"queries": [*"abcdefgh"], "stream": stream})
        await until(lambda: backend.num_running == 9)
        if stream:
            await reader.readuntil(b"started")
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: backend.num_running == 1)
        backend.finish("other", 0, ["Z"])
        assert (await other).json()["results"][0]["text"] == "Z"


async def test_connections_that_break_at_once_leave_nothing_behind() -> None:
    """One in a hundred requests of clients that left at once slips through and keeps its slots."""
    backend = ScriptedBackend(silent)
    async with running(backend) as (server, client):
        for attempt in range(100):
            _, writer = await send_raw(server, {"queries": ["a", "b"], "stream": attempt % 2 == 0})
            await asyncio.sleep(attempt % 6 / 1000)
            writer.close()
        await until(lambda: backend.num_running == 0)
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(0.02)
        assert backend.num_running == 0


async def test_an_upload_over_the_limit_gets_its_answer() -> None:
    """The client of a large upload sees a reset connection instead of the limit."""
    async with running(ScriptedBackend(), GatewaySettings(max_body_bytes=10_000)) as (_, client):
        for _ in range(3):
            response = await client.post("/v1/query", content=b"x" * 20_000_000)
            assert response.status_code == 413
            assert "10000 bytes" in response.json()["error"]["message"]


async def test_a_drain_finishes_what_is_open_and_refuses_what_is_new() -> None:
    """A rolling restart loses answers or is killed because liveness fails."""
    backend = ScriptedBackend(silent)
    async with running(backend) as (server, client):
        plain = asyncio.create_task(client.post("/v1/query", json={"queries": ["a"], "request_id": "plain"}))
        stream = asyncio.create_task(
            client.post("/v1/query", json={"queries": ["a"], "request_id": "stream", "stream": True})
        )
        await until(lambda: backend.num_running == 2)
        server.stop.set()
        async with asyncio.timeout(10):
            while (ready := await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.001)
        assert ready.status_code == 503
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/query", json={"queries": ["late"]})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        backend.finish("plain", 0, ["A"])
        backend.finish("stream", 0, ["B"])
        assert (await plain).json()["state"] == "complete"
        assert "event: done" in (await stream).text
        await server.task


@pytest.mark.parametrize("second_signal", [False, True])
async def test_the_grace_period_ends(second_signal: bool) -> None:
    """An endless request keeps the process from stopping, or is cut without a word."""
    backend = ScriptedBackend(silent)
    settings = GatewaySettings(drain_grace_s=60 if second_signal else 0.05)
    async with running(backend, settings) as (server, client):
        stream = asyncio.create_task(client.post("/v1/query", json={"queries": ["a"], "stream": True}))
        await until(lambda: backend.num_running == 1)
        server.stop.set()
        if second_signal:
            await until(lambda: not server.stop.is_set())
            server.stop.set()
        assert '"NODE_DRAINING"' in (await stream).text
        await server.task


async def test_health_answers_while_the_model_loads() -> None:
    """A slow start is taken for a hang, or traffic arrives before the model."""
    loaded = asyncio.Event()

    async def opened() -> Backend:
        await loaded.wait()
        return ScriptedBackend()

    server = Server()
    await server.start(opened, GatewaySettings())
    async with httpx.AsyncClient(base_url=server.listening.result()) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        loaded.set()
        await server.ready.wait()
        assert (await client.get("/ready")).status_code == 200
    server.stop.set()
    await server.task


async def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    """The process stays up for ever without a model."""

    async def opened() -> Backend:
        raise ModelError("there is no model at /x; set core.model_path")

    server = Server()
    await server.start(opened, GatewaySettings())
    with pytest.raises(ModelError, match="no model at /x"):
        await server.task


async def test_stopping_while_the_model_loads() -> None:
    """SIGTERM during a slow start is not heard."""

    async def opened() -> Backend:
        await asyncio.Event().wait()
        raise AssertionError

    server = Server()
    await server.start(opened, GatewaySettings())
    server.stop.set()
    await server.task


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.1"])
async def test_an_address_that_cannot_be_bound_is_one_sentence(host: str) -> None:
    """A taken port ends in a traceback, or in a server that nobody reaches."""

    async def opened() -> Backend:
        return ScriptedBackend()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port} .*--port"):
            await serve(opened, host, port)


SERVE_SCRIPTED = """
import sys
from kev import cli
from kev.gateway.testing import ScriptedBackend

async def open_engine(source, progress, telemetry):
    progress("a licence line")
    return ScriptedBackend()

cli.open_engine = open_engine
sys.exit(cli.main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_kev_serve_ends_well_on_a_signal(number: signal.Signals) -> None:
    """``kev serve`` dies by the signal, with a traceback or a failure code."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE_SCRIPTED], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
    ) as process:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if "ready" in line:
                process.send_signal(number)
        assert process.wait(timeout=20) == 0
    output = "".join(told)
    assert "listening on http://127.0.0.1:" in output and "a licence line" in output
    assert "finishing what is open" in output and "Traceback" not in output
