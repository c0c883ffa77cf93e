"""A service of the distributed form as a process: start, serve, drain, stop.

Invariants and semantics: the port answers from the start; health says SERVING only while the service's own check
passes, and liveness (the health of the empty name) never depends on it. On SIGTERM or SIGINT the service is not ready
at once, takes nothing new, finishes what is open within ``drain_grace_s`` and exits with 0; a second signal ends the
grace. If one of its loops ends by itself, the process exits with 1, so that whoever started it starts it again.

Not here: what the service does (its ``__main__``).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.clock import SystemClock
from common.config import Config, load_config
from common.errors import ConfigError, KevError
from common.grpc_server import GrpcServer, GrpcServerSettings, Servicer
from common.json_logs import configure_logs
from common.metrics.calls import CallMetrics
from common.metrics.server import serve_metrics
from common.redis_link import RedisLink
from common.redis_settings import LinkSettings, RedisTransportSettings
from common.redis_streams import RedisTransport
from common.telemetry import Telemetry
from common.tls_files import TlsFiles

_CHECK_INTERVAL_S = 0.5
_log = logging.getLogger("kev.process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a process runs."""

    name: str
    port: int
    servicers: Sequence[Servicer]
    loops: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    """Started when the port answers, each runs until cancelled; one that ends ends the process."""
    check: Callable[[], Awaitable[None]]
    """Returns when calls would be answered now; raises ``KevError`` when not."""
    begin_drain: Callable[[], object]
    idle: Callable[[], bool]
    """Nothing is open any more that the drain should wait for."""


def read_arguments(program: str, arguments: Sequence[str] | None = None) -> Config:
    """The configuration that the command line names.

    Raises:
        ConfigError: it is wrong, or for another form of deployment.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=f"Kev's {program.split('_')[0]} service.")
    parser.add_argument("--config", type=Path, required=True, help="kev.yaml with deploy.mode: distributed")
    config = load_config(parser.parse_args(arguments).config)
    if config.deploy.mode != "distributed":
        raise ConfigError(f"kev.deploy.mode is {config.deploy.mode}; the services need distributed")
    return config


async def join(config: Config, node_id: str, telemetry: Telemetry) -> tuple[RedisLink, RedisTransport]:
    """This process's part in the deployment's streams.

    Raises:
        ConfigError: Redis is not fit.
        StoreUnavailableError: Redis cannot be reached.
    """
    cluster, router = config.cluster, config.router
    link = await RedisLink.connect(
        LinkSettings(url=cluster.redis_url, deployment=cluster.name, durability=cluster.durability)
    )
    settings = RedisTransportSettings(
        num_channels=router.channel_pool_size,
        node_id=node_id,
        lease_timeout_s=cluster.lease_timeout_s,
        max_deliveries=cluster.max_attempts,
        max_entries_per_channel=2 * router.channel_queue_size,
        max_bytes_per_channel=router.channel_queue_bytes,
        priority_step_ms=float(router.priority_step_ms),
        retention_s=float(config.aggregator.result_ttl_s),
        trace_of=telemetry.traces.trace_of,
        on_event=telemetry.traces.arrived,
    )
    return link, RedisTransport(link=link, clock=SystemClock(), settings=settings)


def tls_files(config: Config) -> TlsFiles:
    """Certificates of this deployment."""
    cluster = config.cluster
    return TlsFiles(cert_file=cluster.tls_cert_file, key_file=cluster.tls_key_file, ca_file=cluster.tls_ca_file)


async def run_service(config: Config, service: Service, telemetry: Telemetry) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        ConfigError: the address cannot be bound, or keys or certificates cannot be read.
    """
    async with AsyncExitStack() as stack:
        await _open_metrics(stack, config, telemetry)
        try:
            return await _serve(config, service, telemetry)
        finally:
            await asyncio.to_thread(telemetry.close)


async def _open_metrics(stack: AsyncExitStack, config: Config, telemetry: Telemetry) -> None:
    host, port = config.cluster.bind_host, config.observability.metrics_port
    if port:
        await stack.enter_async_context(serve_metrics(telemetry.metrics, host, port))
        _log.info("metrics are told on %s:%d", host, port)


async def _serve(config: Config, service: Service, telemetry: Telemetry) -> int:
    cluster = config.cluster
    calls = CallMetrics(telemetry.metrics)
    telemetry.metrics.add_source(calls.readings)
    settings = GrpcServerSettings(
        host=cluster.bind_host,
        port=service.port,
        max_message_bytes=cluster.max_message_bytes,
        max_connection_age_s=cluster.max_connection_age_s,
        tls=tls_files(config),
        api_keys_file=cluster.api_keys_file,
        reflection=cluster.reflection,
    )
    server = GrpcServer(settings, service.servicers, calls)
    port = await server.start()
    _log.info("%s listens on %s:%d", service.name, cluster.bind_host, port)
    stop = _stop_event()
    loops = [asyncio.create_task(loop(), name=f"kev-{service.name}-{i}") for i, loop in enumerate(service.loops)]
    watch = asyncio.create_task(_watch(server, service.check))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, *loops}, return_when=asyncio.FIRST_COMPLETED)
    failed = next((loop for loop in loops if loop.done()), None)
    watch.cancel()
    await asyncio.wait({watch})
    _log.info("%s drains", service.name)
    service.begin_drain()
    stop.clear()
    draining = asyncio.create_task(server.drain(cluster.drain_grace_s))
    with suppress(TimeoutError):
        async with asyncio.timeout(cluster.drain_grace_s if failed is None else 0.0):
            # The loops go on until the calls that run have ended: some of them wait for what a loop will read.
            while not ((draining.done() and service.idle()) or stop.is_set()):
                await asyncio.sleep(0.05)
    for loop in loops:
        loop.cancel()
    await asyncio.wait(set(loops))
    await draining
    if failed is not None:
        _log.error("%s ended by itself", service.name, exc_info=None if failed.cancelled() else failed.exception())
    return 0 if failed is None else 1


def main(program: str, run: Callable[[Config], Coroutine[Any, Any, int]]) -> int:
    """Run a service's program; a failure is one sentence on standard error and exit code 1."""
    try:
        config = read_arguments(program)
        configure_logs(config.debug.log_level, config.observability.log_format)
        return asyncio.run(run(config))
    except KevError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        return 1


async def _watch(server: GrpcServer, check: Callable[[], Awaitable[None]]) -> None:
    """Keep health in step with the service's own check."""
    told: str | None = None
    while True:
        try:
            await check()
            now_told = ""
        except KevError as error:
            now_told = str(error)
        if now_told != told:
            told = now_told
            _log.info("serving" if not told else f"not serving: {told}")
            await server.set_serving(not told)
        await asyncio.sleep(_CHECK_INTERVAL_S)


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT.

    ``loop.add_signal_handler`` would hear of a signal through the pipe that also wakes the loop: when some hundred
    wake-ups are waiting there, the signal is lost (tried).
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    return stop
