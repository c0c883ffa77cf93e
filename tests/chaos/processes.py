"""Real processes under a test's hand: start, wait for health, kill, stop, continue, terminate, start again.

Invariants and semantics: a process writes into one log file in its own folder, all its lives one after the other; a
driver that gives up says what the log ends with. Only processes that were started here get signals, by their own id.
Leaving the context ends the process, stopped or not.

Not here: what is started (``redis_server``, ``cluster``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import httpx

Health = Callable[[], Awaitable[bool]]
_POLL_S = 0.05
_LOG_TAIL_CHARS = 4_000
_SERVING = b"\x08\x01"
"""A grpc.health.v1.HealthCheckResponse with status SERVING."""


class ServiceProcess:
    """One process, through all its lives.

    Attributes:
        name: of the process, in messages and file names.
        num_starts: how often it was started.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, health: Health, env: Mapping[str, str] | None = None
    ) -> None:
        """Nothing runs before ``start``.

        Args:
            name: of the process.
            command: program and arguments.
            folder: working directory, and where the log goes.
            health: whether it works; what it raises of OSError, httpx and grpc errors means no.
            env: variables beside those of this process.
        """
        self.name = name
        self.num_starts = 0
        self._command = list(command)
        self._folder = folder
        self._health = health
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    async def __aenter__(self) -> Self:
        self.start()
        try:
            await self.wait_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def running(self) -> bool:
        """Whether it has not ended; a stopped process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """What it writes to standard output and error."""
        return self._folder / f"{self.name}.log"

    @property
    def log(self) -> str:
        """Everything it has written."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def start(self) -> None:
        """Start it, once more if it has ended."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=os.environ | self._env, stdout=log, stderr=log
            )
        self._stopped = False
        self.num_starts += 1

    async def wait_healthy(self, timeout_s: float = 60.0) -> float:
        """Return when it works; the seconds that it took.

        Raises:
            RuntimeError: it ended, or did not become healthy in time; with the end of its log.
        """
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + timeout_s and self.running:
            if await self.healthy():
                return time.monotonic() - begin_s
            await asyncio.sleep(_POLL_S)
        state = "is not healthy" if self.running else "has ended"
        raise RuntimeError(
            f"{self.name} {state} after {time.monotonic() - begin_s:.1f} s\n{self.log[-_LOG_TAIL_CHARS:]}"
        )

    async def healthy(self) -> bool:
        """Whether it works now."""
        try:
            return await self._health()
        except (OSError, httpx.HTTPError, grpc.RpcError):
            return False

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; does nothing to one that has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it does not run, and nobody is told."""
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self._stopped = False

    def terminate(self) -> None:
        """SIGTERM: it is asked to end."""
        self._signal(signal.SIGTERM)

    async def wait_ended(self, timeout_s: float = 35.0) -> int:
        """Return its exit status when it has ended.

        Raises:
            RuntimeError: it has not ended in time; with the end of its log.
        """
        until_s = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > until_s:
                raise RuntimeError(f"{self.name} has not ended after {timeout_s} s\n{self.log[-_LOG_TAIL_CHARS:]}")
            await asyncio.sleep(_POLL_S)
        assert self._process is not None
        return self._process.wait()

    async def restart(self, *, gently: bool = False) -> float:
        """End it by SIGKILL (``gently``: SIGTERM), start it again; the seconds until it was healthy."""
        if gently:
            self.terminate()
            await self.wait_ended()
        else:
            self.kill()
        self.start()
        return await self.wait_healthy()

    def cpu_s(self) -> float:
        """Processor seconds used in this life. Source: proc(5), fields 14 and 15 of ``stat``."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory in use. Source: proc(5), field 2 of ``statm``."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _signal(self, number: signal.Signals) -> None:
        if not self.running or self._process is None:
            raise RuntimeError(f"{self.name} does not run\n{self.log[-_LOG_TAIL_CHARS:]}")
        self._process.send_signal(number)


def grpc_serving(port: int, service: str = "") -> Health:
    """Whether the standard gRPC health service says SERVING for a service; the empty name means the whole process."""
    name = service.encode()
    request = bytes([0x0A, len(name)]) + name  # a HealthCheckRequest

    async def serving() -> bool:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
            return bool(await check(request, timeout=2.0) == _SERVING)

    return serving


def http_ready(port: int) -> Health:
    """Whether the gateway says that requests would be answered."""

    async def ready() -> bool:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/ready", timeout=2.0)).status_code == 200

    return ready


def tcp_open(port: int) -> Health:
    """Whether somebody listens."""

    async def is_open() -> bool:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
        return True

    return is_open
