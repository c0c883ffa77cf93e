"""The fault proxy passes bytes on unchanged, and breaks what it is told to break, when it is told to."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import (
    Blackhole,
    CutAfterBytes,
    CutBeforeReply,
    Delay,
    Direction,
    Fault,
    FaultProxy,
    Refuse,
    Rewrite,
    Throttle,
)

LIMIT_BYTES = 1 << 20
CUT = (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError)


class Echo:
    """An upstream that answers each line with the same line and remembers what it got."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.lines.append(line)
                writer.write(line)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Echo]:
    yield Echo()


@pytest.fixture
async def proxy(upstream: Echo) -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, limit=LIMIT_BYTES)
    async with server, FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


class Caller:
    """A client of the upstream through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, proxy: FaultProxy) -> Caller:
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    async def ask(self, line: bytes) -> bytes:
        self.writer.write(line)
        await self.writer.drain()
        return await self.reader.readuntil()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


@pytest.fixture
async def caller(proxy: FaultProxy) -> AsyncIterator[Caller]:
    caller = await Caller.of(proxy)
    yield caller
    await caller.close()


async def settled(proxy: FaultProxy) -> None:
    await settled_but(proxy, 0)


async def settled_but(proxy: FaultProxy, num_open: int) -> None:
    async with asyncio.timeout(5):
        while proxy.num_open > num_open:
            await asyncio.sleep(0.001)


async def test_without_a_fault_everything_passes(proxy: FaultProxy, caller: Caller) -> None:
    """A proxy that changes, drops or reorders bytes by itself would blame Kev for its own mistakes."""
    block = bytes(range(11, 256)) * 1500 + b"\n"
    assert await caller.ask(b"hello\n") == b"hello\n"
    caller.writer.write(block)
    assert await caller.reader.readexactly(len(block)) == block
    caller.writer.write_eof()
    assert await caller.reader.read() == b""
    await settled(proxy)
    assert proxy.num_connections == 1


async def test_a_fault_that_does_nothing_counts_nothing(proxy: FaultProxy, caller: Caller) -> None:
    """A test whose fault never fired must be able to see that."""
    async with proxy.broken_by(Fault()) as fault:
        assert await caller.ask(b"one\n") == b"one\n"
    assert fault.num_fired == 0
    with pytest.raises(TimeoutError):
        await fault.wait_fired(0.01)


@pytest.mark.parametrize("num_bytes", [0, 3, 6])
async def test_cut_after_bytes(proxy: FaultProxy, upstream: Echo, caller: Caller, num_bytes: int) -> None:
    """A message cut in the middle must reach the upstream up to exactly that byte."""
    async with proxy.broken_by(CutAfterBytes(num_bytes)) as fault:
        with pytest.raises(CUT):
            await caller.ask(b"12345\n")
        await settled(proxy)
    assert fault.num_fired == 1
    assert upstream.lines in ([], [b"12345\n"[:num_bytes]])
    again = await Caller.of(proxy)
    assert await again.ask(b"after\n") == b"after\n"
    await again.close()


async def test_cut_in_the_reply(proxy: FaultProxy, upstream: Echo, caller: Caller) -> None:
    """Half a reply is worse than none for a client that keeps the connection."""
    async with proxy.broken_by(CutAfterBytes(2, Direction.REPLY)) as fault:
        with pytest.raises(CUT):
            await caller.ask(b"12345\n")
    assert fault.num_fired == 1
    assert upstream.lines == [b"12345\n"]


async def test_cut_between_request_and_reply(proxy: FaultProxy, upstream: Echo, caller: Caller) -> None:
    """The ambiguous case: the upstream acted, the client cannot know."""
    async with proxy.broken_by(CutBeforeReply(b"commit")) as fault:
        assert await caller.ask(b"read\n") == b"read\n"
        with pytest.raises(CUT):
            await caller.ask(b"commit 1\n")
        again = await Caller.of(proxy)
        assert await again.ask(b"commit 1\n") == b"commit 1\n"
        await again.close()
    assert upstream.lines == [b"read\n", b"commit 1\n", b"commit 1\n"]
    assert fault.num_fired == 1


async def test_refused_connections(proxy: FaultProxy, upstream: Echo, caller: Caller) -> None:
    """New connections fail at once; those that are open stay, until they are cut."""
    async with proxy.broken_by(Refuse()) as fault:
        refused = await Caller.of(proxy)
        with pytest.raises(CUT):
            await refused.ask(b"lost\n")
        await refused.close()
        assert await caller.ask(b"kept\n") == b"kept\n"
    assert fault.num_fired == 1
    assert await proxy.cut_all() == 1
    with pytest.raises(CUT):
        await caller.ask(b"lost\n")
    assert upstream.lines == [b"kept\n"]


@pytest.mark.parametrize(
    "fault", [Delay(0.03), Delay(0.03, Direction.REPLY), Throttle(300)], ids=["both", "one", "rate"]
)
async def test_slow_proxy(proxy: FaultProxy, caller: Caller, fault: Fault) -> None:
    """Slow is not broken: the bytes come, late."""
    begin = time.monotonic()
    async with proxy.broken_by(fault):
        assert await caller.ask(b"123456789\n") == b"123456789\n"
    assert time.monotonic() - begin >= 0.03
    assert fault.num_fired >= 1


async def test_blackhole_holds_back_and_then_delivers(proxy: FaultProxy, upstream: Echo, caller: Caller) -> None:
    """A partition loses nothing that TCP would send again; it only tells nobody."""
    async with proxy.broken_by(Blackhole()) as fault:
        waiting = asyncio.create_task(caller.ask(b"late\n"))
        await fault.wait_fired(5)
        await asyncio.sleep(0.02)
        assert upstream.lines == []
        assert not waiting.done()
    assert await waiting == b"late\n"
    assert fault.num_fired == 1


async def test_a_reply_that_says_something_else(proxy: FaultProxy, upstream: Echo, caller: Caller) -> None:
    """A server of another version, without having one; only what it says is changed."""
    async with proxy.broken_by(Rewrite(b"version:7", b"version:6")) as fault:
        assert await caller.ask(b"name:a\n") == b"name:a\n"
        assert fault.num_fired == 0
        assert await caller.ask(b"version:7.2\n") == b"version:6.2\n"
    assert fault.num_fired == 1
    assert upstream.lines == [b"name:a\n", b"version:7.2\n"]
    with pytest.raises(ValueError, match="differ in length"):
        Rewrite(b"long", b"longer")


async def test_a_redirected_proxy(proxy: FaultProxy, upstream: Echo, caller: Caller) -> None:
    """After a fail-over new connections reach the successor; an old one goes on where it is."""
    successor = Echo()
    async with await asyncio.start_server(successor.serve, "127.0.0.1", 0) as server:
        assert await caller.ask(b"before\n") == b"before\n"
        proxy.redirect(server.sockets[0].getsockname()[1])
        assert await caller.ask(b"still\n") == b"still\n"
        again = await Caller.of(proxy)
        assert await again.ask(b"after\n") == b"after\n"
        await again.close()
        await settled_but(proxy, 1)
    assert (upstream.lines, successor.lines) == ([b"before\n", b"still\n"], [b"after\n"])


async def test_upstream_that_is_away(upstream: Echo) -> None:
    """A server that restarts is away for a moment; the proxy must outlive it and not hang its clients."""
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with FaultProxy(port) as proxy:
        caller = await Caller.of(proxy)
        with pytest.raises(CUT):
            await caller.ask(b"nobody\n")
        await caller.close()
        async with await asyncio.start_server(upstream.serve, "127.0.0.1", port):
            again = await Caller.of(proxy)
            assert await again.ask(b"back\n") == b"back\n"
            await again.close()


async def test_leaving_ends_every_connection(upstream: Echo) -> None:
    """A proxy that leaves connections behind makes the next test fail."""
    async with await asyncio.start_server(upstream.serve, "127.0.0.1", 0) as server:
        async with FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
            callers = [await Caller.of(proxy) for _ in range(3)]
            assert [await caller.ask(b"x\n") for caller in callers] == [b"x\n"] * 3
            assert proxy.num_open == 3
        assert proxy.num_open == 0
        for caller in callers:
            with pytest.raises(CUT):
                await caller.ask(b"y\n")
            await caller.close()


async def test_leaving_while_connections_arrive(upstream: Echo) -> None:
    """What was being accepted at that moment is not closed by anybody, and fails whatever test runs then."""
    async with await asyncio.start_server(upstream.serve, "127.0.0.1", 0) as server:
        for num_turns in range(6):
            async with FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
                probes = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(3)]
                for _ in range(num_turns):
                    await asyncio.sleep(0)
            for probe in probes:
                probe.close()
        gc.collect()
