"""A TCP proxy on loopback that breaks connections on purpose.

Invariants and semantics: without a fault every byte goes through unchanged and in order, and the end of one direction
is handed on. One fault is active at a time; it counts how often it has fired, so that a test can tell that its fault
really happened. Cutting a connection resets it on both sides (RST), as a lost machine or a NAT does. Bytes that a stall
holds back are delivered when it is healed, as TCP does after a partition.

Not here: what to break when (the tests).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)


class Direction(StrEnum):
    """Which way bytes go."""

    REQUEST = "request"
    """From the client to the upstream."""
    REPLY = "reply"


@dataclass(slots=True, eq=False)
class Passage:
    """One connection as the faults see it."""

    num_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    """Forwarded so far."""
    awaited_by: Fault | None = None
    """The fault that saw its request pass here and waits for the reply."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What becomes of a chunk."""

    forward: bytes
    cut: bool = False
    """Reset the connection after forwarding."""


class Fault:
    """What goes wrong. Without a subclass: nothing.

    Attributes:
        num_fired: how often it has happened.
    """

    def __init__(self, *, times: int | None = None) -> None:
        """A fault that happens at most ``times`` times; None: as often as it can."""
        self.num_fired = 0
        self._times = times
        self._fired = asyncio.Event()
        self._healed = asyncio.Event()

    @property
    def spent(self) -> bool:
        """It has happened as often as it may."""
        return self._times is not None and self.num_fired >= self._times

    async def wait_fired(self, timeout_s: float) -> None:
        """Return when it has happened once.

        Raises:
            TimeoutError: it did not happen in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._fired.wait()

    def heal(self) -> None:
        """End it."""
        self._healed.set()

    def fire(self) -> None:
        """Count one more."""
        self.num_fired += 1
        self._fired.set()

    def refuses(self) -> bool:
        """Whether a new connection is reset at once."""
        return False

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """What becomes of a chunk that has arrived."""
        return Ruling(chunk)


class Refuse(Fault):
    """New connections are reset at once."""

    def refuses(self) -> bool:
        """Every one until it is healed."""
        if self.spent:
            return False
        self.fire()
        return True


class CutAfterBytes(Fault):
    """A connection is reset when so many bytes have passed in one direction, be it in the middle of a message."""

    def __init__(self, num_bytes: int, direction: Direction = Direction.REQUEST, *, times: int | None = 1) -> None:
        super().__init__(times=times)
        self._num_bytes = num_bytes
        self._direction = direction

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """Forward what is left of the allowance, then cut."""
        left = self._num_bytes - passage.num_bytes[direction]
        if direction is not self._direction or len(chunk) < left or self.spent:
            return Ruling(chunk)
        self.fire()
        return Ruling(chunk[: max(0, left)], cut=True)


class CutBeforeReply(Fault):
    """The upstream gets a request and acts; the connection is reset before the client sees a byte of the reply."""

    def __init__(self, matching: bytes = b"", *, times: int | None = 1) -> None:
        """Fire only for requests that contain ``matching`` (inside one chunk)."""
        super().__init__(times=times)
        self._matching = matching

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """Let the request through; swallow the reply and cut."""
        if direction is Direction.REQUEST:
            if not self.spent and self._matching in chunk:
                passage.awaited_by = self
            return Ruling(chunk)
        if passage.awaited_by is not self or self.spent:
            return Ruling(chunk)
        self.fire()
        return Ruling(b"", cut=True)


class Delay(Fault):
    """Every chunk is late."""

    def __init__(self, delay_s: float, direction: Direction | None = None, *, times: int | None = None) -> None:
        super().__init__(times=times)
        self._delay_s = delay_s
        self._direction = direction

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """Wait, then forward."""
        if not self.spent and self._direction in (None, direction):
            self.fire()
            await asyncio.sleep(self._delay_s)
        return Ruling(chunk)


class Throttle(Fault):
    """So many bytes per second and direction, no more."""

    def __init__(self, bytes_per_s: float, *, times: int | None = None) -> None:
        super().__init__(times=times)
        self._bytes_per_s = bytes_per_s

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """Wait for as long as the chunk takes."""
        if not self.spent:
            self.fire()
            await asyncio.sleep(len(chunk) / self._bytes_per_s)
        return Ruling(chunk)


class Rewrite(Fault):
    """Replies say something else than the upstream did."""

    def __init__(self, said: bytes, instead: bytes, *, times: int | None = None) -> None:
        """Both of the same length, so that whatever counts the bytes stays right; must lie in one chunk."""
        if len(said) != len(instead):
            raise ValueError(f"{said!r} and {instead!r} differ in length")
        super().__init__(times=times)
        self._said, self._instead = said, instead

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """Replace every occurrence."""
        if direction is Direction.REQUEST or self.spent or self._said not in chunk:
            return Ruling(chunk)
        self.fire()
        return Ruling(chunk.replace(self._said, self._instead))


class Blackhole(Fault):
    """Nothing arrives, and nobody is told, until it is healed; then everything does."""

    def __init__(self, direction: Direction | None = None) -> None:
        super().__init__()
        self._direction = direction

    async def treat(self, direction: Direction, chunk: bytes, passage: Passage) -> Ruling:
        """Hold the chunk back."""
        if self._direction in (None, direction) and not self._healed.is_set():
            self.fire()
            await self._healed.wait()
        return Ruling(chunk)


class FaultProxy:
    """Listens on a free loopback port and forwards to an upstream.

    Attributes:
        fault: what goes wrong now; None: nothing.
        num_connections: connections accepted and passed on since start.
    """

    def __init__(self, upstream_port: int, upstream_host: str = "127.0.0.1") -> None:
        self.fault: Fault | None = None
        self.num_connections = 0
        self._upstream = upstream_host, upstream_port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def port(self) -> int:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("the proxy is not running")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_open(self) -> int:
        """Connections open now."""
        return len(self._open)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True  # what the kernel has accepted already may still come
        if self._server is not None:
            await self._stop_accepting(self._server)
            self._server.close()
        await self.cut_all()

    async def _stop_accepting(self, server: asyncio.Server) -> None:
        """Let connections arrive whose acceptance has begun: asyncio leaks them when the server closes meanwhile."""
        loop = asyncio.get_running_loop()
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        for _ in range(3):
            await asyncio.sleep(0)

    @asynccontextmanager
    async def broken_by(self, fault: Fault) -> AsyncIterator[Fault]:
        """The fault is active inside the block and healed after it."""
        self.fault = fault
        try:
            yield fault
        finally:
            self.fault = None
            fault.heal()

    def redirect(self, upstream_port: int) -> None:
        """New connections go to another port of the same host; open ones stay where they are."""
        self._upstream = self._upstream[0], upstream_port

    async def cut_all(self) -> int:
        """Reset every open connection; returns how many."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed or (self.fault is not None and self.fault.refuses()):
            _reset(writer)
            return
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer), name="fault-proxy")
        self._open.add(task)

        def end(_: asyncio.Task[None]) -> None:
            self._open.discard(task)
            _reset(writer)

        task.add_done_callback(end)  # also when it is cancelled before it has begun

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            return
        self.num_connections += 1
        passage = Passage()
        pumps = (
            asyncio.create_task(self._pump(Direction.REQUEST, reader, upstream_writer, passage)),
            asyncio.create_task(self._pump(Direction.REPLY, upstream_reader, writer, passage)),
        )
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if all(pump.result() for pump in done):
                await asyncio.wait(pumps)
                await _finish(writer)
        finally:
            _reset(upstream_writer)  # first: what follows may be cancelled
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter, passage: Passage
    ) -> bool:
        """Forward until the end. False: the connection is to be reset."""
        try:
            while chunk := await source.read(CHUNK_BYTES):
                fault = self.fault
                ruling = Ruling(chunk) if fault is None else await fault.treat(direction, chunk, passage)
                passage.num_bytes[direction] += len(ruling.forward)
                sink.write(ruling.forward)
                await sink.drain()
                if ruling.cut:
                    return False
            sink.write_eof()
        except OSError:
            return False
        return True


async def _finish(writer: asyncio.StreamWriter) -> None:
    """Close in order, so that what was written arrives."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once with RST; does nothing to a closed connection."""
    transport = writer.transport
    if transport.is_closing():
        return
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()
