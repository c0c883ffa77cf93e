"""The request registry of the distributed form: who asked what, kept in Redis.

Invariants and semantics: see ``common.ports.RequestRegistry``. An id belongs to its content from registration until the
request is withdrawn, or ``retention_s`` after it was completed. A request that nobody completes is kept until its last
time budget plus twice that time have passed. The aggregator learns of a request when it first meets its id, and of its
age by Redis' clock, so that any aggregator can take over.

Not here: outcomes and events (``redis_streams``).
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

from common import redis_scripts_publish as publish_scripts
from common import redis_scripts_registry as scripts
from common.codec import open_envelope, seal
from common.errors import InvalidRequestError, QueueFullError, RequestConflictError
from common.redis_link import RedisLink
from common.types import RequestRecord
from common.wording import is_a

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRequest:
    """A request as the registry knows it."""

    record: RequestRecord
    age_ms: int
    """Since its registration, by Redis' clock."""


class RedisRegistry:
    """``RequestRegistry`` in Redis, and what an aggregator needs to take requests over."""

    def __init__(self, *, link: RedisLink, max_requests: int = 10_000, retention_s: float = 600.0) -> None:
        """Join a deployment; nothing is sent before the first call.

        Args:
            link: the connection, which outlives the registry.
            max_requests: most unfinished requests.
            retention_s: seconds a completed request is kept.
        """
        self._link = link
        self._max_requests = max_requests
        self._retention_ms = int(retention_s * 1000)

    # ---- router's side

    async def register(self, record: RequestRecord) -> bool:
        """Set the record if the id is free; see ``common.ports.RequestRegistry``."""
        timeouts_ms = [question.timeout_ms for question in record.questions] or [0]
        registration = scripts.Registration(
            request_id=record.request_id,
            digest=record.content_digest,
            token=uuid4().hex,
            envelope=seal(record),
            first_timeout_ms=min(timeouts_ms),
            ttl_ms=max(timeouts_ms) + 2 * self._retention_ms,
        )
        state = await self._link.unbroken(scripts.register(self._link, registration, self._max_requests))
        if state is scripts.RegisterState.CONFLICT:
            raise _conflict(record.request_id)
        if state is scripts.RegisterState.FULL:
            raise QueueFullError(
                f"{self._max_requests} requests are running, as many as can be kept; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        return state is scripts.RegisterState.NEW

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        """Whether exactly this request is registered.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
        """
        found = await self._link.unbroken(scripts.find(self._link, request_id))
        if found is not None and found.digest != content_digest:
            raise _conflict(request_id)
        return found is not None

    async def withdraw(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete and forget it, so that its id can be used again."""
        await self._link.unbroken(publish_scripts.withdraw(self._link, request_id, None, forget=True))

    # ---- aggregator's side

    async def find(self, request_id: str) -> RegisteredRequest | None:
        """The request; ``None``: never registered, withdrawn or expired.

        Raises:
            InvalidRequestError: what is kept cannot be decoded.
        """
        found = await self._link.unbroken(scripts.find(self._link, request_id))
        if found is None:
            return None
        record, _ = open_envelope(found.envelope)
        if not is_a(record, RequestRecord):
            raise InvalidRequestError.of("envelope.type", f"is {type(record).__name__}, not the record of a request")
        return RegisteredRequest(record=record, age_ms=found.age_ms)

    async def complete(self, request_id: str) -> None:
        """Every question has its outcome: keep the request for ``retention_s`` from now. Repeating it does no harm."""
        await self._link.unbroken(scripts.complete(self._link, request_id, self._retention_ms))

    async def unfinished(self, *, overdue_only: bool = False) -> list[str]:
        """Ids of the requests that are not complete, earliest deadline first.

        ``overdue_only``: only those of which a question has run out of time.
        """
        return await self._link.unbroken(scripts.unfinished(self._link, self._max_requests, overdue_only=overdue_only))


def _conflict(request_id: str) -> RequestConflictError:
    return RequestConflictError(
        f"request id {request_id!r} is already used by a request with other content; choose another id"
    )
