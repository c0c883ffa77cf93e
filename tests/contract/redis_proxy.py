"""A TCP proxy that loses replies.

Not here: what is tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class LossyProxy:
    """Forwards everything; when armed, it cuts the next connection whose command has been answered."""

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self._target_port = target_port
        self._delay_s = delay_s
        self._armed_for: bytes | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.url = ""
        self.num_lost = 0

    def lose_reply_to(self, command: bytes) -> None:
        """Let the next command that contains these bytes run, and cut the connection instead of the reply."""
        self._armed_for = command

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        lose = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                replies = group.create_task(self._forward_replies(server_reader, writer, lose))
                while data := await reader.read(65_536):
                    if self._armed_for is not None and self._armed_for in data:
                        self._armed_for = None
                        lose.set()
                    server_writer.write(data)
                replies.cancel()
        except* OSError:
            pass
        finally:
            self._connections.discard(task)
            for end in (writer, server_writer):
                end.close()

    async def _forward_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lose: asyncio.Event
    ) -> None:
        while data := await reader.read(65_536):
            await asyncio.sleep(self._delay_s)
            if lose.is_set():
                self.num_lost += 1
                writer.transport.abort()
                return
            writer.write(data)
        writer.close()

    async def close(self) -> None:
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


@asynccontextmanager
async def lossy_proxy(url: str, delay_s: float = 0.0) -> AsyncIterator[LossyProxy]:
    """A proxy in front of a server."""
    proxy = LossyProxy(urlsplit(url).port or 6379, delay_s)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
