"""The aggregator's registry in the simulation: every question has its outcome when its time budget is spent.

Invariants and semantics: a question that ended in the moment in which its time was up has ended, once.

Not here: who is told about outcomes (``world``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.traffic.node import Key
from common.memory import MemoryTransport
from common.types import ChannelResult, FinishReason, RequestRecord


class Deadlines:
    """The registry: knows every request, and ends those whose time is up."""

    def __init__(self, work: MemoryTransport) -> None:
        self._work = work
        self._records: dict[Key, RequestRecord] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._expiring: set[asyncio.Task[None]] = set()

    async def register(self, record: RequestRecord) -> bool:
        """Start the clock of every question; ids are never used twice here."""
        loop = asyncio.get_running_loop()
        for question in record.questions:
            key = record.request_id, question.question_index
            self._records[key] = record
            self._timers[key] = loop.call_later(question.timeout_ms / 1000, self._ring, key)
        return True

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        """Nobody asks for a request again."""
        return False

    async def withdraw(self, request_id: str) -> None:
        """The router refused it after all."""
        for key in [key for key in self._records if key[0] == request_id]:
            self.let_go(key)
        await self._work.cancel(request_id)

    async def unregistered(self, request_ids: Sequence[str]) -> list[str]:
        """Nothing is lost."""
        return []

    async def restore(self, record: RequestRecord, age_ms: int) -> None:
        """Nothing is lost."""

    def let_go(self, key: Key) -> RequestRecord:
        """A question has its outcome."""
        self._timers.pop(key).cancel()
        return self._records.pop(key)

    def _ring(self, key: Key) -> None:
        task = asyncio.get_running_loop().create_task(self._expire(key))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    async def _expire(self, key: Key) -> None:
        record = self._records.get(key)
        if record is None:  # it ended in the same moment
            return
        outcome = ChannelResult(
            request_id=key[0],
            question_index=key[1],
            channel_id=record.questions[key[1]].route.channel_id,
            finish_reason=FinishReason.TIMEOUT_RUNNING,
        )
        await self._work.settle([outcome])
