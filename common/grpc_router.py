"""The router as its remote callers see it: submit, and what it says about itself.

Invariants and semantics: a request is refused in the words of ``parse_request``, about the caller's own objects, also
where protobuf could not carry them: the rules of the deployment are asked for then.

Not here: the connection (``common.grpc_calls``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.codec import (
    Uncarriable,
    decode_channel_snapshot,
    decode_isolation_report,
    decode_node_stats,
    decode_router_stats,
    decode_rules,
    encode_query,
)
from common.errors import InvalidRequestError, MessageTooLargeError, PromptTooLongError
from common.grpc_calls import Peer
from common.grpc_options import NEW_ID_KEY
from common.request import RequestRules, parse_request
from common.types import ChannelSnapshot, EngineStats, IsolationReport, NodeStats
from kev.v1 import router_service_pb2 as pb
from kev.v1 import router_service_pb2_grpc as stubs

SERVICE = pb.DESCRIPTOR.services_by_name["RouterService"].full_name

_SUBMIT_DEADLINE_S = 600.0
"""A submission may wait for room (``overflow_policy: wait``); one that is cut off is withdrawn."""
_SUBMIT_MARGIN_S = 10.0


class RouterCalls:
    """The router at the other end of a connection."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._stub: Any = stubs.RouterServiceStub(peer.channel)

    async def submit(self, queries: object, options: Mapping[str, object], *, has_new_id: bool = False) -> str:
        """Accept a request; arguments as ``parse_request``.

        Tried again when its answer was lost, so give it a ``request_id``: it then joins itself. ``has_new_id``: the id
        was made for this call, so that a router without room need not look whether it knows it.

        Raises:
            InvalidRequestError: a field is wrong; nothing was started.
            KevError: whatever the router raises.
        """
        try:
            query = encode_query(queries, options)
        except Uncarriable:
            await self._refuse(queries, options)
            told = "hold a value that cannot be sent; send plain text, numbers and lists"
            raise InvalidRequestError.of("queries", told) from None
        try:
            response = await self._peer.call(
                self._stub.SubmitQuery,
                pb.SubmitQueryRequest(query=query),
                _patient(query),
                first_metadata=((NEW_ID_KEY, "1"),) if has_new_id else (),
            )
        except (InvalidRequestError, MessageTooLargeError) as error:
            if not isinstance(error, PromptTooLongError):
                await self._refuse(queries, options)
            raise
        return str(response.request_id)

    async def _refuse(self, queries: object, options: Mapping[str, object]) -> None:
        """Raise what ``parse_request`` has to say about the caller's own objects."""
        parse_request(queries, options, await self.rules())

    async def rules(self) -> RequestRules:
        """Limits and defaults that requests are checked against."""
        return decode_rules((await self._peer.call(self._stub.GetRules, pb.GetRulesRequest())).rules)

    async def channels(self) -> list[ChannelSnapshot]:
        """The channel pool of this router."""
        response = await self._peer.call(self._stub.GetChannels, pb.GetChannelsRequest())
        return [decode_channel_snapshot(channel) for channel in response.channels]

    async def stats(self) -> EngineStats:
        """Counters of this router, and of all its nodes together."""
        response = await self._peer.call(self._stub.GetStats, pb.GetStatsRequest())
        nodes = [decode_node_stats(node) for node in response.nodes]
        return EngineStats(
            router=decode_router_stats(response.router), node=NodeStats.together(nodes), nodes=tuple(nodes)
        )

    async def isolation(self) -> IsolationReport:
        """What isolation the deployment can promise."""
        response = await self._peer.call(self._stub.GetIsolationReport, pb.GetIsolationReportRequest())
        return decode_isolation_report(response.report)


def _patient(query: pb.Query) -> float:
    """The deadline of a submission: never shorter than the time budget of its questions."""
    budgets = [query.timeout_duration, query.defaults.timeout_duration, *(q.timeout_duration for q in query.questions)]
    return max(_SUBMIT_DEADLINE_S, max(float(budget.seconds) for budget in budgets) + _SUBMIT_MARGIN_S)
