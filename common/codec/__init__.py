"""The only crossing between domain values and protobuf messages.

Invariants and semantics: ``decode_x(encode_x(value)) == value``. Times keep whole nanoseconds, which is every float
that stands for a time of day after 1970 and every duration that is a whole number of them. Decoding ignores unknown
fields, takes the documented default of an absent number, and refuses what would be guessed: an unknown or missing
enum value, a missing message without a default, an empty request id. Ranges are not checked again; the router did.

Not here: which failure has which status (``common.grpc_interceptors``), keys and fields of a stream entry (transports).
"""

from __future__ import annotations

from common.codec.envelope import (
    ENVELOPE_MINOR_VERSION,
    ENVELOPE_VERSION,
    EnvelopeValue,
    open_envelope,
    seal,
    seal_item,
)
from common.codec.queries import Uncarriable, decode_query, decode_rules, encode_query, encode_rules
from common.codec.reports import (
    decode_channel_snapshot,
    decode_isolation_report,
    decode_node_stats,
    decode_router_stats,
    encode_channel_snapshot,
    encode_isolation_report,
    encode_node_stats,
    encode_router_stats,
)
from common.codec.requests import (
    decode_question,
    decode_request_record,
    decode_request_spec,
    decode_sampling,
    decode_work_item,
    encode_question,
    encode_request_record,
    encode_request_spec,
    encode_sampling,
    encode_work_item,
)
from common.codec.results import (
    decode_channel_event,
    decode_error,
    decode_request_view,
    decode_result,
    decode_stream_event,
    encode_channel_event,
    encode_error,
    encode_request_view,
    encode_result,
    encode_stream_event,
)
from common.codec.status import decode_status, encode_status

__all__ = [
    "ENVELOPE_MINOR_VERSION",
    "ENVELOPE_VERSION",
    "EnvelopeValue",
    "Uncarriable",
    "decode_channel_event",
    "decode_channel_snapshot",
    "decode_error",
    "decode_isolation_report",
    "decode_node_stats",
    "decode_query",
    "decode_question",
    "decode_request_record",
    "decode_request_spec",
    "decode_request_view",
    "decode_result",
    "decode_router_stats",
    "decode_rules",
    "decode_sampling",
    "decode_status",
    "decode_stream_event",
    "decode_work_item",
    "encode_channel_event",
    "encode_channel_snapshot",
    "encode_error",
    "encode_isolation_report",
    "encode_node_stats",
    "encode_query",
    "encode_question",
    "encode_request_record",
    "encode_request_spec",
    "encode_request_view",
    "encode_result",
    "encode_router_stats",
    "encode_rules",
    "encode_sampling",
    "encode_status",
    "encode_stream_event",
    "encode_work_item",
    "open_envelope",
    "seal",
    "seal_item",
]
