"""A ``KevError`` as the status of a failed call: ``google.rpc.Status`` with ErrorInfo, BadRequest and RetryInfo.

Invariants and semantics: ``decode_status(encode_status(error))`` is of the same class, with the same sentence and
``retry_after_s``, and with the first of its violations. All of them are not promised: a status travels in the metadata
of a call, of which a peer takes 8 KiB unless it says otherwise, so no more are listed than fit. The sentence still
counts them all. Source: Google AIP-193.

Not here: which exceptions become a status (``common.grpc_interceptors``).
"""

from __future__ import annotations

from urllib.parse import quote

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import FieldViolation, InvalidRequestError, InvariantError, KevError, QueueFullError, all_errors

DETAILS_KEY = "grpc-status-details-bin"
"""Metadata key under which gRPC carries a serialized status."""
DOMAIN = "kev"

_MAX_METADATA_BYTES = 7600
"""For the sentence in percent-encoding and the status in base64, which holds the sentence once more."""
_MAX_SENTENCE_BYTES = 3200
_OVERHEAD_BYTES = 80
"""Of a packed detail, mostly the name of its type."""
_LONGEST_RETRY_S = 86_400.0
_TYPES = {error.reason: error for error in all_errors()}


def encode_status(error: KevError) -> tuple[str, bytes]:
    """The sentence and the serialized status of an error."""
    message = _clipped(str(error))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.grpc_code), message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if isinstance(error, QueueFullError):
        delay = Duration()
        delay.FromNanoseconds(round(min(max(error.retry_after_s, 0.0), _LONGEST_RETRY_S) * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidRequestError):
        room_bytes = (_MAX_METADATA_BYTES - len(quote(message))) * 3 // 4 - status.ByteSize()
        status.details.add().Pack(_bad_request(error, room_bytes - _OVERHEAD_BYTES))
    return message, status.SerializeToString()


def decode_status(data: bytes) -> KevError | None:
    """The error in a serialized status; None if it is none of Kev's."""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return None
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        for message in (info, bad, retry):
            detail.Unpack(message)
    kind = _TYPES.get(info.reason)
    if info.domain != DOMAIN or kind is None:
        return None
    if issubclass(kind, InvalidRequestError):
        error: KevError = kind([FieldViolation(told.field, told.description) for told in bad.field_violations])
    elif issubclass(kind, QueueFullError):
        error = kind(status.message, retry.retry_delay.ToNanoseconds() / 1e9)
    elif kind is KevError:
        error = InvariantError(status.message)
    else:
        error = kind(status.message)
    error.args = (status.message,)  # the violations listed may be fewer than the sentence counts
    return error


def _bad_request(error: InvalidRequestError, room_bytes: int) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for told in error.violations:
        violation = error_details_pb2.BadRequest.FieldViolation(field=told.field, description=told.message)
        room_bytes -= violation.ByteSize() + 4
        if room_bytes < 0:
            break
        bad.field_violations.append(violation)
    return bad


def _clipped(message: str) -> str:
    if len(quote(message)) <= _MAX_SENTENCE_BYTES:
        return message
    num_chars = len(message)
    while len(quote(message[:num_chars])) > _MAX_SENTENCE_BYTES:
        num_chars = num_chars * 9 // 10
    return message[:num_chars] + "…"
