"""A scripted runner that a test can slow down, hold back and break, and the questions that were in each forward."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from common.types import EngineStats
from inference_svc.plan import StepOutput, StepPlan
from kev.engine import AsyncEngine
from kev.testing import ScriptedRunner

HELD_S = 20.0
"""A held forward goes on by itself after this time, so that a failing test ends."""

_OFFSET = 3


class GuidedRunner(ScriptedRunner):
    """Answers by a script, under the hand of a test.

    Attributes:
        step_s: seconds that every forward takes.
        gate: forwards wait while it is not set.
        before: called with each plan before its forward; what it raises, the forward raises.
        forwards: the prompts that were in each forward so far.
    """

    def __init__(self, script: Callable[[str], str], step_s: float = 0.0) -> None:
        super().__init__(script)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.forwards: list[frozenset[str]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        """One forward."""
        self.forwards.append(prompts_of(plan))
        self.gate.wait(HELD_S)
        time.sleep(self.step_s)
        self.before(plan)
        return super().execute(plan)

    def num_forwards_of(self, prompt: str) -> int:
        """Forwards in which a prompt took part."""
        return sum(prompt in forward for forward in self.forwards)


def prompts_of(plan: StepPlan) -> frozenset[str]:
    """The prompts of the questions in a forward, control tokens left out."""
    return frozenset(
        bytes(token_id - _OFFSET for token_id in segment.prompt_ids if token_id >= _OFFSET).decode()
        for segment in plan.segments
    )


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def until_idle(engine: AsyncEngine, timeout_s: float = 10.0) -> EngineStats:
    """Wait until nothing runs, waits or is counted anywhere in the engine; returns its counters."""
    async with asyncio.timeout(timeout_s):
        while await leftovers(engine):
            await asyncio.sleep(0.002)
    return await engine.stats()


async def leftovers(engine: AsyncEngine) -> dict[str, int]:
    """What the engine still holds, by where; empty when it is idle."""
    stats = await engine.stats()
    tiers = engine._tiers
    assert tiers is not None
    tiers.router.check_integrity()
    counts = {
        "running": stats.node.num_running,
        "waiting": stats.node.num_waiting,
        "KV positions": stats.node.kv_bytes_used,
        "overflow": stats.router.num_overflow,
        "channels": sum(channel.num_queued for channel in await engine.channels()),
        "work streams": sum(await tiers.router._publisher._work.depths()),
        "leases": tiers.cores.num_held,
    }
    return {place: number for place, number in counts.items() if number}
