"""Faults of every kind, one after the other at random, under a load that never stops: nothing is lost or doubled.

``KEV_CHAOS_SECONDS`` says how long at most; with ``KEV_CHAOS_QUESTIONS`` and ``KEV_CHAOS_FAULTS`` it ends as soon as
both numbers are reached, and fails if not. ``KEV_CHAOS_SEED`` repeats the choices of a run; ``KEV_CHAOS_JSON`` names
a file for the figures, ``KEV_CHAOS_AGGREGATORS`` the number of aggregators, ``KEV_CHAOS_DURABILITY`` what Redis keeps
when it is killed: with ``aof`` and a busy disk it may come back without its last acknowledged writes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from common.types import Durability
from tests.chaos.campaign import Campaign, CampaignSettings
from tests.chaos.cluster import Cluster, ClusterSettings
from tests.chaos.workload import WorkloadSettings

pytestmark = pytest.mark.chaos

NUM_QUESTIONS = int(os.environ.get("KEV_CHAOS_QUESTIONS", "0"))
NUM_FAULTS = int(os.environ.get("KEV_CHAOS_FAULTS", "0"))
MAX_S = float(os.environ.get("KEV_CHAOS_SECONDS", "3600" if NUM_QUESTIONS or NUM_FAULTS else "45"))
SEED = int(os.environ.get("KEV_CHAOS_SEED", "0")) or int(time.time())
NUM_AGGREGATORS = int(os.environ.get("KEV_CHAOS_AGGREGATORS", "1"))
DURABILITY = Durability(os.environ.get("KEV_CHAOS_DURABILITY", "durable" if NUM_AGGREGATORS > 1 else "aof"))
JSON_PATH = os.environ.get("KEV_CHAOS_JSON", "")
SETTLE_S = 60.0
LOAD = WorkloadSettings(
    num_clients=16,
    num_requests=10**9,
    duration_s=MAX_S + SETTLE_S,
    settle_s=SETTLE_S,
    timeout_ms=60_000,
    filler_chars=(0, 20),
    max_questions=8,
)


@pytest.mark.timeout(MAX_S + 3 * SETTLE_S + 120)
async def test_random_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A guarantee that holds against each fault alone breaks when they come together."""

    def tell(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    settings = CampaignSettings(seed=SEED, load=LOAD, max_s=MAX_S, num_questions=NUM_QUESTIONS, num_faults=NUM_FAULTS)
    tell(f"\nKEV_CHAOS_SEED={SEED} KEV_CHAOS_SECONDS={MAX_S:g}")
    size = ClusterSettings(num_nodes=2, num_aggregators=NUM_AGGREGATORS, durability=DURABILITY)
    async with Cluster(tmp_path, size) as cluster:
        outcome = await Campaign(cluster, settings, tell).run()
        report = outcome.report
        tell(f"{outcome.spent_s:.0f} s, {outcome.num_rounds} rounds: {report.summary()}")
        tell("  " + ", ".join(f"{number} {name}" for name, number in sorted(outcome.faults.items())))
        if JSON_PATH:
            Path(JSON_PATH).write_text(
                json.dumps({"seed": SEED} | outcome.as_json(), indent=2) + "\n", encoding="utf-8"
            )
        if outcome.bad_history is not None:
            outcome.bad_history.write(tmp_path / "history.jsonl")
        assert report.clean, f"seed {SEED}; records of the first bad round in {tmp_path}\n{report.summary()}"
        assert report.num_questions >= NUM_QUESTIONS
        assert report.num_faults >= NUM_FAULTS
        assert report.num_faults > 0 and report.num_answers > report.num_placeholders, "nothing was tried"
        assert "INTERNAL_BUG" not in report.reasons
        await cluster.until_idle(60)
