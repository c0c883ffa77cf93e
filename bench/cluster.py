"""A whole cluster on this machine beside the embedded engine: added latency, rates, recovery.

    python -m bench.cluster [--seconds 5] [--rounds 200] [--nodes 2] [--only latency rates recovery] [--json out.json]

Real processes on loopback, nodes that answer from a script, Redis with AOF. Latencies alternate between both forms in
one run; rates are closed loops; a recovery is the time from the fault until what it hit is answered. The goals are
published figures, reported and never enforced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.types import FinishReason, Result, StreamEventType
from inference_svc.scripted import EchoRunner
from kev.gateway.backend import Backend
from kev.testing import scripted_engine
from tests.chaos.cluster import Cluster, ClusterSettings, until

SHORT = "?"
LONG = "." * 200
ANSWERED = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_TRIES = 5
PARTS = ("latency", "rates", "recovery")
ROUTER: dict[str, object] = {"overflow_policy": "wait", "max_parallel_queries": 16, "channel_pool_size": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure to reach."""

    name: str
    unit: str
    limit: float | None = None
    """None: reported only."""
    at_most: bool = True
    """Whether less is better."""

    def reached(self, value: float) -> bool | None:
        """Whether a value is good enough; None without a limit."""
        if self.limit is None:
            return None
        return value <= self.limit if self.at_most else value >= self.limit

    def wording(self) -> str:
        """The limit in words."""
        return "" if self.limit is None else f"{'<=' if self.at_most else '>='} {self.limit:,g}"


GOALS = (
    Goal(name="added latency p50", unit="ms", limit=8.0),
    Goal(name="added latency p99", unit="ms"),
    Goal(name="submits per second and router core", unit="1/s", limit=1_000.0, at_most=False),
    Goal(name="question outcomes per second", unit="1/s", limit=2_000.0, at_most=False),
    Goal(name="recovery from a killed node", unit="s", limit=5.0),
    Goal(name="recovery from a Redis restart", unit="s", limit=2.0),
    Goal(name="recovery from a killed aggregator", unit="s"),
)
"""In the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measured figure."""

    name: str
    value: float
    note: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values, or ``share`` is not in (0, 1].
    """
    if not values or not 0 < share <= 1:
        raise ValueError(f"no {share:g} percentile of {len(values)} values")
    rank = -(-len(values) * share // 1)
    return sorted(values)[int(rank) - 1]


def added_latency(embedded_s: Sequence[float], cluster_s: Sequence[float]) -> list[Reading]:
    """What the tiers add, percentile by percentile."""
    note = (
        f"p50 embedded {1000 * percentile(embedded_s, 0.5):.2f} ms, "
        f"cluster {1000 * percentile(cluster_s, 0.5):.2f} ms; {len(cluster_s)} rounds"
    )
    return [
        Reading(
            name=f"added latency p{100 * share:.0f}",
            value=1000 * (percentile(cluster_s, share) - percentile(embedded_s, share)),
            note=note if share == 0.5 else "",
        )
        for share in (0.5, 0.99)
    ]


def rows(readings: Sequence[Reading]) -> list[tuple[str, str, str, str, str]]:
    """The report, in the order of the goals: name, value, goal, whether it is reached, note.

    Raises:
        ValueError: a reading that no goal is known for.
    """
    unknown = {reading.name for reading in readings} - {goal.name for goal in GOALS}
    if unknown:
        raise ValueError(f"no goal is known for {', '.join(sorted(unknown))}")
    found = {reading.name: reading for reading in readings}
    words = {True: "yes", False: "no", None: ""}
    return [
        (
            goal.name,
            f"{found[goal.name].value:,.3g} {goal.unit}",
            goal.wording(),
            words[goal.reached(found[goal.name].value)],
            found[goal.name].note,
        )
        for goal in GOALS
        if goal.name in found
    ]


def report(readings: Sequence[Reading], machine: dict[str, object]) -> dict[str, object]:
    """The report as JSON data."""
    goals = {goal.name: goal for goal in GOALS}
    return {
        "machine": machine,
        "readings": [
            asdict(reading) | {"unit": goals[reading.name].unit, "reached": goals[reading.name].reached(reading.value)}
            for reading in readings
        ],
    }


# ---- measuring


async def measure_latency(cluster: Cluster, num_rounds: int) -> list[Reading]:
    """One short question at a time, here and there in turn."""
    config = {"kev": {name: values for name, values in cluster.settings.config().items() if name in ("router", "core")}}
    spent: dict[str, list[float]] = {"embedded": [], "cluster": []}
    async with scripted_engine(str, config, runner=EchoRunner()) as engine, cluster.client() as client:
        backends: dict[str, Backend] = {"embedded": engine, "cluster": client}
        for number in range(num_rounds + 10):
            for name, backend in backends.items():
                begin_s = time.perf_counter()
                await _ask(backend, [SHORT])
                if number >= 10:  # the first ones open connections
                    spent[name].append(time.perf_counter() - begin_s)
    return added_latency(spent["embedded"], spent["cluster"])


async def measure_rates(cluster: Cluster, seconds: float) -> list[Reading]:
    """Submissions per processor second of the router, and outcomes per second end to end."""
    router = cluster.routers[0]
    async with cluster.client() as client:
        used_s = router.cpu_s()
        submitted = await _repeat(lambda: client.submit([SHORT], timeout_ms=60_000), num_workers=32, seconds=seconds)
        used_s = max(router.cpu_s() - used_s, 1e-3)
        await cluster.until_idle(60)
        asked = await _repeat(lambda: _ask(client, [SHORT] * 16), num_workers=16, seconds=seconds)
    return [
        Reading(
            name="submits per second and router core",
            value=submitted / used_s,
            note=f"{submitted / seconds:,.0f} per second from one client process",
        ),
        Reading(
            name="question outcomes per second",
            value=16 * asked / seconds,
            note=f"{len(cluster.nodes)} nodes, 16 questions per request, {os.cpu_count()} cores for everything",
        ),
    ]


async def measure_recovery(cluster: Cluster) -> list[Reading]:
    """From a fault until what it hit is answered."""
    return [
        Reading(name="recovery from a killed node", value=await _node_recovery(cluster)),
        Reading(name="recovery from a Redis restart", value=await _redis_recovery(cluster)),
        Reading(name="recovery from a killed aggregator", value=await _aggregator_recovery(cluster)),
    ]


async def _node_recovery(cluster: Cluster) -> float:
    """From the kill until the last question that the node had is answered by another, its own time included."""
    async with cluster.client() as client:
        usual_s = await _timed(lambda: _ask(client, [LONG] * 16))
        for _ in range(_TRIES):
            asking = asyncio.create_task(_ask(client, [LONG] * 16))
            await asyncio.sleep(usual_s / 3)
            begin_s = time.perf_counter()
            cluster.nodes[0].kill()
            results = await asking
            spent_s = time.perf_counter() - begin_s
            cluster.nodes[0].start()
            await cluster.nodes[0].wait_healthy()
            if any(result.attempt > 1 for result in results):
                return spent_s
    raise RuntimeError(f"the node held nothing, {_TRIES} times")


async def _redis_recovery(cluster: Cluster) -> float:
    async with cluster.client() as client:
        cluster.redis.kill()
        cluster.redis.start()
        await cluster.redis.wait_healthy()
        return await _timed(lambda: _ask(client, [SHORT]))


async def _aggregator_recovery(cluster: Cluster) -> float:
    """From the kill until a stream that was open goes on; the process's own start is part of it."""
    async with cluster.client(patience_s=60) as client:
        request_id = await client.submit([LONG] * 4, timeout_ms=60_000, max_tokens=256)
        begin_s: float | None = None
        spent_s = 0.0
        async for event in client.stream(request_id):
            if begin_s is None and event.type is StreamEventType.DELTA:
                begin_s = time.perf_counter()
                await cluster.aggregators[0].restart()
            elif begin_s is not None and not spent_s:
                spent_s = time.perf_counter() - begin_s
    return spent_s


