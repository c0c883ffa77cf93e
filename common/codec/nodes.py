"""What a node tells about itself, as bytes.

Not here: the fields (``common.codec.reports``).
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from common.codec.reports import (
    decode_isolation_report,
    decode_node_stats,
    encode_isolation_report,
    encode_node_stats,
)
from common.errors import InvalidRequestError
from common.types import IsolationReport, NodeStats
from kev.v1 import types_pb2 as pb


def dump_node(report: IsolationReport, stats: NodeStats) -> tuple[bytes, bytes]:
    """Report and counters, serialized."""
    return encode_isolation_report(report).SerializeToString(), encode_node_stats(stats).SerializeToString()


def load_node(report: bytes, stats: bytes) -> tuple[IsolationReport, NodeStats]:
    """Report and counters.

    Raises:
        InvalidRequestError: the bytes are no such messages.
    """
    try:
        parsed = pb.IsolationReport.FromString(report), pb.NodeStats.FromString(stats)
    except DecodeError:
        raise InvalidRequestError.of("node", "is not what a node tells about itself") from None
    return decode_isolation_report(parsed[0]), decode_node_stats(parsed[1])
