"""What only a call over the network can end in; these belong to the table of ``common.errors``.

KevError
├── UnauthenticatedError       UNAUTHENTICATED        no API key, or none that is known
├── PermissionDeniedError      PERMISSION_DENIED      the API key is for other methods
├── MessageTooLargeError       MESSAGE_TOO_LARGE      a message is above the limit that both ends share
└── ServiceUnavailableError    SERVICE_UNAVAILABLE    nobody answers at the address, or the connection broke

Invariants and semantics: as ``common.errors``.

Not here: how an error travels (``common.codec.status``).
"""

from __future__ import annotations

from common.errors import KevError


class UnauthenticatedError(KevError):
    """The caller gave no API key, or none that is known."""

    reason = "UNAUTHENTICATED"
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDeniedError(KevError):
    """The caller's API key does not reach this far."""

    reason = "PERMISSION_DENIED"
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class MessageTooLargeError(KevError):
    """A request or an answer does not fit into one message."""

    reason = "MESSAGE_TOO_LARGE"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 413


class ServiceUnavailableError(KevError):
    """Nobody answers, or the connection broke; whether the call took effect is not known."""

    reason = "SERVICE_UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True
