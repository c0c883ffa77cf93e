"""The aggregator as its remote callers see it: poll, wait, stream, cancel.

Invariants and semantics: the methods and errors of the aggregator itself, over a connection that may break: a stream
goes on after the last event it gave, a wait goes on waiting, and a long wait is cut into calls that no server's
connection age ends. Views that do not fit into one message come in parts.

Not here: the connection (``common.grpc_calls``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from common.codec import decode_request_view, decode_stream_event
from common.codec.wire import to_duration
from common.errors import DeadlineExceededError, InvalidRequestError, KevError, RequestNotFoundError
from common.grpc_calls import Peer
from common.grpc_options import LONGEST_CALL_S
from common.types import RequestView, StreamEvent, StreamEventType
from common.wording import is_a, shown
from kev.v1 import aggregator_service_pb2 as pb
from kev.v1 import aggregator_service_pb2_grpc as stubs

SERVICE = pb.DESCRIPTOR.services_by_name["AggregatorService"].full_name

_MARGIN_S = 5.0
"""What a call's deadline allows beyond the wait that it asks for."""
_LONGEST_WAIT_S = LONGEST_CALL_S - _MARGIN_S
_MAX_INDEX = 2**31 - 1


class AggregatorCalls:
    """The aggregator at the other end of a connection."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._stub: Any = stubs.AggregatorServiceStub(peer.channel)

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands.

        Raises:
            RequestNotFoundError: unknown or expired.
        """
        request = pb.GetResultRequest(request_id=_carriable(request_id))
        return await self._whole(await self._peer.call(self._stub.GetResult, request))

    async def wait(self, request_id: str, timeout_s: float | None) -> RequestView:
        """The request once every question has its outcome.

        Args:
            request_id: a registered request.
            timeout_s: most seconds to wait; None waits until every question has its outcome.

        Raises:
            RequestNotFoundError: unknown or expired.
            DeadlineExceededError: ``timeout_s`` passed first; the request goes on.
            InvalidRequestError: ``timeout_s`` is negative or not a number.
        """
        if timeout_s is not None and not _is_wait(timeout_s):
            raise InvalidRequestError.of("timeout", f"{shown(timeout_s)} is not a number of seconds from 0 on, or null")
        began_s, wait_s = time.monotonic(), _LONGEST_WAIT_S if timeout_s is None else timeout_s
        request = pb.WaitResultRequest(request_id=_carriable(request_id))
        while True:
            part_s = min(wait_s, _LONGEST_WAIT_S)
            request.wait_duration.CopyFrom(to_duration(part_s * 1000))
            try:
                return await self._whole(await self._peer.call(self._stub.WaitResult, request, part_s + _MARGIN_S))
            except DeadlineExceededError:
                if timeout_s is not None and timeout_s <= _LONGEST_WAIT_S:
                    raise
            wait_s = _LONGEST_WAIT_S if timeout_s is None else began_s + timeout_s - time.monotonic()
            if wait_s <= 0:
                raise DeadlineExceededError(
                    f"request {request_id!r} is not done after waiting {timeout_s:g} s; the request goes on: "
                    "wait again, or poll"
                )

    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncGenerator[StreamEvent, None]:
        """The request's events from an index on, past ones first; ends after ``done``.

        Raises:
            RequestNotFoundError: unknown or expired.
            InvalidRequestError: the index is negative or no integer.
        """
        if not is_a(from_event_index, int) or from_event_index < 0:
            raise InvalidRequestError.of("from_event_index", f"{shown(from_event_index)} is not an integer from 0 on")
        request = pb.StreamResultsRequest(request_id=_carriable(request_id))
        next_index, patience = min(int(from_event_index), _MAX_INDEX), self._peer.patience()
        while True:
            request.from_event_index = next_index
            began_s = time.monotonic()
            try:
                responses = self._peer.stream(self._stub.StreamResults, request, LONGEST_CALL_S)
                async with aclosing(responses):  # type: ignore[type-var]
                    async for response in responses:
                        event = decode_stream_event(response.event)
                        next_index = event.event_index + 1
                        patience.progress()
                        yield event
                        if event.type is StreamEventType.DONE:
                            return
                return
            except DeadlineExceededError:
                if time.monotonic() - began_s < _LONGEST_WAIT_S:
                    raise
            except KevError as error:
                await patience.pause_after(error)

    async def cancel(self, request_id: str) -> int:
        """Withdraw the questions without an outcome; returns how many.

        Raises:
            RequestNotFoundError: unknown or expired.
        """
        request = pb.CancelRequestRequest(request_id=_carriable(request_id))
        return int((await self._peer.call(self._stub.CancelRequest, request)).num_cancelled)

    async def _whole(self, response: Any) -> RequestView:
        """The view, with the outcomes that did not fit into the first message."""
        view = decode_request_view(response.view)
        results = {result.question_index: result for result in view.results}
        while response.HasField("next_result_offset"):
            request = pb.GetResultRequest(request_id=view.request_id, result_offset=response.next_result_offset)
            response = await self._peer.call(self._stub.GetResult, request)
            for result in decode_request_view(response.view).results:
                results.setdefault(result.question_index, result)
        return replace(view, results=tuple(results.values()))


def _is_wait(timeout_s: object) -> bool:
    is_number = is_a(timeout_s, float) or (is_a(timeout_s, int) and not is_a(timeout_s, bool))
    return is_number and timeout_s >= 0  # type: ignore[operator]


def _carriable(request_id: object) -> str:
    """The id, unless it is none that a request could ever have had."""
    if is_a(request_id, str):
        try:
            request_id.encode()
            return str.__str__(request_id)
        except UnicodeEncodeError:
            pass
    raise RequestNotFoundError(f"no request {shown(request_id)}: it was never accepted; ids are what submit returned")
