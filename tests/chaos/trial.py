"""A trial: a load, what is done to the cluster under it, the verdict.

Invariants and semantics: a trial without answers or without its fault is no trial and fails. The records of a bad run
are left in the cluster's folder.

Not here: the faults (``sabotage``), what is right (``checker``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tests.chaos.checker import Report, check
from tests.chaos.cluster import Cluster, until
from tests.chaos.history import Broken, Committed, Granted, History, make_nonce
from tests.chaos.workload import Workload, WorkloadSettings

LOAD = WorkloadSettings(
    num_requests=10**9, duration_s=600.0, settle_s=60.0, filler_chars=(0, 60), num_clients=6, max_questions=3
)
"""Everything that clients do, until it is stopped."""
PLAIN = replace(LOAD, cancel_share=0.0, deadline_share=0.0)
"""Nothing but answers may come of it."""
LONG = "." * 220
"""About a quarter of a second of work."""
_FIRST_S = 60.0


@asynccontextmanager
async def loaded(cluster: Cluster, settings: WorkloadSettings = LOAD) -> AsyncIterator[Workload]:
    """A workload goes on inside the block, and to its end after it."""
    async with cluster.client() as client:
        workload = Workload(client, settings)
        running = asyncio.create_task(workload.run())
        try:
            await progress(workload, settings.num_clients)
            yield workload
            workload.stop()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def progress(workload: Workload, num_requests: int, timeout_s: float = _FIRST_S) -> None:
    """Return when so many more requests have ended.

    Raises:
        AssertionError: they have not in time.
    """
    goal = len(workload.latencies_s) + num_requests

    async def reached() -> bool:
        return len(workload.latencies_s) >= goal

    await until(reached, timeout_s, f"{num_requests} more requests to end")


async def judged(cluster: Cluster, history: History, **fired: int) -> Report:
    """The checker's verdict over a run in which these faults happened so often.

    Raises:
        AssertionError: a fault did not happen, nothing was answered, a guarantee is broken, or a process has ended by
            itself.
    """
    for service in cluster.services:
        assert service.running, f"{service.name} has ended\n{service.log[-4_000:]}"
    for fault, number in fired.items():
        assert number > 0, f"{fault} never happened"
        history.add(Broken(fault=fault, num_fired=number))
    await cluster.note_attempts(history)
    report = check(history)
    path = cluster.redis.log_path.parent / "history.jsonl"
    if not report.clean:
        history.write(path)
    assert report.clean, f"records in {path}\n{report.summary()}"
    assert report.num_answers > 0
    assert "INTERNAL_BUG" not in report.reasons, report.reasons
    return report


def recomputed(history: History) -> set[tuple[str, int]]:
    """Questions that were begun again after their commit."""
    done: set[tuple[str, int]] = set()
    again: set[tuple[str, int]] = set()
    for record in history:
        if isinstance(record, Committed):
            done.add((record.request_id, record.question_index))
        elif isinstance(record, Granted) and (record.request_id, record.question_index) in done:
            again.add((record.request_id, record.question_index))
    return again


def second_attempts(history: History) -> int:
    """Attempts after the first one."""
    return sum(isinstance(record, Granted) and record.attempt > 1 for record in history)


def texts(*more: str) -> list[str]:
    """Questions, each with a nonce before its text."""
    numbers = random.Random(7)
    return [make_nonce(numbers) + text for text in more]
