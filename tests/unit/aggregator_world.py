"""An aggregator over the memory transport; a test plays router and node.

Not here: what is tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aggregator_svc.service import AggregatorService
from aggregator_svc.settings import AggregatorSettings
from common.clock import ManualClock
from common.memory import MemoryTransport
from common.ports import Clock, Lease, Report, ReportState, RequestSource
from common.types import (
    ChannelEvent,
    ChannelResult,
    IsolationLevel,
    Prompt,
    QuestionRecord,
    SamplingParams,
    WorkItem,
)
from tests.unit.aggregator_builders import request

NUM_CHANNELS = 20


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class World:
    """A service with its transport; the test plays router and node."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        transport: type[MemoryTransport] = MemoryTransport,
        source: RequestSource | None = None,
        **settings: Any,
    ) -> None:
        self.clock = ManualClock()
        used_clock = clock or self.clock
        self.transport = transport(num_channels=NUM_CHANNELS, clock=used_clock)
        self.service = AggregatorService(
            results=self.transport,
            work=self.transport,
            clock=used_clock,
            settings=AggregatorSettings(**settings),
            source=source,
        )
        self.outcomes: list[ChannelResult] = []
        self.service.add_listener(self.outcomes.append)

    async def submit(self, questions: int | list[QuestionRecord] = 1, request_id: str = "r", **changes: Any) -> None:
        record = request(questions, request_id, **changes)
        assert await self.service.register(record)
        for expected in record.questions:
            await self.transport.publish([make_item(record.request_id, expected)])

    async def lease(self) -> dict[int, Lease]:
        return {lease.item.question_index: lease for lease in await self.transport.lease(NUM_CHANNELS, 0)}

    async def say(self, lease: Lease, *events: ChannelEvent) -> ReportState:
        """Report events under a lease, as a node does."""
        [state] = await self.transport.report([Report(lease=lease, events=events)])
        await settle()
        return state

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, and the service notice."""
        self.clock.advance(seconds)
        self.service._gathering.due_sooner.wake_all()
        await settle()

    async def report(self, *events: ChannelEvent) -> None:
        """Put events into the result stream as a node without leases could not."""
        self.transport._events.extend(events)
        self.transport._events_changed.wake_all()
        await settle()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.service.run())
        await settle()
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def make_item(request_id: str, expected: QuestionRecord) -> WorkItem:
    return WorkItem(
        request_id=request_id,
        question_index=expected.question_index,
        channel_id=expected.route.channel_id,
        prompt=Prompt(ids=(1, 2, 3)),
        num_shared=0,
        sampling=SamplingParams(),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=expected.timeout_ms,
    )
