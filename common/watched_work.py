"""Work streams with somebody who looks on: for metrics and traces, without a word about them in what they watch.

Invariants and semantics: every call goes to the streams behind and its answer, errors included, comes back untouched;
a watcher is told afterwards, on the same event loop, and must neither raise nor wait.

Not here: what a watcher makes of it (the rooms' ``metrics``, ``common.tracing``).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import KevError, QueueFullError
from common.ports import Lease, Report, ReportState, WorkStreams
from common.types import WorkItem


class WorkWatcher:
    """Is told what happens to work items; does nothing with it."""

    def published(self, item: WorkItem, error: KevError | None) -> None:
        """The item is on its stream, or why it is not."""

    def leased(self, lease: Lease) -> None:
        """The lease was granted."""

    def renewed(self, lease: Lease, held: bool) -> None:
        """The lease was extended, or was found lost."""

    def reported(self, report: Report, state: ReportState) -> None:
        """Progress or the outcome was reported, or why not."""

    def handed_back(self, lease: Lease) -> None:
        """The lease was given back unstarted."""


class WatchedWork:
    """``WorkStreams`` in front of others; see ``common.ports`` for what the methods do."""

    def __init__(self, work: WorkStreams, *watchers: WorkWatcher) -> None:
        self._work = work
        self._watchers = watchers

    async def publish(self, items: Sequence[WorkItem]) -> list[QueueFullError | None]:
        """Append items to their channels' streams."""
        try:
            refusals = await self._work.publish(items)
        except KevError as error:
            self._tell_published(items, [error] * len(items))
            raise
        self._tell_published(items, refusals)
        return refusals

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        """Take up to ``max_items`` items."""
        leases = await self._work.lease(max_items, wait_s)
        for watcher in self._watchers:
            for lease in leases:
                watcher.leased(lease)
        return leases

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Extend leases."""
        held = await self._work.renew(leases)
        for watcher in self._watchers:
            for lease, is_held in zip(leases, held, strict=True):
                watcher.renewed(lease, is_held)
        return held

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        """Tell the aggregator what happened."""
        states = await self._work.report(reports)
        for watcher in self._watchers:
            for report, state in zip(reports, states, strict=True):
                watcher.reported(report, state)
        return states

    async def hand_back(self, leases: Sequence[Lease]) -> list[bool]:
        """Return unstarted items at once."""
        handed_back = await self._work.hand_back(leases)
        for watcher in self._watchers:
            for lease in leases:
                watcher.handed_back(lease)
        return handed_back

    async def dead_letter(self, lease: Lease, error: KevError) -> bool:
        """Set the item aside."""
        return await self._work.dead_letter(lease, error)

    async def cancel(self, request_id: str, question_indexes: Sequence[int] | None = None) -> None:
        """Withdraw questions of a request."""
        await self._work.cancel(request_id, question_indexes)

    async def cancellations(self, wait_s: float) -> list[tuple[str, int]]:
        """Leased questions withdrawn since the last call."""
        return await self._work.cancellations(wait_s)

    async def depths(self) -> list[int]:
        """Items per channel that are waiting or leased."""
        return await self._work.depths()

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Which published questions the transport has lost."""
        return await self._work.lost(questions)

    def _tell_published(self, items: Sequence[WorkItem], errors: Sequence[KevError | None]) -> None:
        for watcher in self._watchers:
            for item, error in zip(items, errors, strict=True):
                watcher.published(item, error)
