"""Runs the processes of a cluster together: in stages up, in stages down.

Invariants and semantics: a stage starts when every process of the one before is ready. The order to stop, or a process
that was given up, ends the start where it is. Stopping goes through the stages in reverse; each has drained before
the next is told, so an answer on its way meets everything that it still needs.

Not here: one process (``kev.up.child``), what is shown (``kev.up.screen``), signals (``kev.up.run``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from common.wakeup import WakeUp
from kev.up.child import Child
from kev.up.commands import Role
from kev.up.lifecycle import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a cluster ended."""

    failed: tuple[str, ...]
    """Processes that were given up."""
    unclean: tuple[str, ...]
    """Processes that had to be killed or ended with an error when they were told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Kills a random inference node now and then."""

    rng: random.Random
    say: Callable[[str], None]
    interval_s: float = 10.0
    """On average."""

    async def run(self, children: Sequence[Child]) -> None:
        """Go on until cancelled."""
        while True:
            await asyncio.sleep(self.interval_s * self.rng.uniform(0.5, 1.5))
            victim = self.pick(children)
            if victim is None:
                self.say("chaos: no inference node is ready, nothing to kill")
                continue
            self.say(f"chaos: kill -9 {victim.spec.name} (pid {victim.pid})")
            victim.kill()

    def pick(self, children: Sequence[Child]) -> Child | None:
        """One of the inference nodes that are ready."""
        nodes = [child for child in children if child.spec.role is Role.INFERENCE]
        ready = [child for child in nodes if child.lifecycle.state is State.READY]
        return self.rng.choice(ready) if ready else None


class Supervisor:
    """All processes of one cluster; every method on the event loop."""

    def __init__(self, on_ready: Callable[[], None], chaos: Chaos | None = None) -> None:
        self._on_ready = on_ready
        self._chaos = chaos
        self._changed = WakeUp()
        self._stop_ordered = False
        self._hurry = asyncio.Event()

    def on_change(self, child: Child) -> None:
        """A child has changed its state."""
        self._changed.wake_all()

    def order_stop(self) -> None:
        """Drain and end; a second order kills what is left."""
        if self._stop_ordered:
            self._hurry.set()
        self._stop_ordered = True
        self._changed.wake_all()

    async def run(self, children: Sequence[Child]) -> Ending:
        """Start all, keep them running until ``order_stop`` or until one is given up, stop all."""
        by_stage = sorted(children, key=lambda child: child.spec.stage)
        stages = [list(stage) for _, stage in groupby(by_stage, key=lambda child: child.spec.stage)]
        unclean: list[str] = []
        try:
            await self._start(stages, children)
            await self._keep(children)
        finally:
            for stage in reversed(stages):
                endings = await asyncio.gather(*(child.stop(self._hurry) for child in stage))
                unclean += [child.spec.name for child, ended in zip(stage, endings, strict=True) if not ended]
        return Ending(
            failed=_failed(children), unclean=tuple(name for name in unclean if name not in _failed(children))
        )

    async def _start(self, stages: Sequence[Sequence[Child]], children: Sequence[Child]) -> None:
        for stage in stages:
            if self._is_over(children):
                return
            for child in stage:
                child.start()
            while not self._is_over(children) and not _are_ready(stage):
                await self._changed.wait()

    async def _keep(self, children: Sequence[Child]) -> None:
        if self._is_over(children):
            return
        self._on_ready()
        chaos = asyncio.create_task(self._chaos.run(children)) if self._chaos else None
        try:
            while not self._is_over(children):
                await self._changed.wait()
        finally:
            if chaos is not None:
                chaos.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await chaos

    def _is_over(self, children: Sequence[Child]) -> bool:
        return self._stop_ordered or bool(_failed(children))


def _are_ready(children: Sequence[Child]) -> bool:
    return all(child.lifecycle.state is State.READY for child in children)


def _failed(children: Sequence[Child]) -> tuple[str, ...]:
    return tuple(child.spec.name for child in children if child.lifecycle.state is State.FAILED)
