"""The router over gRPC: decode, ask the service, encode.

Invariants and semantics: requests are checked here, by ``parse_request`` with the rules of the deployment; the tenant
of the caller's API key replaces the one in the request; ``strict`` is refused where a node cannot keep it. A request
belongs to the AskQuery calls that started it: when the last of them ends early, what has no outcome is withdrawn.

Not here: errors, keys and deadlines of calls (``common.grpc_interceptors``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import grpc.aio

from common.api_keys import current_caller
from common.codec import (
    decode_query,
    encode_channel_snapshot,
    encode_isolation_report,
    encode_node_stats,
    encode_router_stats,
    encode_rules,
    encode_stream_event,
)
from common.codec.wire import require
from common.errors import IsolationUnavailableError, KevError, RequestNotFoundError
from common.grpc_interceptors import Context
from common.request import RequestRules, parse_request
from common.types import (
    ChannelSnapshot,
    IsolationLevel,
    IsolationReport,
    NodeStats,
    RequestSpec,
    RequestView,
    RouterStats,
    StreamEvent,
    Verdict,
)
from kev.v1 import router_service_pb2 as pb
from kev.v1 import router_service_pb2_grpc as stubs

_log = logging.getLogger(__name__)


class Router(Protocol):
    """What the servicer needs of the router (``router_svc.service.RouterService``)."""

    async def submit(self, spec: RequestSpec) -> str:
        """Accept a request."""
        ...

    def channels(self) -> list[ChannelSnapshot]:
        """The channel pool."""
        ...

    def stats(self) -> RouterStats:
        """Counters."""
        ...


class Results(Protocol):
    """Where outcomes are (``common.grpc_aggregator.AggregatorCalls``)."""

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands."""
        ...

    def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        """Its events."""
        ...

    async def cancel(self, request_id: str) -> int:
        """Withdraw what has no outcome."""
        ...


class Nodes(Protocol):
    """What is known about the inference nodes."""

    async def stats(self) -> Sequence[NodeStats]:
        """Counters of the nodes that live."""
        ...

    async def isolation(self) -> IsolationReport:
        """What every node can promise.

        Raises:
            ServiceUnavailableError: no node has been known yet.
        """
        ...


class RouterServicer(stubs.RouterServiceServicer):
    """``kev.v1.RouterService``."""

    operators_only = False

    def __init__(self, router: Router, results: Results, nodes: Nodes, rules: RequestRules) -> None:
        self._router = router
        self._results = results
        self._nodes = nodes
        self._rules = rules
        self._askers: Counter[str] = Counter()
        self._withdrawals: set[asyncio.Task[int]] = set()

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register the methods; returns the name of the service."""
        stubs.add_RouterServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["RouterService"].full_name)

    async def SubmitQuery(self, request: pb.SubmitQueryRequest, context: Context) -> pb.SubmitQueryResponse:
        """Accept a request."""
        request_id = await self._router.submit(await self._checked(request))
        return pb.SubmitQueryResponse(request_id=request_id)

    async def AskQuery(self, request: pb.AskQueryRequest, context: Context) -> None:
        """Accept a request and send its events."""
        spec = await self._checked(request)
        async with self._owned(spec):
            events = self._results.stream(await self._router.submit(spec))
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    await context.write(pb.AskQueryResponse(event=encode_stream_event(event)))

    async def GetChannels(self, request: pb.GetChannelsRequest, context: Context) -> pb.GetChannelsResponse:
        """Occupancy of the channels."""
        return pb.GetChannelsResponse(channels=[encode_channel_snapshot(c) for c in self._router.channels()])

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Counters of the router and its nodes."""
        nodes = await self._nodes.stats()
        router = encode_router_stats(self._router.stats())
        return pb.GetStatsResponse(router=router, nodes=[encode_node_stats(node) for node in nodes])

    async def GetIsolationReport(
        self, request: pb.GetIsolationReportRequest, context: Context
    ) -> pb.GetIsolationReportResponse:
        """What the deployment can promise."""
        return pb.GetIsolationReportResponse(report=encode_isolation_report(await self._nodes.isolation()))

    async def GetRules(self, request: pb.GetRulesRequest, context: Context) -> pb.GetRulesResponse:
        """What requests are checked against."""
        return pb.GetRulesResponse(rules=encode_rules(self._rules))

    async def _checked(self, request: pb.SubmitQueryRequest | pb.AskQueryRequest) -> RequestSpec:
        require(request, "request", "query")
        queries, options = decode_query(request.query)
        options["tenant"] = current_caller.get().speak_for(request.query.tenant)
        spec = parse_request(queries, options, self._rules)
        if spec.isolation is IsolationLevel.STRICT:
            report = await self._nodes.isolation()
            if dict(report.levels).get(spec.isolation) is not Verdict.BITWISE:
                raise IsolationUnavailableError(f"isolation strict cannot be kept here: {report.reason}")
        return spec

    @asynccontextmanager
    async def _owned(self, spec: RequestSpec) -> AsyncIterator[None]:
        request_id = spec.request_id
        foreign = not self._askers[request_id] and await self._is_known(request_id)
        self._askers[request_id] += not foreign
        finished = False
        try:
            yield
            finished = True
        finally:
            self._askers[request_id] -= not foreign
            if not self._askers[request_id]:
                del self._askers[request_id]
                if not (finished or foreign):
                    self._withdraw(request_id)

    async def _is_known(self, request_id: str) -> bool:
        try:
            await self._results.poll(request_id)
        except RequestNotFoundError:
            return False
        return True

    def _withdraw(self, request_id: str) -> None:
        # A task of its own: the call has been cancelled, and would be interrupted again.
        task: asyncio.Task[int] = asyncio.create_task(self._cancel(request_id))
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _cancel(self, request_id: str) -> int:
        try:
            return await self._results.cancel(request_id)
        except KevError as error:
            _log.debug("request %s could not be withdrawn: %s", request_id, error)
            return 0
