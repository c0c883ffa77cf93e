"""The driver does to real processes what it says, and leaves none behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.chaos.processes import ServiceProcess, grpc_serving, tcp_open
from tests.chaos.proxy import Blackhole, CutBeforeReply, FaultProxy
from tests.chaos.redis_server import RedisServer
from tests.contract.redis_servers import BINARIES
from tests.ports import free_port

LISTEN = """
import signal, socket, sys
print("life begins", flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
"""


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    port = free_port()
    async with ServiceProcess(
        "service", [sys.executable, "-c", LISTEN, str(port)], tmp_path, tcp_open(port)
    ) as service:
        yield service
    assert not service.running


async def test_lives_of_a_process(service: ServiceProcess) -> None:
    """A driver that kills the wrong life, or starts none, tests nothing."""
    first = service.pid
    assert await service.healthy()
    await service.restart()
    assert service.pid != first
    service.terminate()
    assert await service.wait_ended() == 7
    assert not await service.healthy()
    service.start()
    await service.wait_healthy()
    assert service.num_starts == 3
    assert service.log.count("life begins") == 3
    assert service.cpu_s() > 0
    assert service.resident_bytes() > 1 << 20


async def test_a_stopped_process_is_killed_all_the_same(service: ServiceProcess) -> None:
    """SIGTERM waits for SIGCONT; a stopped process left behind would hold its port for ever."""
    service.pause()
    service.terminate()
    await asyncio.sleep(0.05)
    assert service.running
    service.resume()
    assert await service.wait_ended(10) == 7
    service.start()
    await service.wait_healthy()
    service.pause()  # the fixture ends it


async def test_a_process_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    """Waiting the whole time for a process that is dead, and then saying nothing, costs an afternoon."""
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)broken has ended.*no such model"):
        async with ServiceProcess("broken", command, tmp_path, tcp_open(free_port())):
            pass
    assert time.monotonic() - begin < 10


async def test_grpc_health_is_understood(tmp_path: Path) -> None:
    """A service that is up and not serving must not be taken for a healthy one."""
    reply = {b"\n\x06router": b"\x08\x02"}

    class Health(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def check(request: bytes, context: object) -> bytes:
                return reply[request]

            return grpc.unary_unary_rpc_method_handler(check)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Health(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    service = ServiceProcess("none", [], tmp_path, grpc_serving(port, "router"))
    assert not await service.healthy()
    reply[b"\n\x06router"] = b"\x08\x01"
    assert await service.healthy()
    await server.stop(None)
    assert not await service.healthy()


@pytest.mark.parametrize("kind", sorted(BINARIES))
async def test_a_redis_server_keeps_what_it_acknowledged(tmp_path: Path, kind: str) -> None:
    """Restart with AOF, and restart empty, are two different faults."""
    async with RedisServer(tmp_path, kind) as server:
        async with server.client() as client:
            await client.set("kept", "yes")
        await server.restart()
        async with server.client() as client:
            assert await client.get("kept") == b"yes"
        server.kill()
        server.forget()
        server.start()
        await server.wait_healthy()
        async with server.client() as client:
            assert await client.get("kept") is None


async def test_a_reply_of_redis_lost_after_the_write(tmp_path: Path) -> None:
    """The ambiguous case that commits must survive, made with the real server."""
    async with RedisServer(tmp_path) as server, FaultProxy(server.port) as proxy, server.client() as client:
        async with proxy.broken_by(CutBeforeReply(b"XADD")) as fault:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"XADD log * field value\r\n")
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            writer.close()
        assert fault.num_fired == 1
        assert await client.xlen("log") == 1
        async with proxy.broken_by(Blackhole()) as hole:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"PING\r\n")
            await hole.wait_fired(5)
        assert await reader.readline() == b"+PONG\r\n"
        writer.close()
        await writer.wait_closed()