async def _ask(backend: Backend, queries: list[str]) -> list[Result]:
    """Ask, wait, and make sure that it was answered.

    Raises:
        RuntimeError: something else than an answer came; the figure would mean nothing.
    """
    request_id = await backend.submit(queries, timeout_ms=60_000, max_tokens=256)
    results = await backend.wait(request_id, 60.0)
    if any(result.finish_reason not in ANSWERED for result in results):
        raise RuntimeError(f"not answered: {[result.finish_reason for result in results]}")
    return results


async def _repeat(call: Callable[[], Awaitable[object]], *, num_workers: int, seconds: float) -> int:
    """Calls that ended within the time, side by side."""
    until_s = time.perf_counter() + seconds
    num_done = 0

    async def work() -> None:
        nonlocal num_done
        while time.perf_counter() < until_s:
            await call()
            num_done += time.perf_counter() < until_s

    await asyncio.gather(*(work() for _ in range(num_workers)))
    return num_done


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    begin_s = time.perf_counter()
    await call()
    return time.perf_counter() - begin_s


async def _run(arguments: argparse.Namespace) -> list[Reading]:
    settings = ClusterSettings(
        num_nodes=arguments.nodes, proxied=False, name="bench", redis=arguments.server, sections={"router": ROUTER}
    )
    readings: list[Reading] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster(Path(folder), settings) as cluster, cluster.client() as client:
            await until(lambda: _is_warm(client), 60, "the first answer")
            if "latency" in arguments.only:
                readings += await measure_latency(cluster, arguments.rounds)
            if "rates" in arguments.only:
                readings += await measure_rates(cluster, arguments.seconds)
            if "recovery" in arguments.only:
                readings += await measure_recovery(cluster)
    return readings


async def _is_warm(client: Backend) -> bool:
    await _ask(client, [SHORT] * 16)
    return True


def _machine(server: str) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(statistics.mean(os.getloadavg()), 2),
        "python": platform.python_version(),
        "server": server,
        "commit": commit,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--rounds", type=int, default=200, help="of the latency")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--server", default="valkey", help="valkey or redis")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the readings here")
    arguments = parser.parse_args(argv)
    readings = asyncio.run(_run(arguments))
    table = Table("figure", "measured", "goal", "reached", "note")
    for row in rows(readings):
        table.add_row(*row)
    Console().print(table)
    if arguments.json:
        content = report(readings, _machine(arguments.server))
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
