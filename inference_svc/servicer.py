"""An inference node over gRPC: decode, ask the node, encode.

Invariants and semantics: operators only; work reaches a node through the channels' streams.

Not here: errors, keys and deadlines of calls (``common.grpc_interceptors``).
"""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from common.codec import encode_isolation_report, encode_node_stats
from common.codec.wire import to_ms
from common.errors import ServiceUnavailableError
from common.grpc_interceptors import Context
from common.types import IsolationReport, NodeStats
from kev.v1 import inference_service_pb2 as pb
from kev.v1 import inference_service_pb2_grpc as stubs


class ServedNode(Protocol):
    """What the servicer needs of the process that runs a node."""

    @property
    def report(self) -> IsolationReport | None:
        """What the node can promise; None before its probe has ended."""
        ...

    def stats(self) -> NodeStats:
        """Counters and gauges."""
        ...

    def begin_drain(self, grace_s: float | None) -> int:
        """Lease nothing new, and hand back what still runs after ``grace_s`` (None: the node's own grace).

        Returns:
            Questions that still run.
        """
        ...


class InferenceServicer(stubs.InferenceServiceServicer):
    """``kev.v1.InferenceService``."""

    operators_only = True

    def __init__(self, node: ServedNode) -> None:
        self._node = node

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register the methods; returns the name of the service."""
        stubs.add_InferenceServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["InferenceService"].full_name)

    async def GetNode(self, request: pb.GetNodeRequest, context: Context) -> pb.GetNodeResponse:
        """Counters and gauges."""
        return pb.GetNodeResponse(node=encode_node_stats(self._node.stats()))

    async def GetIsolation(self, request: pb.GetIsolationRequest, context: Context) -> pb.GetIsolationResponse:
        """What the node can promise."""
        report = self._node.report
        if report is None:
            raise ServiceUnavailableError("the node still loads or probes its model; try again in a moment")
        return pb.GetIsolationResponse(report=encode_isolation_report(report))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.DrainNodeResponse:
        """Take the node out of service."""
        grace_s = to_ms(request.grace_duration) / 1000 if request.HasField("grace_duration") else None
        return pb.DrainNodeResponse(num_running=self._node.begin_drain(grace_s))
