"""Every error Kev raises on purpose, and the one table that maps them to gRPC and HTTP.

KevError
├── InvalidRequestError        INVALID_QUERY          a field is wrong; carries which field and index
│   └── PromptTooLongError     PROMPT_TOO_LONG        a question does not fit its context
├── ConfigError                INVALID_CONFIG         kev.yaml or an environment override is wrong
├── ModelError                 MODEL_UNAVAILABLE      a model cannot be found, read or converted
│   └── UnsupportedModelError  MODEL_UNSUPPORTED      the architecture cannot be isolated
├── IsolationUnavailableError  ISOLATION_UNAVAILABLE  the asked level cannot be kept on this machine
├── IsolationViolationError    ISOLATION_VIOLATION    an answer changed when its question was asked alone again
├── QueueFullError             QUEUE_FULL             no room; carries retry_after_s
├── RequestNotFoundError       REQUEST_NOT_FOUND      unknown or expired request id
├── RequestConflictError       REQUEST_ID_CONFLICT    same id, other content
├── RequestWithdrawnError      REQUEST_WITHDRAWN      same id, but its call ended early and withdrew it
├── DeadlineExceededError      BUDGET_SPENT           the time budget is used up
├── StoreUnavailableError      STORE_UNAVAILABLE      Redis is away, read-only or full
├── ServiceUnavailableError    SERVICE_UNAVAILABLE    nobody answers at the address, or the connection broke
├── DrainingError              NODE_DRAINING          shutting down, accepts nothing new
├── EngineDeadError            ENGINE_DEAD            the model thread ended; restart is needed
├── UnauthenticatedError       UNAUTHENTICATED        no API key, or none that is known
├── PermissionDeniedError      PERMISSION_DENIED      the API key is for other methods
├── MessageTooLargeError       MESSAGE_TOO_LARGE      a message is above the limit that both ends share
├── NonFiniteLogitsError       NON_FINITE_LOGITS      the model gave NaN or infinity for one question
├── OutOfMemoryError           OUT_OF_MEMORY          one question did not fit into memory at run time
└── InvariantError             INTERNAL_BUG           Kev broke its own rule; never caused by input

Semantics: ``str(error)`` is one sentence that says what happened, where, and the way out; it is safe to show to the
caller. Not here: tracebacks for callers (they go to the log only).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import ErrorInfo


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field."""

    field: str
    """Path as the caller wrote it, such as ``queries[2].temperature``."""
    message: str
    """What is wrong and what would be right."""


class KevError(Exception):
    """Base of all errors that Kev raises on purpose.

    Attributes:
        reason: UPPER_SNAKE_CASE, stable across versions.
        grpc_code: name of the google.rpc.Code.
        http_status: status of the HTTP answer.
        retryable: whether the same call may succeed later.
    """

    reason = "INTERNAL_BUG"
    grpc_code = "INTERNAL"
    http_status = 500
    retryable = False

    @property
    def info(self) -> ErrorInfo:
        """This error as data, for results and wire messages."""
        return ErrorInfo(reason=self.reason, message=str(self))


class InvalidRequestError(KevError):
    """The caller sent something wrong; nothing was run.

    Attributes:
        violations: every field found wrong, in the order of the request.
    """

    reason = "INVALID_QUERY"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.violations = tuple(violations)
        shown = "; ".join(f"{v.field}: {v.message}" for v in self.violations[:5])
        more = len(self.violations) - 5
        super().__init__(shown + (f"; and {more} more" if more > 0 else ""))

    @classmethod
    def of(cls, field: str, message: str) -> InvalidRequestError:
        """An error about a single field."""
        return cls([FieldViolation(field, message)])


class PromptTooLongError(InvalidRequestError):
    """A question (with prefix and max_tokens) does not fit into its context."""

    reason = "PROMPT_TOO_LONG"


class ConfigError(KevError):
    """The configuration is wrong."""

    reason = "INVALID_CONFIG"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 500


class ModelError(KevError):
    """A model cannot be found, read or converted."""

    reason = "MODEL_UNAVAILABLE"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 503


class UnsupportedModelError(ModelError):
    """The model's architecture cannot be run in isolated channels."""

    reason = "MODEL_UNSUPPORTED"


class IsolationUnavailableError(KevError):
    """The asked isolation level cannot be kept here."""

    reason = "ISOLATION_UNAVAILABLE"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class IsolationViolationError(KevError):
    """A replay alone gave other bits than the answer in company: the answer is not handed out."""

    reason = "ISOLATION_VIOLATION"


class QueueFullError(KevError):
    """There is no room for the request now.

    Attributes:
        retry_after_s: when room is expected, in seconds.
    """

    reason = "QUEUE_FULL"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @classmethod
    def of_channel(cls, channel_id: int, held: int, limit: int, unit: str) -> QueueFullError:
        """A channel is at one of its bounds, in ``unit`` (questions or bytes)."""
        return cls(
            f"channel {channel_id} already holds {held} {unit}, its limit is {limit}; try again later",
            retry_after_s=1.0,
        )


class RequestNotFoundError(KevError):
    """No such request, or its results have expired."""

    reason = "REQUEST_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class RequestConflictError(KevError):
    """The request id is already used by a request with other content."""

    reason = "REQUEST_ID_CONFLICT"
    grpc_code = "ALREADY_EXISTS"
    http_status = 409

    @classmethod
    def of(cls, request_id: str) -> RequestConflictError:
        """An id that is taken."""
        return cls(f"request id {request_id!r} is already used by a request with other content; choose another id")


class RequestWithdrawnError(KevError):
    """The request was withdrawn when the call that asked it ended early; its id is used up."""

    reason = "REQUEST_WITHDRAWN"
    grpc_code = "ABORTED"
    http_status = 409


class DeadlineExceededError(KevError):
    """The time budget was used up before an outcome was there."""

    reason = "BUDGET_SPENT"
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class StoreUnavailableError(KevError):
    """The store between the tiers (Redis) cannot be used now; whether the call took effect is not known."""

    reason = "STORE_UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class ServiceUnavailableError(KevError):
    """Nobody answers, or the connection broke; whether the call took effect is not known."""

    reason = "SERVICE_UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


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


class DrainingError(KevError):
    """Kev is shutting down and accepts nothing new."""

    reason = "NODE_DRAINING"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class EngineDeadError(KevError):
    """The thread that runs the model has ended; the process must be restarted."""

    reason = "ENGINE_DEAD"
    grpc_code = "UNAVAILABLE"
    http_status = 503


class OutOfMemoryError(KevError):
    """One question could not be given memory while it ran; the others are untouched."""

    reason = "OUT_OF_MEMORY"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 503
    retryable = True


class NonFiniteLogitsError(KevError):
    """The model gave NaN, infinity or no possible token for one question; the others are untouched."""

    reason = "NON_FINITE_LOGITS"


class InvariantError(KevError):
    """Kev broke one of its own rules. Kept under ``python -O``, unlike ``assert``."""


def all_errors() -> tuple[type[KevError], ...]:
    """Every class of this table, for its tests and the codec; a room's own refinements travel as what they refine."""
    found: list[type[KevError]] = []
    todo: list[type[KevError]] = [KevError]
    while todo:
        cls = todo.pop(0)
        if cls.__module__ == __name__:
            found.append(cls)
        todo.extend(cls.__subclasses__())
    return tuple(found)
