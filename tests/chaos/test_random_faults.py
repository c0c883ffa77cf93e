"""Faults of every kind, one after the other at random, under a load that never stops: nothing is lost or doubled.

``KEV_CHAOS_SECONDS`` says how long, ``KEV_CHAOS_SEED`` repeats a run's choices; both are in what the test prints.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.chaos.checker import check
from tests.chaos.cluster import Cluster, ClusterSettings
from tests.chaos.history import Broken, History
from tests.chaos.processes import ServiceProcess
from tests.chaos.proxy import Blackhole, CutAfterBytes, CutBeforeReply, Delay, Fault, FaultProxy, Refuse, Throttle
from tests.chaos.workload import Workload, WorkloadSettings

pytestmark = pytest.mark.chaos

DURATION_S = float(os.environ.get("KEV_CHAOS_SECONDS", "45"))
SEED = int(os.environ.get("KEV_CHAOS_SEED", "0")) or int(time.time())
SETTLE_S = 60.0


class Saboteur:
    """Breaks one thing at a time and mends it."""

    def __init__(self, cluster: Cluster, history: History, numbers: random.Random) -> None:
        self._cluster = cluster
        self._history = history
        self._numbers = numbers
        self.num_fired: Counter[str] = Counter()
        self._kinds: list[Callable[[], Awaitable[tuple[str, int]]]] = [
            self._kill,
            self._stop,
            self._terminate,
            self._break_link,
            self._break_link,
            self._break_door,
            self._cut_everything,
            self._restart_redis,
        ]

    async def run(self, duration_s: float) -> None:
        """Until the time is up; everything works again at the end. A fault counts once, however much it hit."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            name, fired = await self._numbers.choice(self._kinds)()
            self.num_fired[name] += fired > 0
            self._history.add(Broken(fault=name, num_fired=int(fired > 0)))
            await asyncio.sleep(self._numbers.uniform(0.0, 0.3))

    def _victim(self) -> ServiceProcess:
        return self._numbers.choice(self._cluster.services)

    async def _kill(self) -> tuple[str, int]:
        victim = self._victim()
        await victim.restart()
        return f"kill {victim.name}", 1

    async def _stop(self) -> tuple[str, int]:
        victim = self._victim()
        victim.pause()
        await asyncio.sleep(self._numbers.uniform(0.1, 5.0))
        victim.resume()
        return f"stop {victim.name}", 1

    async def _terminate(self) -> tuple[str, int]:
        victim = self._victim()
        await victim.restart(gently=True)
        return f"terminate {victim.name}", 1

    async def _break_link(self) -> tuple[str, int]:
        name = self._numbers.choice(sorted(self._cluster.links))
        return await self._break(f"link of {name}", self._cluster.links[name])

    async def _break_door(self) -> tuple[str, int]:
        name = self._numbers.choice(sorted(self._cluster.doors))
        return await self._break(f"door of {name}", self._cluster.doors[name])

    async def _break(self, name: str, proxy: FaultProxy) -> tuple[str, int]:
        numbers = self._numbers
        faults: list[Fault] = [
            CutBeforeReply(times=3),
            CutAfterBytes(numbers.randint(0, 2_000), times=3),
            Delay(numbers.uniform(0.001, 0.1)),
            Throttle(numbers.uniform(5_000, 100_000)),
            Blackhole(),
            Refuse(),
        ]
        async with proxy.broken_by(numbers.choice(faults)) as fault:
            if isinstance(fault, Refuse):
                await proxy.cut_all()
            await asyncio.sleep(numbers.uniform(0.1, 1.5))
        return f"{type(fault).__name__} {name}", fault.num_fired

    async def _cut_everything(self) -> tuple[str, int]:
        proxies = [*self._cluster.links.values(), *self._cluster.doors.values()]
        return "cut everything", sum([await proxy.cut_all() for proxy in proxies])

    async def _restart_redis(self) -> tuple[str, int]:
        self._cluster.redis.kill()
        await asyncio.sleep(self._numbers.uniform(0.0, 1.0))
        self._cluster.redis.start()
        await self._cluster.redis.wait_healthy()
        return "restart redis", 1


@pytest.mark.timeout(DURATION_S + SETTLE_S + 120)
async def test_random_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A guarantee that holds against each fault alone breaks when they come together."""
    numbers = random.Random(SEED)
    settings = WorkloadSettings(
        seed=SEED,
        num_clients=16,
        num_requests=10**9,
        duration_s=DURATION_S,
        settle_s=SETTLE_S,
        timeout_ms=60_000,
        filler_chars=(0, 20),
        max_questions=8,
    )
    async with Cluster(tmp_path, ClusterSettings(num_nodes=2)) as cluster, cluster.client() as client:
        workload = Workload(client, settings)
        saboteur = Saboteur(cluster, workload.history, numbers)
        async with asyncio.TaskGroup() as group:
            group.create_task(workload.run())
            await saboteur.run(DURATION_S)
            workload.stop()
        await cluster.note_attempts(workload.history)
        report = check(workload.history)
        if not report.clean:
            workload.history.write(tmp_path / "history.jsonl")
        with capsys.disabled():
            print(f"\nKEV_CHAOS_SEED={SEED} KEV_CHAOS_SECONDS={DURATION_S:g}: {report.summary()}")
            print("  " + ", ".join(f"{number} {name}" for name, number in sorted(saboteur.num_fired.items())))
        assert report.clean, f"seed {SEED}; records in {tmp_path}\n{report.summary()}"
        assert report.num_faults >= DURATION_S / 5
        assert report.num_answers > 3 * DURATION_S
        assert "INTERNAL_BUG" not in report.reasons
        await cluster.until_idle(30)
