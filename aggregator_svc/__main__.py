"""The aggregator as a process: ``python -m aggregator_svc --config kev.yaml``.

Not here: anything that decides.
"""

from __future__ import annotations

import os
import socket
import sys

from aggregator_svc.metrics import Outcomes, WatchedResults, readings
from aggregator_svc.service import AggregatorService
from aggregator_svc.servicer import AggregatorServicer
from aggregator_svc.settings import AggregatorSettings
from common.clock import SystemClock
from common.config import Config
from common.metrics.catalogue import Tier
from common.metrics.registry import Metrics
from common.ports import ResultStream
from common.redis_backlog import BacklogGauge
from common.redis_source import RedisSource
from common.service_process import Service, join, main, run_service
from common.telemetry import Telemetry


async def run(config: Config) -> int:
    """Serve until told to stop; returns the exit code."""
    telemetry = Telemetry("aggregator", Tier.AGGREGATOR, Tier.GRPC)
    link, transport = await join(config, f"aggregator-{socket.gethostname()}-{os.getpid()}", telemetry)
    try:
        source = RedisSource(link=link, settings=transport.settings)
        results = WatchedResults(source, telemetry.metrics)
        aggregator = AggregatorService(
            results=results,
            work=transport,
            clock=SystemClock(),
            settings=AggregatorSettings.from_config(config),
            source=source,
        )
        aggregator.add_listener(telemetry.traces.told)
        _watch(aggregator, results, BacklogGauge(link, config.router.channel_pool_size), telemetry.metrics)
        servicer = AggregatorServicer(aggregator, aggregator.tenant_of, config.cluster.max_message_bytes)
        service = Service(
            name="aggregator",
            port=config.cluster.aggregator_port,
            servicers=(servicer,),
            loops=(aggregator.run,),
            check=link.check_server,
            begin_drain=aggregator.begin_drain,
            idle=lambda: True,
        )
        return await run_service(config, service, telemetry)
    finally:
        await transport.close()
        await link.close()


def _watch(aggregator: AggregatorService, results: ResultStream, backlog: BacklogGauge, metrics: Metrics) -> None:
    Outcomes(aggregator, metrics)
    metrics.add_source(lambda: readings(aggregator, results))
    metrics.add_refresher(backlog.refresh)
    metrics.add_source(backlog.readings)


if __name__ == "__main__":
    sys.exit(main("aggregator_svc", run))
