"""The versioned envelope around a value in a stream entry or a stored key.

Invariants and semantics: ``open_envelope(seal(value, trace)) == (value, trace)``. The version changes only when an old
receiver could misread a new entry, so another version is refused. The minor version counts what was added since: a
receiver takes any, passes over fields that it does not know, and names it when it meets a value that it does not know.

Not here: where the bytes go (transports).
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError, Message

from common.codec.requests import (
    decode_request_record,
    decode_request_spec,
    decode_work_item,
    encode_request_record,
    encode_request_spec,
    encode_work_item,
)
from common.codec.results import decode_channel_event, encode_channel_event
from common.errors import InvalidRequestError
from common.types import ChannelEvent, RequestRecord, RequestSpec, WorkItem
from kev.v1 import types_pb2 as pb

ENVELOPE_VERSION = 1
ENVELOPE_MINOR_VERSION = 2
EnvelopeValue = WorkItem | ChannelEvent | RequestRecord | RequestSpec
"""What an envelope may hold."""

_OPENERS: dict[str, Callable[[bytes], EnvelopeValue]] = {
    "kev.v1.WorkItem": lambda payload: decode_work_item(pb.WorkItem.FromString(payload)),
    "kev.v1.ChannelEvent": lambda payload: decode_channel_event(pb.ChannelEvent.FromString(payload)),
    "kev.v1.RequestRecord": lambda payload: decode_request_record(pb.RequestRecord.FromString(payload)),
    "kev.v1.RequestSpec": lambda payload: decode_request_spec(pb.RequestSpec.FromString(payload)),
}


def _encode(value: EnvelopeValue) -> Message:
    match value:
        case WorkItem():
            return encode_work_item(value)
        case RequestRecord():
            return encode_request_record(value)
        case RequestSpec():
            return encode_request_spec(value)
        case _:
            return encode_channel_event(value)


def seal(value: EnvelopeValue, trace: str = "") -> bytes:
    """The value in its envelope, serialized; ``trace`` is a W3C traceparent or empty."""
    return _sealed(_encode(value), trace)


def seal_item(item: WorkItem, trace: str = "") -> tuple[bytes, bytes]:
    """A work item in its envelope, and what it would be in without a trace and with no time left.

    The second is the same for every publication of a question, which has less time left each time.
    """
    message = encode_work_item(item)
    sealed = _sealed(message, trace)
    message.time_budget.Clear()
    return sealed, _sealed(message)


def _sealed(message: Message, trace: str = "") -> bytes:
    return pb.Envelope(
        version=ENVELOPE_VERSION,
        type=message.DESCRIPTOR.full_name,
        payload=message.SerializeToString(),
        trace=trace,
        minor_version=ENVELOPE_MINOR_VERSION,
    ).SerializeToString()


def open_envelope(data: bytes) -> tuple[EnvelopeValue, str]:
    """The value and its trace.

    Raises:
        InvalidRequestError: not an envelope, another version, an unknown type, or a payload that cannot be decoded.
    """
    try:
        envelope = pb.Envelope.FromString(data)
        if envelope.version != ENVELOPE_VERSION:
            raise InvalidRequestError.of("envelope.version", f"is {envelope.version}; {_versions(envelope)}")
        opener = _OPENERS.get(envelope.type)
        if opener is None:
            raise InvalidRequestError.of("envelope.type", f"{envelope.type!r} is not known here; {_versions(envelope)}")
        return opener(envelope.payload), envelope.trace
    except DecodeError as error:
        raise InvalidRequestError.of("envelope", "is not a serialized message; it is damaged or foreign") from error


def _versions(envelope: pb.Envelope) -> str:
    """Which side to upgrade, for whoever finds the entry in the dead letters."""
    return (
        f"this process reads version {ENVELOPE_VERSION} and knows {ENVELOPE_VERSION}.{ENVELOPE_MINOR_VERSION}, "
        f"the sender wrote {envelope.version}.{envelope.minor_version}"
    )
