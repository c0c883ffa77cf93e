"""The three services on gRPC servers of their own, over the tiers of one scripted engine, and a client for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from aggregator_svc.servicer import AggregatorServicer
from common.errors import ServiceUnavailableError
from common.grpc_options import channel_credentials
from common.grpc_server import GrpcServer, GrpcServerSettings, Servicer
from common.tls_files import TlsFiles
from common.types import IsolationReport, NodeStats
from inference_svc.servicer import InferenceServicer
from kev.client import AsyncClient
from kev.engine import AsyncEngine
from kev.testing import scripted_engine
from router_svc.servicer import RouterServicer
from tests.integration.scripted_runners import GuidedRunner


class ServedEngine:
    """The engine's node, as the inference service knows it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._node = engine._parts.nodes[0]
        self.report: IsolationReport | None = self._node.report
        self.drains: list[float | None] = []

    def stats(self) -> NodeStats:
        return self._node.stats()

    def begin_drain(self, grace_s: float | None) -> int:
        self.drains.append(grace_s)
        return self.stats().num_running


class OneNode:
    """The engine's node, as the router knows it."""

    def __init__(self, node: ServedEngine) -> None:
        self._node = node

    async def stats(self) -> list[NodeStats]:
        return [self._node.stats()]

    async def isolation(self) -> IsolationReport:
        if self._node.report is None:
            raise ServiceUnavailableError("no node")
        return self._node.report


@dataclass
class Cluster:
    """Servers by service, and where they listen."""

    engine: AsyncEngine
    runner: GuidedRunner
    node: ServedEngine
    settings: GrpcServerSettings
    servers: dict[str, GrpcServer]
    ports: dict[str, int]
    servicers: dict[str, Any] = field(default_factory=dict)

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    def client(self, **settings: Any) -> AsyncClient:
        return AsyncClient(self.address("router"), self.address("aggregator"), **settings)

    def servicer(self, service: str) -> Servicer:
        tiers = self.engine._started()
        limit = self.settings.max_message_bytes
        made: dict[str, Callable[[], Servicer]] = {
            "router": lambda: RouterServicer(tiers.router, tiers.aggregator, OneNode(self.node), self.engine._rules),
            "aggregator": lambda: AggregatorServicer(tiers.aggregator, self._tenant_of, limit),
            "inference": lambda: InferenceServicer(self.node),
        }
        return made[service]()

    async def start(self, service: str) -> None:
        """Start a server; one that ran before gets its old port again."""
        settings = replace(self.settings, port=self.ports.get(service, 0))
        self.servicers[service] = self.servicer(service)
        server = GrpcServer(settings, [self.servicers[service]])
        self.ports[service] = await server.start()
        self.servers[service] = server
        await server.set_serving(True)

    def _tenant_of(self, request_id: str) -> str:
        tiers = self.engine._started()
        return tiers.aggregator._get(request_id).collector.record.tenant


@asynccontextmanager
async def open_cluster(
    config: Mapping[str, object] | None = None,
    *,
    script: Callable[[str], str] = str,
    runner: GuidedRunner | None = None,
    settings: GrpcServerSettings | None = None,
    services: Sequence[str] = ("router", "aggregator"),
) -> AsyncIterator[Cluster]:
    """Servers over one engine whose answers come from ``script`` (default: the prompt itself)."""
    runner = runner or GuidedRunner(script)
    async with scripted_engine(str, config, runner=runner) as engine:
        cluster = Cluster(engine, runner, ServedEngine(engine), settings or GrpcServerSettings(), {}, {})
        try:
            for service in services:
                await cluster.start(service)
            yield cluster
        finally:
            for server in cluster.servers.values():
                await server.kill()


class Reflected:
    """A client that knows nothing but an address: it learns services and messages by reflection."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.channel = channel
        self.metadata = tuple(metadata)
        self._stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    async def services(self) -> list[str]:
        answer = await self._ask(reflection_pb2.ServerReflectionRequest(list_services=""))
        return [service.name for service in answer.list_services_response.service]

    async def methods(self, service: str) -> list[Any]:
        answer = await self._ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
        await self._add(answer)
        return list(self._pool.FindServiceByName(service).methods)

    async def call(self, method: Any, content: Mapping[str, Any], timeout_s: float = 10) -> list[Any]:
        """All answers of a method to a request given as plain data."""
        request = message_factory.GetMessageClass(method.input_type)(**content)
        answer_type = message_factory.GetMessageClass(method.output_type)
        path = f"/{method.containing_service.full_name}/{method.name}"
        kind: Any = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        multi = kind(path, type(request).SerializeToString, answer_type.FromString)
        call = multi(request, timeout=timeout_s, metadata=self.metadata)
        if method.server_streaming:
            return [answer async for answer in call]
        return [await call]

    async def code(self, method: Any) -> grpc.StatusCode:
        """How a call without content ends."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:  # nothing is sent: a message that meets a refusal fails in the client's core
            opened: Any = self.channel.stream_stream(path, None, None)(timeout=10, metadata=self.metadata)
            return await opened.code()  # type: ignore[no-any-return]
        try:
            await self.call(method, {})
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def _add(self, answer: Any) -> None:
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for needed in file.dependency:
                if needed not in self._known:
                    await self._add(await self._ask(reflection_pb2.ServerReflectionRequest(file_by_filename=needed)))
            self._pool.Add(file)

    async def _ask(self, request: Any) -> Any:
        call = self._stub.ServerReflectionInfo(iter([request]), timeout=10, metadata=self.metadata)
        (answer,) = [answer async for answer in call]
        if answer.HasField("error_response"):
            raise LookupError(answer.error_response.error_message)
        return answer


def bare_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """A bare channel."""
    if tls is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, channel_credentials(tls))
