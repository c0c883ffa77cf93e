"""The engine cores of one process: a node and a worker each, side by side on the same streams.

Invariants and semantics: a core that ends by itself loses no question: the others take over what it held, in a further
attempt, and go on without it. With the last core the engine ends. A question whose first attempt ended a core has its
second and last one alone on another, so that one question cannot end them all in company.

Not here: which devices they run on (``inference_svc.devices``), who gets what (``common.memory``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from common.config import Config
from common.errors import EngineDeadError
from common.memory import MemoryTransport
from common.memory_consumer import ConsumerGroup
from common.ports import Clock
from common.tokenization import Detokenizer
from common.types import NodeStats
from inference_svc.worker import Worker, WorkerSettings
from kev.engine_watch import EngineWatch
from kev.parts import EmbeddedNode, EngineParts

_LOG = logging.getLogger("kev.engine")
_MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class _Core:
    name: str
    node: EmbeddedNode
    worker: Worker


class Cores:
    """Every engine core of an engine. Lives on the event loop."""

    def __init__(
        self, config: Config, parts: EngineParts, transport: MemoryTransport, clock: Clock, watch: EngineWatch
    ) -> None:
        self._watch = watch
        self._group = group = ConsumerGroup(transport, _MAX_ATTEMPTS)
        self._cores: list[_Core] = []
        for node in parts.nodes:
            name = node.stats().node_id
            settings = WorkerSettings(
                node_id=name,
                max_slots=config.router.max_parallel_queries,
                fingerprint=parts.tokenizer.fingerprint,
                eos_ids=parts.tokenizer.eos_ids,
                max_attempts=_MAX_ATTEMPTS,
                others_take_over=partial(group.has_others, name),
            )
            work = watch.leases(group.join(name))
            worker = Worker(work, clock, settings, partial(Detokenizer, parts.tokenizer))
            self._cores.append(_Core(name, node, worker))
        watch.nodes(parts.report, self.stats, lambda: self.num_held)

    @property
    def num_held(self) -> int:
        """Leases held now."""
        return sum(core.worker.num_held for core in self._cores)

    def stats(self) -> Sequence[NodeStats]:
        """Counters and gauges of each core."""
        return [core.node.stats() for core in self._cores]

    def start(self, group: asyncio.TaskGroup) -> None:
        """Run all cores as tasks of a group; one fails when the last core has ended, or something else is broken."""
        for core in self._cores:
            group.create_task(self._run(core), name=f"kev-core-{core.name}")

    async def _run(self, core: _Core) -> None:
        thread = core.node.start(core.worker.events_from(asyncio.get_running_loop()), self._watch.runner)
        try:
            await core.worker.run(thread)
        except* EngineDeadError as ended:
            if not self._group.has_others(core.name):
                raise
            _LOG.error("%s has ended; the other cores take over its questions: %s", core.name, ended.exceptions[0])
            self._group.leave(core.name)
