"""Work streams that are watched are work streams: the contract of ``common.ports`` holds through them."""

from __future__ import annotations

from typing import Any

from common.errors import KevError
from common.ports import Lease, Report, ReportState
from common.types import WorkItem
from common.watched_work import WatchedWork, WorkWatcher
from tests.contract.test_memory_transport import MemoryHarness
from tests.contract.transport_suite import Ends, TransportHarness, TransportSuite, make_item, outcome
from tests.work_calls import commit, hand_back, publish, renew


class Diary(WorkWatcher):
    """Writes everything down."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def published(self, item: WorkItem, error: KevError | None) -> None:
        self.lines.append(("published", item.question_index, error and error.reason))

    def leased(self, lease: Lease) -> None:
        self.lines.append(("leased", lease.item.question_index, lease.attempt))

    def renewed(self, lease: Lease, held: bool) -> None:
        self.lines.append(("renewed", lease.item.question_index, held))

    def reported(self, report: Report, state: ReportState) -> None:
        self.lines.append(("reported", report.lease.item.question_index, state))

    def handed_back(self, lease: Lease) -> None:
        self.lines.append(("handed_back", lease.item.question_index))


class WatchedHarness(MemoryHarness):
    """Every side has a watcher of its own."""

    async def create(self, **sizes: Any) -> Ends:
        bare = await super().create(**sizes)
        return Ends(
            router=WatchedWork(bare.router, WorkWatcher()),
            node=WatchedWork(bare.node, Diary(), Diary()),
            other_node=WatchedWork(bare.other_node),
            results=bare.results,
        )


class TestWatchedWork(TransportSuite):
    """The whole suite of the memory transport, watched."""

    def make_harness(self) -> TransportHarness:
        return WatchedHarness()


async def test_a_watcher_is_told_of_everything_once() -> None:
    """A metric misses what happened, or counts it twice."""
    diary = Diary()
    harness = MemoryHarness()
    ends = await harness.create(num_channels=1, max_entries_per_channel=2)
    work = WatchedWork(ends.router, diary)
    refusals = await work.publish([make_item(index) for index in range(3)])
    assert [refusal is None for refusal in refusals] == [True, True, False]
    (lease,) = await work.lease(1, 0)
    assert await hand_back(work, lease)
    (lease,) = await work.lease(1, 0)
    assert await renew(work, lease)
    await commit(work, lease, outcome(lease))
    assert await renew(work, lease) is False
    assert diary.lines == [
        ("published", 0, None),
        ("published", 1, None),
        ("published", 2, "QUEUE_FULL"),
        ("leased", 0, 1),
        ("handed_back", 0),
        ("leased", 0, 1),
        ("renewed", 0, True),
        ("reported", 0, ReportState.COMMITTED),
        ("renewed", 0, False),
    ]
    await publish(work, make_item(3))
    assert diary.lines[-1] == ("published", 3, None)
