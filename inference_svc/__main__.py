"""An inference node as a process: ``python -m inference_svc --config kev.yaml``.

Not here: anything that decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from common.byte_tokenizer import byte_tokenizer
from common.clock import SystemClock
from common.config import Config
from common.errors import DrainingError, EngineDeadError, KevError
from common.metrics.catalogue import LOST_ENTRIES, Tier
from common.metrics.port import Reading
from common.model_files import model_dir, projection_path
from common.redis_link import RedisLink
from common.redis_nodes import TELL_INTERVAL_S, RedisNodes
from common.redis_streams import RedisTransport
from common.service_process import Service, join, main, run_service
from common.telemetry import Telemetry
from common.tokenization import Detokenizer, Tokenizer
from common.types import ChannelEvent, IsolationReport, NodeStats
from common.watched_work import WatchedWork
from inference_svc.engine_core import EngineThread, Runner
from inference_svc.metrics import Leases, WatchedRunner, readings
from inference_svc.scripted import EchoRunner, ScriptedNode
from inference_svc.servicer import InferenceServicer
from inference_svc.step_watch import watch_steps
from inference_svc.worker import Worker, WorkerSettings

_LOG = logging.getLogger("kev.node")


class _Node(Protocol):
    report: IsolationReport
    device: str

    def start(
        self, on_events: Callable[[list[ChannelEvent]], None], watch: Callable[[Runner], Runner] | None = None
    ) -> EngineThread: ...

    def stats(self) -> NodeStats: ...

    def close(self) -> None: ...


class NodeProcess:
    """A node from loading to leaving."""

    def __init__(
        self, config: Config, node_id: str, link: RedisLink, transport: RedisTransport, telemetry: Telemetry
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._link = link
        self._transport = transport
        self._telemetry = telemetry
        self._nodes = RedisNodes(link)
        self._node: _Node | None = None
        self._worker: Worker | None = None
        self._draining = False

    @property
    def report(self) -> IsolationReport | None:
        """What the node can promise; None before its probe has ended."""
        return None if self._node is None else self._node.report

    def stats(self) -> NodeStats:
        """Counters and gauges.

        Raises:
            DrainingError: the node still loads its model.
        """
        if self._node is None:
            raise DrainingError("the node still loads or probes its model; try again in a moment")
        return self._node.stats()

    def begin_drain(self, grace_s: float | None = None) -> int:
        """Lease nothing new; what runs goes on."""
        self._draining = True
        if self._worker is None:
            return 0
        self._worker.begin_drain()
        return self._worker.num_held

    def idle(self) -> bool:
        """Nothing runs."""
        return self._worker is None or self._worker.num_held == 0

    def readings(self) -> Iterable[Reading]:
        """Its numbers at this moment."""
        num_held = 0 if self._worker is None else self._worker.num_held
        yield from readings(self.report, None if self._node is None else self._node.stats(), num_held)
        yield Reading(LOST_ENTRIES, self._transport.num_lost_entries)

    async def check(self) -> None:
        """Return if questions would be answered now.

        Raises:
            KevError: the model is not there, the engine has ended, or Redis is away.
        """
        if self._draining:
            raise DrainingError("the node is being drained")
        if not self.stats().alive:
            raise EngineDeadError("the model thread has ended; restart the node")
        await self._link.check_server()

    async def run(self) -> None:
        """Load, then work until cancelled."""
        node, tokenizer = await asyncio.to_thread(self._open)
        settings = WorkerSettings(
            node_id=self._node_id,
            max_slots=self._config.router.max_parallel_queries,
            fingerprint=tokenizer.fingerprint,
            eos_ids=tokenizer.eos_ids,
            lease_timeout_s=self._config.cluster.lease_timeout_s,
            max_attempts=self._config.cluster.max_attempts,
            strict_refusal=node.report.strict_refusal,
            others_take_over=lambda: True,
        )
        metrics = self._telemetry.metrics
        work = WatchedWork(self._transport, Leases(metrics), self._telemetry.traces)
        worker = Worker(work, SystemClock(), settings, lambda: Detokenizer(tokenizer))
        if self._draining:
            worker.begin_drain()
        events = worker.events_from(asyncio.get_running_loop())
        engine = node.start(events, lambda runner: WatchedRunner(runner, metrics))
        self._node, self._worker = node, worker
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run(engine), name="kev-worker")
                group.create_task(
                    watch_steps(
                        engine, self._config.core.step_limit_ms / 1000, SystemClock(), self._node_id, node.device
                    ),
                    name="kev-step-watch",
                )
                group.create_task(self._tell(node), name="kev-tell")
        finally:
            with suppress(Exception):
                await self._nodes.leave(self._node_id)
            await asyncio.to_thread(node.close)

    async def _tell(self, node: _Node) -> None:
        """Tell how the node is, again and again; while the store is away or full, nobody listens and work goes on."""
        while True:
            try:
                await self._nodes.tell(node.report, node.stats())
            except KevError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the node's state could not be told; trying again: %s", error)
            await asyncio.sleep(TELL_INTERVAL_S)

    def _open(self) -> tuple[_Node, Tokenizer]:
        if self._config.cluster.node_engine == "scripted":
            return ScriptedNode(self._config, EchoRunner(), SystemClock(), self._node_id), byte_tokenizer()
        from inference_svc.loading import open_node

        path = model_dir(self._config)
        opened = open_node(path, self._config, self._node_id, SystemClock())
        _keep_projection(projection_path(path, self._config), opened.projection)
        return opened.node, opened.tokenizer


def _keep_projection(path: Path, table: np.ndarray) -> None:
    """Leave the table to routers; a directory that cannot be written leaves them with a lexical hash."""
    if path.exists():
        return
    partial = path.with_suffix(f".{os.getpid()}.npy")
    with suppress(OSError):
        np.save(partial, table)
        partial.replace(path)


async def run(config: Config) -> int:
    """Serve until told to stop; returns the exit code."""
    node_id = f"node-{socket.gethostname()}-{os.getpid()}"
    telemetry = Telemetry("inference", Tier.INFERENCE, Tier.GRPC)
    link, transport = await join(config, node_id, telemetry)
    try:
        node = NodeProcess(config, node_id, link, transport, telemetry)
        telemetry.metrics.add_source(node.readings)
        service = Service(
            name="inference",
            port=config.cluster.inference_port,
            servicers=(InferenceServicer(node),),
            loops=(node.run,),
            check=node.check,
            begin_drain=node.begin_drain,
            idle=node.idle,
        )
        return await run_service(config, service, telemetry)
    finally:
        await transport.close()
        await link.close()


if __name__ == "__main__":
    sys.exit(main("inference_svc", run))
