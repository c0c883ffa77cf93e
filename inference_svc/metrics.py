"""A node's numbers for an operator: slots, leases, steps, tokens, latencies, KV.

Invariants and semantics: stands in front of the runner and of the work streams, and reads the node's snapshot; engine
and worker know nothing of it. The runner is watched on the engine thread, everything else on the event loop.

Not here: names and meanings (``common.metrics.catalogue``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from common.metrics import catalogue as names
from common.metrics.port import Reading, Recorder, ending
from common.ports import Lease, Report, ReportState
from common.types import IsolationLevel, IsolationReport, NodeStats, Verdict
from common.watched_work import WorkWatcher
from inference_svc.engine_core import Runner
from inference_svc.plan import StepOutput, StepPlan


class WatchedRunner:
    """A runner whose forwards are timed."""

    def __init__(self, runner: Runner, recorder: Recorder) -> None:
        self._runner = runner
        self._recorder = recorder

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one forward; see ``engine_core.Runner``."""
        started_s = time.monotonic()
        output = self._runner.execute(plan)
        self._recorder.observe(names.STEP_SECONDS, time.monotonic() - started_s, plan.kind.value)
        num_rows = sum(segment.num_rows for segment in plan.segments)
        num_prompt = sum(
            min(segment.num_rows, max(0, len(segment.prompt_ids) - segment.position)) for segment in plan.segments
        )
        self._recorder.count(names.TOKENS, "prefill", by=num_prompt)
        self._recorder.count(names.TOKENS, "decode", by=num_rows - num_prompt)
        return output


class Leases(WorkWatcher):
    """Counts leases and outcomes, and measures how long questions took."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        for state in (ReportState.COMMITTED, ReportState.ALREADY_COMMITTED, ReportState.STALE):
            recorder.count(names.COMMITS, state.value, by=0)  # there from the start, so that the first one is a step

    def leased(self, lease: Lease) -> None:
        """The lease was granted."""
        self._recorder.count(names.LEASES, "again" if lease.attempt > 1 else "first")

    def renewed(self, lease: Lease, held: bool) -> None:
        """The lease was extended, or was found lost."""
        if not held:
            self._recorder.count(names.LEASES_LOST)

    def handed_back(self, lease: Lease) -> None:
        """The lease was given back unstarted."""
        self._recorder.count(names.HAND_BACKS)

    def reported(self, report: Report, state: ReportState) -> None:
        """Progress or the outcome was reported, or why not."""
        result = report.outcome
        if result is None:
            return
        self._recorder.count(names.COMMITS, state.value)
        if state is not ReportState.COMMITTED:
            return
        self._recorder.count(names.NODE_OUTCOMES, *ending(result))
        queued_s = result.queued_ms / 1000
        running_s = 0.0 if result.started_at is None else max(0.0, result.finished_at - result.started_at)
        self._recorder.observe(names.QUEUE_SECONDS, queued_s)
        self._recorder.observe(names.QUESTION_SECONDS, queued_s + running_s)
        if result.first_token_ms is not None:
            self._recorder.observe(names.FIRST_TOKEN_SECONDS, result.first_token_ms / 1000)


def readings(report: IsolationReport | None, stats: NodeStats | None, num_held: int) -> Iterable[Reading]:
    """The node's snapshot; None while it loads its model."""
    strict = report is not None and dict(report.levels).get(IsolationLevel.STRICT) is Verdict.BITWISE
    yield Reading(names.NODE_ALIVE, stats is not None and stats.alive)
    yield Reading(names.LEASES_HELD, num_held)
    if report is not None:
        yield Reading(names.NODE_STRICT, strict)
    if stats is not None:
        yield Reading(names.SLOTS, stats.max_slots)
        yield Reading(names.SLOTS_USED, stats.num_running)
        yield Reading(names.NODE_WAITING, stats.num_waiting)
        yield Reading(names.KV_BYTES, stats.kv_bytes_total)
        yield Reading(names.KV_BYTES_USED, stats.kv_bytes_used)
        yield Reading(names.PREFIXES, stats.num_prefixes)
        yield Reading(names.REPLAYS, stats.num_replayed)
        yield Reading(names.SKIPPED_REPLAYS, stats.num_skipped_replays)
        yield Reading(names.VIOLATIONS, stats.num_violations)
        yield Reading(names.RESTARTS, stats.num_restarts)
