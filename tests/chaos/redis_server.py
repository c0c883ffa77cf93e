"""A Redis or Valkey server of one's own, started as ``kev up`` starts it: AOF, private folder, random loopback port.

Invariants and semantics: what it has acknowledged survives its own death (not the machine's), unless ``forget`` comes
between two lives, or the disk was too busy for what it had not synced yet; with ``durable`` that too.

Not here: faults between it and its clients (``proxy``).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from common.types import Durability
from kev.up.commands import store_command
from tests.chaos.processes import Health, ServiceProcess
from tests.contract.redis_servers import BINARIES
from tests.ports import free_port

_AOF_FOLDER = "appendonlydir"
_REMEMBERED = "remembered"


class RedisServer(ServiceProcess):
    """One server. ``kill`` and ``start`` keep what was written; ``forget`` in between does not.

    Attributes:
        port: where it listens, the same in every life.
    """

    def __init__(
        self, folder: Path, kind: str = "valkey", *options: str, durability: Durability = Durability.AOF
    ) -> None:
        """A server of a kind in ``tests.contract.redis_servers.BINARIES``."""
        self.port = free_port()
        store = store_command(BINARIES[kind], str(folder), self.port, durability)
        command = [*store, "--loglevel", "warning", *options]
        super().__init__(f"redis-{kind}", command, folder, _ping(self.port))

    @property
    def url(self) -> str:
        """For clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    def remember(self) -> None:
        """Keep what is written by now for ``forget``."""
        shutil.rmtree(self._folder / _REMEMBERED, ignore_errors=True)
        shutil.copytree(self._folder / _AOF_FOLDER, self._folder / _REMEMBERED)

    def forget(self, *, but_remembered: bool = False) -> None:
        """Throw away what was written, all of it or what came after ``remember``; only while it does not run."""
        if self.running:
            raise RuntimeError("a running server cannot be made to forget its files")
        shutil.rmtree(self._folder / _AOF_FOLDER, ignore_errors=True)
        if but_remembered:
            shutil.copytree(self._folder / _REMEMBERED, self._folder / _AOF_FOLDER)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[aioredis.Redis]:
        """A client for looking and for breaking things; it waits for a server that is being restarted."""
        client = aioredis.Redis(port=self.port, protocol=2, retry=Retry(ConstantBackoff(0.2), 50))
        try:
            yield client
        finally:
            await client.aclose()


def _ping(port: int) -> Health:
    async def answers() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"PING\r\n")
            async with asyncio.timeout(2):
                return await reader.readline() == b"+PONG\r\n"  # not while it loads
        finally:
            writer.close()
            await writer.wait_closed()

    return answers
