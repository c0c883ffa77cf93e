"""The three tiers of the embedded form, put together on one event loop.

Invariants and semantics: this is a composition root; it builds the rooms and wires them, and decides nothing.

Not here: what callers use (``kev.engine``), the engine cores (``kev.cores``).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from aggregator_svc.service import AggregatorService
from aggregator_svc.settings import AggregatorSettings
from common.config import Config
from common.memory import MemoryTransport
from common.ports import Clock
from kev.cores import Cores
from kev.engine_watch import EngineWatch
from kev.parts import EngineParts
from router_svc.embedding import ProjectionTable
from router_svc.service import RouterService
from router_svc.settings import RouterSettings

if TYPE_CHECKING:
    from common.telemetry import Telemetry


class Tiers:
    """Router, engine cores and aggregator around one transport."""

    def __init__(
        self,
        config: Config,
        parts: EngineParts,
        clock: Clock,
        telemetry: Telemetry | None,
        tenant_weights: tuple[tuple[str, float], ...] = (),
    ) -> None:
        router = config.router
        # Twice what the router places: a question that timed out stays leased until the step in flight ends.
        max_entries = 2 * router.channel_queue_size
        transport = MemoryTransport(
            num_channels=router.channel_pool_size,
            clock=clock,
            max_entries_per_channel=max_entries,
            max_bytes_per_channel=router.channel_queue_bytes,
            priority_step_ms=router.priority_step_ms,
        )
        watch = EngineWatch(telemetry)
        results = watch.results(transport)
        self.aggregator = AggregatorService(
            results=results, work=transport, clock=clock, settings=AggregatorSettings.from_config(config)
        )
        settings = replace(
            RouterSettings.from_config(config),
            max_context=parts.max_context_under(config),
            tenant_weights=tenant_weights,
        )
        table = None if parts.projection is None else ProjectionTable(parts.projection, config.router.semantic_planes)
        self.router = RouterService(
            tokenizer=parts.tokenizer,
            work=watch.publications(transport),
            registry=self.aggregator,
            clock=clock,
            settings=settings,
            projection=table,
        )
        self.aggregator.add_listener(self.router.on_outcome)
        self.entrance = watch.entrance(self.router, self.aggregator, results)
        self.cores = Cores(config, parts, transport, clock, watch)

    async def run(self) -> None:
        """Run all three until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.aggregator.run(), name="kev-aggregator")
            group.create_task(self.router.run(), name="kev-router")
            self.cores.start(group)

    def begin_drain(self) -> None:
        """Accept nothing new."""
        self.router.begin_drain()
        self.aggregator.begin_drain()
