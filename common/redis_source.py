"""What an aggregator of the distributed form knows of requests that were registered by routers: ``RequestSource``.

Not here: registering (``redis_registry``), events as they come (``redis_streams``).
"""

from __future__ import annotations

from common.ports import RegisteredRequest
from common.redis_registry import RedisRegistry
from common.redis_streams import RedisTransport
from common.types import ChannelEvent


class RedisSource:
    """``RequestSource`` in Redis."""

    def __init__(self, registry: RedisRegistry, transport: RedisTransport) -> None:
        self._registry = registry
        self._transport = transport

    async def find(self, request_id: str) -> RegisteredRequest | None:
        """The request; see ``common.ports.RequestSource``."""
        found = await self._registry.find(request_id)
        return None if found is None else RegisteredRequest(record=found.record, age_ms=found.age_ms)

    async def history(self, request_id: str) -> list[ChannelEvent]:
        """All events of the request so far."""
        return await self._transport.history(request_id)

    async def overdue(self) -> list[str]:
        """Ids of the requests of which a question has run out of time."""
        return await self._registry.unfinished(overdue_only=True)

    async def complete(self, request_id: str) -> None:
        """Every question has its outcome."""
        await self._registry.complete(request_id)
