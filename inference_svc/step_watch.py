"""Looks after an engine thread: a step that does not return is given up.

Invariants and semantics: a thread cannot be ended from outside, so its step goes on; but from then on the engine counts
as dead, its questions are left to others or fail, and what the step gives in the end is dropped. Off at a limit of 0.

Not here: how long is too long (``core_care``), what follows (``kev.cores``, ``__main__``).
"""

from __future__ import annotations

import asyncio
import logging

from common.errors import EngineDeadError
from common.ports import Clock
from inference_svc.core_care import StepClock
from inference_svc.engine_core import EngineThread

_LOG = logging.getLogger("kev.engine")

_LONGEST_INTERVAL_S = 1.0
_LOOKS_PER_LIMIT = 8


async def watch_steps(thread: EngineThread, limit_s: float, clock: Clock, name: str, device: str) -> None:
    """Return when a step has taken too long and was given up; otherwise look until cancelled.

    Args:
        thread: the engine thread.
        limit_s: longest time of a step; 0 never looks.
        clock: source of time.
        name: of the core.
        device: where it runs.
    """
    if not limit_s:
        await asyncio.Event().wait()
    interval_s = min(_LONGEST_INTERVAL_S, limit_s / _LOOKS_PER_LIMIT)
    seen = StepClock(interval_s)
    while (step := thread.step_in_flight) is None or seen.look(clock.monotonic(), step) < limit_s:
        if step is None:
            seen.look(clock.monotonic(), None)
        await asyncio.sleep(interval_s)
    error = EngineDeadError(
        f"step {step} of {name} on {device} has not returned for {limit_s:g} s (core.step_limit_ms); "
        "the device or its driver hangs; ask again, and restart Kev if it stays so"
    )
    _LOG.error("%s", error)
    thread.abandon(error)
