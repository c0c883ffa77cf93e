"""The router as a process: ``python -m router_svc --config kev.yaml``.

Not here: anything that decides.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace

from common.api_keys import ApiKeys, read_key
from common.byte_tokenizer import byte_tokenizer
from common.clock import SystemClock
from common.config import Config
from common.grpc_aggregator import AggregatorCalls
from common.grpc_calls import Peer, PeerSettings
from common.metrics.catalogue import Tier
from common.model_files import max_context, model_dir, projection_path
from common.redis_intake import RedisIntake
from common.redis_nodes import RedisNodes
from common.redis_registry import RedisRegistry
from common.request import RequestRules
from common.service_process import Service, join, main, run_service, tls_files
from common.telemetry import Telemetry
from common.tokenization import Tokenizer
from common.watched_work import WatchedWork
from router_svc.embedding import ProjectionTable
from router_svc.metrics import Publications, WatchedBoard, WatchedIntake, WatchedRouter, readings
from router_svc.service import RouterService
from router_svc.servicer import RouterServicer
from router_svc.settings import RouterSettings


async def run(config: Config) -> int:
    """Serve until told to stop; returns the exit code."""
    tokenizer, limit, table = _model(config)
    telemetry = Telemetry("router", Tier.ROUTER, Tier.GRPC)
    metrics = telemetry.metrics
    link, transport = await join(config, f"router-{socket.gethostname()}-{os.getpid()}", telemetry)
    aggregator = Peer(_aggregator_settings(config))
    try:
        registry = RedisRegistry(
            link=link,
            max_requests=config.aggregator.max_requests,
            retention_s=float(config.aggregator.result_ttl_s),
        )
        publications = Publications(metrics)
        router = RouterService(
            tokenizer=tokenizer,
            work=WatchedWork(transport, publications),
            registry=registry,
            clock=SystemClock(),
            settings=replace(
                RouterSettings.from_config(config),
                max_context=limit,
                tenant_weights=ApiKeys.from_file(config.cluster.api_keys_file).tenant_weights,
            ),
            projection=table,
            board=WatchedBoard(transport, metrics),
            intake=WatchedIntake(RedisIntake(link=link, registry=registry, transport=transport), publications),
        )
        watched = WatchedRouter(router, metrics, telemetry.traces)
        metrics.add_source(lambda: readings(router))
        rules = RequestRules.for_model(
            config,
            vocab_size=tokenizer.vocab_size,
            uses_chat_template=tokenizer.uses_chat_template,
            max_context=limit,
        )
        servicer = RouterServicer(watched, AggregatorCalls(aggregator), RedisNodes(link), rules)
        service = Service(
            name="router",
            port=config.cluster.router_port,
            servicers=(servicer,),
            loops=(router.run,),
            check=link.check_server,
            begin_drain=router.begin_drain,
            idle=lambda: True,
        )
        return await run_service(config, service, telemetry)
    finally:
        await aggregator.close()
        await transport.close()
        await link.close()


def _model(config: Config) -> tuple[Tokenizer, int, ProjectionTable | None]:
    """Tokenizer, positions of a channel, and the table of ``semantic_hash`` if a node has left one."""
    if config.cluster.node_engine == "scripted":
        return byte_tokenizer(), config.core.max_context, None
    path = model_dir(config)
    tokenizer = Tokenizer.from_dir(
        path, prompt_template=config.core.prompt_template, knowledge_prefix=config.isolation.knowledge_prefix
    )
    table = projection_path(path, config)
    found = ProjectionTable.load(table, config.router.semantic_planes) if table.exists() else None
    return tokenizer, max_context(path, config), found


def _aggregator_settings(config: Config) -> PeerSettings:
    cluster, tls = config.cluster, tls_files(config)
    return PeerSettings(
        target=cluster.aggregator_address,
        api_key=read_key(cluster.api_key_file) or "",
        tls=tls if tls.ca_file else None,
        max_message_bytes=cluster.max_message_bytes,
    )


if __name__ == "__main__":
    sys.exit(main("router_svc", run))
