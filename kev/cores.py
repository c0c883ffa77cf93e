"""The engine cores of one process: a node and a worker each, side by side on the same streams.

Invariants and semantics: a core that ends by itself, or whose step does not return, loses no question: what it held is
taken over in a further attempt, by the others or by itself once it has started again. It starts again over the same
weights, with empty books, after the boot probe's short form has passed; a limited number of times in a row
(``core_care``), and never while a step that was given up still runs. With the last core that may start again the engine
ends. A question whose first attempt ended a core has its second and last one alone, so that one question cannot end
them all in company.

Not here: which devices they run on (``inference_svc.devices``), who gets what (``common.memory``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.config import Config
from common.errors import EngineDeadError
from common.memory import MemoryTransport
from common.memory_consumer import ConsumerGroup
from common.ports import Clock
from common.tokenization import Detokenizer
from common.types import NodeStats
from inference_svc.core_care import Restarts
from inference_svc.engine_core import EngineThread
from inference_svc.step_watch import watch_steps
from inference_svc.worker import Worker, WorkerSettings, failed
from kev.engine_watch import EngineWatch
from kev.parts import EmbeddedNode, EngineParts

_LOG = logging.getLogger("kev.engine")
_MAX_ATTEMPTS = 2
_LOOK_INTERVAL_S = 0.2
_ENDING_S = 0.002
"""Between looks at a thread that is about to end: looking all the time would keep the interpreter from it."""


@dataclass(slots=True)
class _Core:
    name: str
    node: EmbeddedNode
    restarts: Restarts
    worker: Worker | None = None
    """None while the core does not run."""
    has_given_up: bool = False
    """No restart is left."""
    thread: EngineThread | None = None
    num_restarts: int = 0

    @property
    def runs(self) -> bool:
        """It takes questions."""
        return self.worker is not None and (self.thread is None or self.thread.alive)

    @property
    def stuck(self) -> EngineDeadError | None:
        """Why, while a step that was given up still runs."""
        return self.thread.failure if self.thread is not None and self.thread.step_in_flight else None

    @property
    def num_held(self) -> int:
        return 0 if self.worker is None else self.worker.num_held


class Cores:
    """Every engine core of an engine. Lives on the event loop."""

    def __init__(
        self, config: Config, parts: EngineParts, transport: MemoryTransport, clock: Clock, watch: EngineWatch
    ) -> None:
        self._config = config
        self._parts = parts
        self._clock = clock
        self._watch = watch
        self._group = ConsumerGroup(transport, _MAX_ATTEMPTS)
        core = config.core
        self._cores = [
            _Core(
                node.stats().node_id,
                node,
                Restarts(core.max_restarts if node.restartable else 0, core.restart_pause_ms / 1000),
            )
            for node in parts.nodes
        ]
        for one in self._cores:
            self._join(one)
        watch.nodes(parts.report, self.stats, lambda: self.num_held)

    @property
    def num_held(self) -> int:
        """Leases held now."""
        return sum(core.num_held for core in self._cores)

    def stats(self) -> Sequence[NodeStats]:
        """Counters and gauges of each core."""
        return [replace(core.node.stats(), num_restarts=core.num_restarts) for core in self._cores]

    def check_ready(self) -> None:
        """Return if a core runs.

        Raises:
            EngineDeadError: none does at this moment.
        """
        if not any(core.runs for core in self._cores):
            self.check_hope()
            raise EngineDeadError("no engine core runs at this moment; one starts again soon")

    def check_hope(self) -> None:
        """Return unless every core is stuck in a step, or has ended for good: a question would wait for nothing.

        Raises:
            EngineDeadError: they all are.
        """
        failure = self._hopeless
        if failure is not None:
            raise failure

    @property
    def _hopeless(self) -> EngineDeadError | None:
        """Why no core will run as far as anybody knows; None while one may."""
        stuck = [core.stuck for core in self._cores if core.stuck is not None]
        ended = all(core.stuck is not None or core.has_given_up for core in self._cores)
        return stuck[0] if stuck and ended else None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Run all cores as tasks of a group; one fails when the last core has ended, or something else is broken."""
        for core in self._cores:
            group.create_task(self._keep(core), name=f"kev-core-{core.name}")

    async def _keep(self, core: _Core) -> None:
        """Run a core, and again after it has ended, as long as its restarts last."""
        while True:
            failure = await self._serve(core)
            pause_s = core.restarts.ended(self._clock.monotonic())
            while pause_s is not None:
                _LOG.error("%s has ended and is started again in %g s: %s", core.name, pause_s, failure)
                await asyncio.sleep(pause_s)
                try:
                    await asyncio.to_thread(core.node.renew)
                    break
                except Exception as error:
                    _LOG.exception("%s could not be started again", core.name)
                    failure = EngineDeadError(f"{core.name} could not be started again: {error}")
                    pause_s = core.restarts.ended(self._clock.monotonic())
            else:
                return self._give_up(core, failure)
            core.num_restarts += 1
            self._join(core)

    def _give_up(self, core: _Core, failure: EngineDeadError) -> None:
        """No restart is left.

        Raises:
            EngineDeadError: nor is another core.
        """
        core.has_given_up = True
        if all(one.has_given_up for one in self._cores):
            raise failure
        _LOG.error("%s has ended and stays away; the other cores go on: %s", core.name, failure)

    async def _serve(self, core: _Core) -> EngineDeadError:
        """Run a core until its engine has ended; returns why, when nothing of it runs any more."""
        worker = core.worker
        if worker is None:
            raise EngineDeadError(f"{core.name} was started without a worker")
        core.thread = thread = core.node.start(worker.events_from(asyncio.get_running_loop()), self._watch.runner)
        core.restarts.started(self._clock.monotonic())
        limit_s = self._config.core.step_limit_ms / 1000
        watching = asyncio.create_task(watch_steps(thread, limit_s, self._clock, core.name, core.node.device))
        # A task of its own: a group that fails cancels whom it belongs to, which looks like being cancelled.
        running = asyncio.create_task(worker.run(thread))
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
            raise
        finally:
            watching.cancel()
        failure = _engine_failure(running.exception())
        core.worker = None
        self._group.leave(core.name)
        await self._until_ended(core, thread, failure)
        return failure

    async def _until_ended(self, core: _Core, thread: EngineThread, failure: EngineDeadError) -> None:
        """Wait for a step that was given up: a second thread would use the same device beside it."""
        while not thread.has_ended:
            if self._hopeless is not None:
                await self._fail_waiting(core, failure)
            await asyncio.sleep(_LOOK_INTERVAL_S if thread.step_in_flight else _ENDING_S)

    async def _fail_waiting(self, core: _Core, failure: EngineDeadError) -> None:
        """End what waits for a core: nobody knows whether one will run again."""
        transport, num_channels = self._group.transport, self._config.router.channel_pool_size
        while leases := await transport.lease(num_channels, 0.0, core.name):
            await transport.report([failed(lease, failure, self._clock.time(), core.name) for lease in leases])

    def _join(self, core: _Core) -> None:
        """Give a core its worker."""
        tokenizer = self._parts.tokenizer
        settings = WorkerSettings(
            node_id=core.name,
            max_slots=self._config.router.max_parallel_queries,
            fingerprint=tokenizer.fingerprint,
            eos_ids=tokenizer.eos_ids,
            max_attempts=_MAX_ATTEMPTS,
            others_take_over=partial(self._others_take_over, core),
        )
        work = self._watch.leases(self._group.join(core.name))
        core.thread = None
        core.worker = Worker(work, self._clock, settings, partial(Detokenizer, tokenizer))

    def _others_take_over(self, core: _Core) -> bool:
        """Whether somebody answers what a core leaves that ends now: another one, or itself after a restart."""
        if any(one is not core and not one.has_given_up and one.stuck is None for one in self._cores):
            return True
        return core.restarts.is_left and core.stuck is None


def _engine_failure(error: BaseException | None) -> EngineDeadError:
    """Why an engine has ended, from what its worker raised; anything else is raised again."""
    if not isinstance(error, BaseExceptionGroup):
        raise EngineDeadError("the worker has ended") from error
    failures, others = error.split(EngineDeadError)
    if others is not None or failures is None:
        raise error
    [failure, *_] = failures.exceptions
    return failure if isinstance(failure, EngineDeadError) else EngineDeadError(str(failure))
