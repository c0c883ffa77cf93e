"""One of several consumers of the memory transport: the work streams as the core of one device sees them.

Invariants and semantics: at most one item of a channel is leased through one consumer. Work that nobody has taken goes
to the consumer that holds least. A consumer whose core ran out of memory over a question leaves it to the others; one
that has left leaves them all it held. Both count as an attempt, and in its last attempt a question ends as it does.

Not here: the streams themselves (``common.memory``), which cores there are (``kev.cores``).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import KevError, OutOfMemoryError, QueueFullError
from common.memory import MemoryTransport
from common.ports import Lease, Report, ReportState
from common.types import WorkItem


class ConsumerGroup:
    """The consumers of one transport that are at work."""

    def __init__(self, transport: MemoryTransport, max_attempts: int) -> None:
        self.transport = transport
        self._max_attempts = max_attempts
        self._names: set[str] = set()

    def join(self, name: str) -> MemoryConsumer:
        """A further consumer."""
        self._names.add(name)
        return MemoryConsumer(self, name)

    def leave(self, name: str) -> None:
        """A consumer has ended; the others take over what it held. A second call does nothing."""
        if name in self._names:
            self._names.remove(name)
            self.transport.leave(name, is_last_but_one=len(self._names) == 1)

    def has_others(self, name: str) -> bool:
        """Somebody else is at work."""
        return bool(self._names - {name})

    def may_try_again(self, lease: Lease, name: str) -> bool:
        """Another consumer may take the question, and it has an attempt left."""
        return self.has_others(name) and lease.attempt < self._max_attempts


class MemoryConsumer:
    """``WorkStreams`` of one consumer; see ``common.ports`` for what the methods do."""

    def __init__(self, group: ConsumerGroup, name: str) -> None:
        self._group = group
        self._work = group.transport
        self._name = name

    async def publish(self, items: Sequence[WorkItem]) -> list[QueueFullError | None]:
        """Append items to their channels' streams."""
        return await self._work.publish(items)

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        """Take up to ``max_items`` items, at most one per channel, leaving others their share."""
        return await self._work.lease(max_items, wait_s, self._name)

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Extend leases."""
        return await self._work.renew(leases)

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        """Tell the aggregator what happened; a question that ran out of memory here is tried elsewhere, if it may."""
        given_up = [report.lease.lease_id for report in reports if self._is_for_others(report)]
        if not given_up:
            return await self._work.report(reports)
        self._work.give_up([report.lease for report in reports if report.lease.lease_id in given_up])
        return await self._work.report(reports)  # those that were given up are stale now

    async def hand_back(self, leases: Sequence[Lease]) -> list[bool]:
        """Return unstarted items at once."""
        return await self._work.hand_back(leases)

    async def dead_letter(self, lease: Lease, error: KevError) -> bool:
        """Set the item aside."""
        return await self._work.dead_letter(lease, error)

    async def cancel(self, request_id: str, question_indexes: Sequence[int] | None = None) -> None:
        """Withdraw questions of a request."""
        await self._work.cancel(request_id, question_indexes)

    async def cancellations(self, wait_s: float) -> list[tuple[str, int]]:
        """Leased questions of this consumer withdrawn since the last call."""
        return await self._work.cancellations(wait_s, self._name)

    async def depths(self) -> list[int]:
        """Items per channel that are waiting or leased."""
        return await self._work.depths()

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """None: nothing is lost in memory."""
        return await self._work.lost(questions)

    def _is_for_others(self, report: Report) -> bool:
        error = None if report.outcome is None else report.outcome.error
        return (
            error is not None
            and error.reason == OutOfMemoryError.reason
            and self._group.may_try_again(report.lease, self._name)
        )
