"""The router over gRPC: decode, ask the service, encode.

Invariants and semantics: requests are checked here, by ``parse_request`` with the rules of the deployment; the tenant
of the caller's API key replaces the one in the request; ``strict`` is refused where a node cannot keep it. A request
belongs to the AskQuery calls that started it: when the last of them ends early, what has no outcome is withdrawn, and
its id is used up: a later AskQuery is told so instead of being given questions that nobody answered.

Not here: errors, keys and deadlines of calls (``common.grpc_interceptors``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

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
from common.errors import IsolationUnavailableError, KevError, RequestWithdrawnError
from common.grpc_interceptors import Context
from common.grpc_options import NEW_ID_KEY
from common.request import RequestRules, parse_request
from common.types import (
    FinishReason,
    IsolationLevel,
    IsolationReport,
    NodeStats,
    RequestSpec,
    RequestView,
    StreamEvent,
    Verdict,
)
from kev.v1 import router_service_pb2 as pb
from kev.v1 import router_service_pb2_grpc as stubs
from router_svc.entrance import Router

_log = logging.getLogger(__name__)


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
        """AskQuery calls that run, by request."""
        self._started: set[str] = set()
        """Requests that these calls have started."""
        self._withdrawals: dict[str, asyncio.Task[int]] = {}

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register the methods; returns the name of the service."""
        stubs.add_RouterServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["RouterService"].full_name)

    async def SubmitQuery(self, request: pb.SubmitQueryRequest, context: Context) -> pb.SubmitQueryResponse:
        """Accept a request."""
        spec = await self._checked(request, context)
        await self._router.accept(spec, has_new_id=_has_new_id(request, context))
        return pb.SubmitQueryResponse(request_id=spec.request_id)

    async def AskQuery(self, request: pb.AskQueryRequest, context: Context) -> None:
        """Accept a request and send its events."""
        spec = await self._checked(request, context)
        async with self._attached(spec.request_id):
            await self._start(spec, has_new_id=_has_new_id(request, context))
            async with aclosing(self._results.stream(spec.request_id)) as events:  # type: ignore[type-var]
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

    async def _checked(self, request: pb.SubmitQueryRequest | pb.AskQueryRequest, context: Context) -> RequestSpec:
        require(request, "request", "query")
        tenant = current_caller.get().speak_for(request.query.tenant)
        if _has_new_id(request, context):
            self._router.check_room(tenant)
        queries, options = decode_query(request.query)
        options["tenant"] = tenant
        spec = parse_request(queries, options, self._rules)
        if spec.isolation is IsolationLevel.STRICT:
            report = await self._nodes.isolation()
            if dict(report.levels).get(spec.isolation) is not Verdict.BITWISE:
                raise IsolationUnavailableError(f"isolation strict cannot be kept here: {report.reason}")
        return spec

    async def _start(self, spec: RequestSpec, *, has_new_id: bool) -> None:
        """Start a request for AskQuery, or join it.

        Raises:
            RequestWithdrawnError: it was withdrawn before this call; its questions will never be answered.
        """
        if await self._router.accept(spec, has_new_id=has_new_id):
            self._started.add(spec.request_id)
        elif spec.request_id not in self._started:
            view = await self._results.poll(spec.request_id)
            withdrawn = [result for result in view.results if result.finish_reason is FinishReason.CANCELLED]
            if view.done and withdrawn:
                raise RequestWithdrawnError(
                    f"request {spec.request_id!r} was withdrawn, by a cancellation or because the call that asked it "
                    f"ended early: {len(withdrawn)} of its {view.num_questions} questions were not answered; ask again "
                    "under another id"
                )

    @asynccontextmanager
    async def _attached(self, request_id: str) -> AsyncIterator[None]:
        """Count a call of a request; the last one of those that started it withdraws it, unless it was finished."""
        if (withdrawal := self._withdrawals.get(request_id)) is not None:
            await asyncio.wait({withdrawal})
        self._askers[request_id] += 1
        finished = False
        try:
            yield
            finished = True
        finally:
            self._askers[request_id] -= 1
            if not self._askers[request_id]:
                del self._askers[request_id]
                if request_id in self._started and not finished:
                    self._withdraw(request_id)
                self._started.discard(request_id)

    def _withdraw(self, request_id: str) -> None:
        # A task of its own: the call has been cancelled, and would be interrupted again.
        task = self._withdrawals[request_id] = asyncio.create_task(self._cancel(request_id))
        task.add_done_callback(lambda _: self._withdrawals.pop(request_id, None))

    async def _cancel(self, request_id: str) -> int:
        try:
            return await self._results.cancel(request_id)
        except KevError as error:
            _log.debug("request %s could not be withdrawn: %s", request_id, error)
            return 0


def _has_new_id(request: pb.SubmitQueryRequest | pb.AskQueryRequest, context: Context) -> bool:
    """Whether nobody can have used the request's id before: it has none yet, or its caller says so."""
    if not request.query.request_id:
        return True
    metadata: Any = context.invocation_metadata()
    return any(name == NEW_ID_KEY for name, _ in metadata or ())
