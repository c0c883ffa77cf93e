"""An inference node whose forward is a script: for tests of everything around the model, and for load tests.

Invariants and semantics: scheduler, ledger, engine thread and reports are the real ones; only the forward is not. No
torch. The "model" speaks bytes (``common.byte_tokenizer``).

Not here: speed; a script takes as long as its steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from common.byte_tokenizer import EOS_ID, decode, encode
from common.config import Config
from common.ports import Clock
from common.types import ChannelEvent, IsolationLevel, IsolationReport, NodeStats, Verdict
from inference_svc.engine_core import EngineCore, EngineThread, Runner
from inference_svc.plan import ForwardShapes, Segment, StepOutput, StepPlan
from inference_svc.sampled import SampledToken
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.slots import KVLedger

Script = Callable[[str], str]
"""From the rendered prompt to the answer."""

POISON = "kill the node that reads this"
"""An echoing node ends at once when a question contains it."""
_STEP_S = 0.001


class ScriptedRunner:
    """Answers every question by a script, one byte per step, then EOS."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._answers: dict[int, tuple[int, ...]] = {}
        self._num_given: dict[int, int] = {}
        self.num_steps = 0

    def forget(self) -> None:
        """Forget every question."""
        self._answers.clear()
        self._num_given.clear()

    def execute(self, plan: StepPlan) -> StepOutput:
        """One token for every question that wants one."""
        self.num_steps += 1
        wanted = [segment for segment in plan.segments if segment.sampling is not None]
        return StepOutput(tokens={segment.sequence_id: self._next(segment) for segment in wanted})

    def _next(self, segment: Segment) -> SampledToken:
        if segment.sequence_id not in self._answers:
            self._answers[segment.sequence_id] = (*encode(self._script(decode(segment.prompt_ids))), EOS_ID)
        given = self._num_given.get(segment.sequence_id, 0)
        self._num_given[segment.sequence_id] = given + 1
        answer = self._answers[segment.sequence_id]
        return SampledToken(answer[min(given, len(answer) - 1)], None)


class ScriptedNode:
    """An inference node whose forward is a script."""

    def __init__(self, config: Config, runner: ScriptedRunner, clock: Clock, node_id: str = "scripted-0") -> None:
        slots = config.router.max_parallel_queries
        shapes = ForwardShapes.of(slots, config.core.prefill_rows, config.core.segment_tokens)
        self._settings = SchedulerSettings(
            node_id=node_id,
            max_slots=slots,
            shapes=shapes,
            max_context=config.core.max_context,
            unverified=frozenset(),
        )
        self.device = "scripted"
        self.restartable = True
        self._num_positions = slots * config.core.max_context
        self._max_slots = slots
        self._node_id = node_id
        self._clock = clock
        self._runner = runner
        self.renew()
        self._thread: EngineThread | None = None
        self.report = IsolationReport(
            levels=tuple((level, Verdict.BITWISE) for level in IsolationLevel),
            backend="scripted",
            precision="none",
            num_threads=1,
            decode_rows=shapes.decode_rows,
            prefill_rows=shapes.prefill_rows,
            row_independent=True,
            position_independent=True,
            prefix_independent=True,
            fingerprint="scripted",
        )

    def renew(self) -> None:
        """Empty books."""
        self.ledger = KVLedger(self._num_positions)
        self._scheduler = Scheduler(self._settings, self.ledger, self._clock, lambda extent: None)
        self._runner.forget()

    def start(
        self, on_events: Callable[[list[ChannelEvent]], None], watch: Callable[[Runner], Runner] | None = None
    ) -> EngineThread:
        """Start the engine thread; ``watch`` may put something in front of the runner."""
        runner = self._runner if watch is None else watch(self._runner)
        self._thread = EngineThread(EngineCore(self._scheduler, runner), on_events)
        self._thread.start()
        return self._thread

    def stats(self) -> NodeStats:
        """Counters and gauges; bytes are positions."""
        scheduler = self._scheduler
        return NodeStats(
            node_id=self._node_id,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_slots=self._max_slots,
            num_steps=scheduler.num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_completion_tokens=scheduler.num_completion_tokens,
            kv_bytes_used=self.ledger.num_held,
            kv_bytes_total=self.ledger.num_positions,
            num_prefixes=scheduler.num_prefixes,
            alive=self._thread is not None and self._thread.alive,
        )

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.stop(5.0)


class EchoRunner(ScriptedRunner):
    """Answers with the question, a byte per millisecond: a token clock for load and fault tests."""

    def __init__(self) -> None:
        super().__init__(_echo)

    def execute(self, plan: StepPlan) -> StepOutput:
        """One token for every question that wants one."""
        time.sleep(_STEP_S)
        return super().execute(plan)


def _echo(prompt: str) -> str:
    if POISON in prompt:
        os._exit(70)
    return prompt
