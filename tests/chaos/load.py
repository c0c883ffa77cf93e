"""The load of a process of its own, as polite as the system allows: ``python -m tests.chaos.load --help``.

Writes one JSON object to standard output: what the clients saw and what the checker says of it. The store's own record
is not consulted; whoever started the cluster may do so.

Not here: the clients (``workload``), the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

from kev.client import AsyncClient
from tests.chaos.checker import check
from tests.chaos.workload import Workload, WorkloadSettings

NICENESS = 10
"""The clients must not take the processor from those whom they measure."""


async def run(router: str, aggregator: str, settings: WorkloadSettings) -> dict[str, object]:
    """Make the load; the figures."""
    async with AsyncClient(router, aggregator) as client:
        workload = Workload(client, settings)
        begin_s = time.monotonic()
        history = await workload.run()
        spent_s = time.monotonic() - begin_s
    report = check(history)
    return {
        "spent_s": spent_s,
        "questions": report.num_questions,
        "answers": report.num_answers,
        "answers_in_time": workload.num_ended_in_time,
        "placeholders": report.num_placeholders,
        "violations": sum(report.counts().values()),
        "summary": report.summary(),
        "reasons": report.reasons,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, help="host:port")
    parser.add_argument("--aggregator", required=True, help="host:port")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # also where the cluster runs under another one
    os.nice(NICENESS)
    settings = WorkloadSettings(
        seed=given.seed,
        num_clients=given.clients,
        num_requests=10**9,
        duration_s=given.seconds,
        settle_s=60.0,
        max_questions=2,
        filler_chars=(0, 60),
        stream_share=0.0,
        attach_share=0.0,
        cancel_share=0.0,
        deadline_share=0.0,
        timeout_ms=120_000,
        longest_pause_s=10.0,
    )
    print(json.dumps(asyncio.run(run(given.router, given.aggregator, settings))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
