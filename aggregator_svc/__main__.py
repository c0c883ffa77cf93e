"""The aggregator as a process: ``python -m aggregator_svc --config kev.yaml``.

Not here: anything that decides.
"""

from __future__ import annotations

import os
import socket
import sys

from aggregator_svc.service import AggregatorService
from aggregator_svc.servicer import AggregatorServicer
from aggregator_svc.settings import AggregatorSettings
from common.clock import SystemClock
from common.config import Config
from common.redis_registry import RedisRegistry
from common.redis_source import RedisSource
from common.service_process import Service, join, main, run_service


async def run(config: Config) -> int:
    """Serve until told to stop; returns the exit code."""
    link, transport = await join(config, f"aggregator-{socket.gethostname()}-{os.getpid()}")
    try:
        registry = RedisRegistry(
            link=link,
            max_requests=config.aggregator.max_requests,
            retention_s=float(config.aggregator.result_ttl_s),
        )
        aggregator = AggregatorService(
            results=transport,
            work=transport,
            clock=SystemClock(),
            settings=AggregatorSettings.from_config(config),
            source=RedisSource(registry, transport),
        )
        servicer = AggregatorServicer(aggregator, aggregator.tenant_of, config.cluster.max_message_bytes)
        service = Service(
            name="aggregator",
            port=config.cluster.aggregator_port,
            servicers=(servicer,),
            loops=(aggregator.run(),),
            check=link.check_server,
            begin_drain=aggregator.begin_drain,
            idle=lambda: True,
        )
        return await run_service(config, service)
    finally:
        await transport.close()
        await link.close()


if __name__ == "__main__":
    sys.exit(main("aggregator_svc", run))
