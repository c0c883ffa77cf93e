"""The Redis transport under the conformance suite.

Not here: servers (``redis_servers``), tests.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import uuid4

import redis.asyncio as aioredis

from common.clock import SystemClock
from common.redis_keys import LEASED, WORK, WORK_GROUP, KeyKind, RedisKeys
from common.redis_link import RedisLink
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_source import RedisSource
from common.redis_streams import RedisTransport
from tests.contract.transport_suite import Ends

LONG_AGO_MS = 3_600_000
AGE = """
for _, ref in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do redis.call('ZADD', KEYS[1], 0, ref) end
for place = 2, #KEYS do
  local work = KEYS[place]
  local rows = redis.pcall('XPENDING', work, ARGV[1], '-', '+', 1000)
  for _, row in ipairs(rows.err and {} or rows) do
    redis.call('XCLAIM', work, ARGV[1], row[2], 0, row[1], 'IDLE', ARGV[2], 'JUSTID')
  end
end
"""


class RedisHarness:
    """A deployment of its own with router, two nodes and aggregator, each with its own connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.deployment = f"test-{uuid4().hex[:12]}"
        self.settings = RedisTransportSettings(
            num_channels=1, node_id="base", max_deliveries=1_000, heartbeat_ttl_s=30.0, retention_s=60.0
        )
        self.link_settings = LinkSettings(url=url, deployment=self.deployment, block_s=1.0)
        self.client = aioredis.Redis.from_url(url, protocol=2)
        self.links: list[RedisLink] = []
        self.transports: list[RedisTransport] = []

    async def create(
        self, *, num_channels: int, max_entries_per_channel: int = 64, max_bytes_per_channel: int = 67_108_864
    ) -> Ends:
        self.settings = replace(
            self.settings,
            num_channels=num_channels,
            max_entries_per_channel=max_entries_per_channel,
            max_bytes_per_channel=max_bytes_per_channel,
        )
        router, node, other_node = [await self.join(name) for name in ("router", "node", "other-node")]
        return Ends(router=router, node=node, other_node=other_node, results=await self.read_as("aggregator"))

    async def read_as(self, node_id: str, url: str | None = None) -> RedisSource:
        """A process of the deployment that reads events."""
        settings = replace(self.settings, node_id=node_id, incarnation=uuid4().hex[:8])
        return RedisSource(link=await self._connect(url), settings=settings)

    async def join(self, node_id: str, url: str | None = None, **changes: object) -> RedisTransport:
        """Another process of the deployment."""
        link = await self._connect(url)
        settings = replace(self.settings, node_id=node_id, incarnation=uuid4().hex[:8], **changes)
        transport = RedisTransport(link=link, clock=SystemClock(), settings=settings)
        self.transports.append(transport)
        return transport

    async def _connect(self, url: str | None) -> RedisLink:
        link_settings = replace(self.link_settings, url=url) if url else self.link_settings
        link = await RedisLink.connect(link_settings)
        self.links.append(link)
        return link

    @property
    def prefix(self) -> str:
        return RedisKeys(self.deployment).prefix

    def key(self, kind: KeyKind, suffix: object = "") -> str:
        return RedisKeys(self.deployment).name(kind, suffix)

    def work(self, channel_id: int) -> str:
        return self.key(WORK, channel_id)

    def abandon(self, transport: RedisTransport) -> None:
        """Let a process end without a word."""
        if transport._upkeep_task is not None:
            transport._upkeep_task.cancel()
            transport._upkeep_task = None

    async def flush(self) -> None:
        """Delete whatever the deployment has, as FLUSHALL would."""
        found = [key async for key in self.client.scan_iter(match=self.prefix + "*", count=1000)]
        await self.client.delete(*found)

    async def expire_leases(self) -> None:
        """Age every pending entry in place: neither its owner nor its delivery count changes."""
        works = [self.work(channel_id) for channel_id in range(self.settings.num_channels)]
        await self.client.eval(AGE, 1 + len(works), self.key(LEASED), *works, WORK_GROUP, LONG_AGO_MS)

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def settle(self) -> None:
        await asyncio.sleep(0.03)

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()
        for link in self.links:
            await link.close()
        await self.client.aclose()
