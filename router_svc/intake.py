"""Registration and publication one after the other, for stores that cannot do both in one act.

Invariants and semantics: see ``common.ports.Intake``. Nothing is published of a request that is not registered.

Not here: when a request is taken in (``service``).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import KevError
from common.ports import RequestRegistry, WorkStreams
from common.types import RequestRecord, WorkItem


class TwoSteps:
    """``Intake`` of a registry and work streams."""

    def __init__(self, registry: RequestRegistry, work: WorkStreams) -> None:
        self._registry = registry
        self._work = work

    async def accept(self, record: RequestRecord, items: Sequence[WorkItem]) -> list[KevError | None] | None:
        """Register a request and publish items of it; see ``common.ports.Intake``."""
        if not await self._registry.register(record):
            return None
        try:
            return [*await self._work.publish(items)] if items else []
        except KevError as error:
            return [error] * len(items)
