"""``common.health_check`` against real gRPC servers: what probes of containers see."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.health_check import health_problem
from common.tls_files import TlsFiles
from tests.integration.test_grpc_security import authority

SERVICE = "kev.v1.RouterService"


class Server:
    """A server with nothing but health on it."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        port = (
            self._server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else self._server.add_secure_port("127.0.0.1:0", credentials)
        )
        self.address = f"127.0.0.1:{port}"

    async def set(self, name: str, status: str) -> None:
        await self.health.set(name, health_pb2.HealthCheckResponse.ServingStatus.Value(status))

    async def problem(self, service: str = SERVICE, tls: TlsFiles | None = None, timeout_s: float = 5.0) -> str | None:
        return await asyncio.to_thread(health_problem, self.address, service, tls=tls, timeout_s=timeout_s)

    async def __aenter__(self) -> Server:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


async def test_a_service_is_healthy_while_it_says_so(server: Server) -> None:
    """A service that is not ready gets traffic, or one that is gets none."""
    assert str(await server.problem()).startswith("NOT_FOUND")
    await server.set(SERVICE, "SERVING")
    assert await server.problem() is None
    await server.set(SERVICE, "NOT_SERVING")
    assert await server.problem() == "NOT_SERVING"


async def test_the_server_as_a_whole_is_asked_without_a_name(server: Server) -> None:
    """Liveness asks for one service and restarts a process for what that service waits for."""
    await server.set(SERVICE, "NOT_SERVING")
    await server.set("", "SERVING")
    assert await server.problem("") is None


async def test_a_server_that_does_not_answer_is_unhealthy(server: Server) -> None:
    """A probe of a hung process hangs itself."""

    async def check(request: object, context: object) -> None:
        await asyncio.sleep(30)

    server.health.Check = check
    hung = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(server.health, hung)
    port = hung.add_insecure_port("127.0.0.1:0")
    await hung.start()
    problem = await asyncio.to_thread(health_problem, f"127.0.0.1:{port}", SERVICE, timeout_s=0.2)
    await hung.stop(0)
    assert problem is not None and problem.startswith("DEADLINE_EXCEEDED")


async def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    """With TLS every probe fails; or a probe trusts anybody."""
    ours, other = authority(tmp_path, "ours"), authority(tmp_path, "other")
    certificate, key = (Path(name) for name in ours.issue("kev-router"))
    ca = Path(ours.ca_file)
    pair = (key.read_bytes(), certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], root_certificates=ca.read_bytes(), require_client_auth=True)
    async with Server(credentials) as server:
        await server.set(SERVICE, "SERVING")
        own = {"cert_file": str(certificate), "key_file": str(key)}
        good = TlsFiles(ca_file=str(ca), server_name="kev-router", **own)
        assert await server.problem(tls=good) is None
        for wrong in (
            TlsFiles(ca_file=str(ca), server_name="kev-router"),
            TlsFiles(ca_file=other.ca_file, server_name="kev-router", **own),
            TlsFiles(ca_file=str(ca), server_name="kev-gateway", **own),
            TlsFiles(ca_file=str(tmp_path / "nowhere.crt"), **own),
            None,
        ):
            assert await server.problem(tls=wrong, timeout_s=1.0) is not None


async def test_the_program_is_what_probes_run(server: Server) -> None:
    """The exit code says healthy whatever the answer is."""
    codes = []
    for status in ("SERVING", "NOT_SERVING"):
        await server.set(SERVICE, status)
        command = [sys.executable, "-m", "common.health_check", server.address, SERVICE]
        codes.append((await asyncio.to_thread(subprocess.run, command, capture_output=True)).returncode)
    assert codes == [0, 1]
