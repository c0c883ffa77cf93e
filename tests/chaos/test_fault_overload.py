"""Ten times what fits, for half a minute, under each overflow policy; a row of the fault matrix.

The load comes from a process of its own with low priority (``load``), whose clients come back when a refusal tells them
to. A refusal's time is taken by one more client, here, which does nothing else and has normal priority. It asks in turn
for something that costs the router nothing and for something that is refused, each time over the same connection; what
the second takes longer is the router's time for a refusal. The way there and back, and the wait for a core that others
use, are in both and cancel out. The whole times are printed too.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.errors import QueueFullError
from tests.chaos.cluster import Cluster, ClusterSettings
from tests.chaos.trial import texts

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SECONDS = float(os.environ.get("KEV_CHAOS_OVERLOAD_SECONDS", "30"))
NUM_FULL = 8
"""Clients that keep everything busy."""
OVERFLOW = 16
ROUTER = {
    "max_parallel_queries": 4,
    "channel_pool_size": 8,
    "channel_queue_size": 1,
    "overflow_queue_size": OVERFLOW,
}
REFUSAL_S = 0.05
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Watched:
    """What one client saw beside the load."""

    refusals_s: list[float] = field(default_factory=list)
    """From the call to the refusal."""
    own_s: list[float] = field(default_factory=list)
    """The same, less what a call without work took just before."""
    longest_overflow: int = 0
    retries_after_s: list[float] = field(default_factory=list)


@pytest.mark.parametrize("policy", ["wait", "queue", "reject"])
async def test_overload(tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times what fits: memory grows, refusals are slow, or less gets done than at full load."""
    settings = ClusterSettings(proxied=False, sections={"router": {**ROUTER, "overflow_policy": policy}})
    async with Cluster(tmp_path, settings) as cluster:
        await _load(cluster, NUM_FULL, 5.0)  # everything is warm
        peak = await _load(cluster, NUM_FULL, SECONDS / 3)
        before = _resident_bytes(cluster)
        watched = Watched()
        watching = asyncio.create_task(_watch(cluster, watched))
        much = await _load(cluster, 10 * NUM_FULL, SECONDS)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        grown = _resident_bytes(cluster) - before
        await cluster.until_idle(20)
        again = await _load(cluster, NUM_FULL, SECONDS / 3)
    floor = min(peak, again)
    with capsys.disabled():
        print(
            f"\n{policy}: {floor:.0f} answers/s at full load, {much:.0f} at ten times as much; {grown >> 20} MiB more"
        )
        print(f"  overflow at most {watched.longest_overflow}, refusals: {_in_words(watched.refusals_s)}")
        print(f"  of that the router's own time: {_in_words(watched.own_s)}")
    assert much >= 0.9 * floor
    assert grown < 100 << 20
    if policy == "queue":
        assert watched.longest_overflow <= OVERFLOW
    if policy != "wait":
        assert len(watched.refusals_s) > 10
        assert min(watched.retries_after_s) > 0
        assert statistics.median(watched.own_s) <= REFUSAL_S


def _in_words(spans_s: list[float]) -> str:
    if not spans_s:
        return "none"
    p50, p95 = (1000 * sorted(spans_s)[int(share * (len(spans_s) - 1))] for share in (0.5, 0.95))
    return f"{len(spans_s)}, p50 {p50:.1f} ms, p95 {p95:.1f} ms"


def _resident_bytes(cluster: Cluster) -> int:
    return sum(process.resident_bytes() for process in (*cluster.services, cluster.redis))


async def _load(cluster: Cluster, num_clients: int, seconds: float) -> float:
    """Questions answered per second by a load of that many clients; its checker must be content."""
    command = ["-m", "tests.chaos.load", "--clients", str(num_clients), "--seconds", f"{seconds:g}"]
    addresses = ["--router", cluster.address("router-0"), "--aggregator", cluster.address("aggregator-0")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *addresses, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(out)
    assert found["violations"] == 0, found["summary"]
    assert "INTERNAL_BUG" not in found["reasons"], found["reasons"]
    return float(found["answers_in_time"]) / seconds


async def _watch(cluster: Cluster, watched: Watched) -> None:
    """Ask for one thing after the other, until cancelled; what is accepted is withdrawn."""
    async with cluster.client() as client:
        while True:
            watched.longest_overflow = max(watched.longest_overflow, (await client.stats()).router.num_overflow)
            begin_s = time.monotonic()
            await client.channels()
            asked_s = time.monotonic()
            try:
                async with asyncio.timeout(5.0):
                    await client.ask(texts(""))
            except QueueFullError as error:
                watched.refusals_s.append(time.monotonic() - asked_s)
                watched.own_s.append(watched.refusals_s[-1] - (asked_s - begin_s))
                watched.retries_after_s.append(error.retry_after_s)
            except TimeoutError:
                pass
            await asyncio.sleep(0.1)
