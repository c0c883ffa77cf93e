"""A cluster of real processes, a steady load, every cheap fault of the matrix once, in a fixed order; then the verdict.

The part of the fault matrix that runs with every ``make test``; ``make chaos`` runs the rest, and longer. No step waits
for a time, so that a slow machine is only slower. Redis syncs every write: on a busy disk it would otherwise come back
without its last second, and an aggregator that is killed next makes a stream meet other pieces, which is not promised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.types import Durability
from tests.chaos import sabotage
from tests.chaos.cluster import Cluster, ClusterSettings
from tests.chaos.history import Broken
from tests.chaos.trial import LOAD, judged, loaded, progress, second_attempts

STEADY = replace(LOAD, num_clients=5, filler_chars=(20, 120), timeout_ms=60_000)


def script(cluster: Cluster) -> dict[str, Callable[[], Awaitable[int]]]:
    """The faults in their order."""
    return {
        "node killed at work": partial(sabotage.crash_node, cluster),
        "reply lost after the act": partial(sabotage.cut_replies, cluster),
        "node stopped past its lease": partial(sabotage.freeze_node, cluster),
        "client gone from its stream": partial(sabotage.leave_a_stream, cluster),
        "client withdraws": partial(sabotage.withdraw, cluster),
        "groups destroyed": partial(sabotage.destroy_groups, cluster),
        "Redis killed": partial(sabotage.kill_redis, cluster),
        "aggregator killed": partial(sabotage.crash, cluster.aggregators[0]),
        "router killed": partial(sabotage.crash, cluster.routers[0]),
        **{f"{service.name} replaced": partial(sabotage.replace, service) for service in cluster.services},
    }


@pytest.mark.store
@pytest.mark.timeout(400)
async def test_every_cheap_fault_once(tmp_path: Path) -> None:
    """An answer is lost, comes twice, reaches a stranger or has a gap, because a process or a connection went away."""
    async with Cluster(tmp_path, ClusterSettings(num_nodes=2, durability=Durability.DURABLE)) as cluster:
        async with loaded(cluster, STEADY) as workload:
            for name, fault in script(cluster).items():
                num_fired = await fault()
                assert num_fired > 0, f"{name}: it never happened"
                workload.history.add(Broken(fault=name, num_fired=num_fired))
                await progress(workload, STEADY.num_clients)
        report = await judged(cluster, workload.history)
        assert report.num_faults >= len(script(cluster))
        assert report.num_answers > report.num_placeholders, report.summary()
        assert second_attempts(workload.history) > 0
        await cluster.until_idle(60)
