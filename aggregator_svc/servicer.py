"""The aggregator over gRPC: decode, ask the service, encode.

Invariants and semantics: a request of another tenant is answered as if it did not exist. A view is sent in parts that
fit into a message; a wait ends a little before the call does, so that its outcome is still told.

Not here: errors, keys and deadlines of calls (``common.grpc_interceptors``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import grpc.aio

from common.api_keys import current_caller
from common.codec import encode_request_view, encode_stream_event
from common.codec.wire import to_ms
from common.errors import InvalidRequestError, RequestNotFoundError
from common.grpc_interceptors import Context
from common.grpc_options import DEFAULT_MAX_MESSAGE_BYTES
from common.types import RequestView, StreamEvent
from common.wording import shown
from kev.v1 import aggregator_service_pb2 as pb
from kev.v1 import aggregator_service_pb2_grpc as stubs

_TELL_S = 0.1
"""Time that a wait leaves for telling how it ended."""
_VIEW_SHARE = 0.9
"""Part of the message limit that outcomes may fill."""


class Aggregator(Protocol):
    """What the servicer needs of the aggregator (``aggregator_svc.service.AggregatorService``)."""

    async def load(self, request_id: str) -> None:
        """Have the request at hand."""
        ...

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands."""
        ...

    async def wait(self, request_id: str, timeout_s: float | None) -> RequestView:
        """The request once it is done."""
        ...

    def stream(self, request_id: str, from_event_index: int = 0) -> AsyncGenerator[StreamEvent, None]:
        """Its events."""
        ...

    async def cancel(self, request_id: str) -> int:
        """Withdraw what has no outcome."""
        ...


class AggregatorServicer(stubs.AggregatorServiceServicer):
    """``kev.v1.AggregatorService``."""

    operators_only = False

    def __init__(
        self,
        aggregator: Aggregator,
        tenant_of: Callable[[str], str],
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """Serve an aggregator.

        Args:
            aggregator: the service.
            tenant_of: whose a request is that the aggregator has at hand.
            max_message_bytes: largest message of the server.
        """
        self._aggregator = aggregator
        self._tenant_of = tenant_of
        self._max_view_bytes = int(max_message_bytes * _VIEW_SHARE)

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register the methods; returns the name of the service."""
        stubs.add_AggregatorServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["AggregatorService"].full_name)

    async def GetResult(self, request: pb.GetResultRequest, context: Context) -> pb.GetResultResponse:
        """The request as it stands."""
        await self._check(request.request_id)
        view = await self._aggregator.poll(request.request_id)
        part, next_offset = self._part(view, max(0, request.result_offset))
        return pb.GetResultResponse(view=part, next_result_offset=next_offset)

    async def WaitResult(self, request: pb.WaitResultRequest, context: Context) -> pb.WaitResultResponse:
        """The request once it is done."""
        await self._check(request.request_id)
        wait_s = to_ms(request.wait_duration) / 1000 if request.HasField("wait_duration") else None
        remaining_s: float | None = context.time_remaining()
        if remaining_s is not None:
            left_s = max(0.0, remaining_s - _TELL_S)
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        view = await self._aggregator.wait(request.request_id, wait_s)
        part, next_offset = self._part(view, 0)
        return pb.WaitResultResponse(view=part, next_result_offset=next_offset)

    async def StreamResults(self, request: pb.StreamResultsRequest, context: Context) -> None:
        """The request's events."""
        if request.from_event_index < 0:  # before the id, as everywhere
            told = shown(request.from_event_index)
            raise InvalidRequestError.of("from_event_index", f"{told} is not an integer from 0 on")
        await self._check(request.request_id)
        async with aclosing(self._aggregator.stream(request.request_id, request.from_event_index)) as events:
            async for event in events:
                await context.write(pb.StreamResultsResponse(event=encode_stream_event(event)))

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: Context) -> pb.CancelRequestResponse:
        """Withdraw what has no outcome."""
        await self._check(request.request_id)
        return pb.CancelRequestResponse(num_cancelled=await self._aggregator.cancel(request.request_id))

    async def _check(self, request_id: str) -> None:
        """Have the request at hand, and make sure that it is the caller's."""
        caller = current_caller.get()
        try:
            await self._aggregator.load(request_id)
            if caller.may_see(self._tenant_of(request_id)):
                return
        except RequestNotFoundError:
            if caller.tenant is None:
                raise
        # The same words for both: whether another tenant uses an id is nobody else's business.
        raise RequestNotFoundError(f"no request {shown(request_id)}: it was never accepted, or its results are gone")

    def _part(self, view: RequestView, offset: int) -> tuple[Any, int | None]:
        """The outcomes from an offset on that fit into a message, and where to go on."""
        message = encode_request_view(replace(view, results=view.results[offset:]))
        if message.ByteSize() <= self._max_view_bytes:
            return message, None
        num_fitting, num_bytes = 0, 0
        for result in message.results:
            num_bytes += result.ByteSize() + 8
            if num_bytes > self._max_view_bytes and num_fitting:
                break
            num_fitting += 1
        if num_fitting == len(message.results):
            return message, None
        del message.results[num_fitting:]
        return message, offset + num_fitting
