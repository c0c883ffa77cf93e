"""The request registry of the distributed form: who asked what, kept in Redis.

Invariants and semantics: see ``common.ports.RequestRegistry``. An id belongs to its content from registration until the
request is withdrawn, or ``retention_s`` after its last outcome. A request that is never completed is kept until its
last time budget plus twice that time have passed.

Not here: what aggregators make of it (``redis_source``), outcomes and events (``redis_streams``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from common import redis_scripts_publish as publish_scripts
from common import redis_scripts_registry as scripts
from common.codec import seal
from common.errors import QueueFullError, RequestConflictError
from common.redis_link import RedisLink
from common.types import RequestRecord

_RETRY_AFTER_S = 1.0
_MAX_PER_CALL = 1_000
"""Most requests that one script looks for: the server does nothing else meanwhile."""


class RedisRegistry:
    """``RequestRegistry`` in Redis."""

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
        self._doubtful: dict[str, str] = {}
        """Token of each registration that ended without an answer, until its request is withdrawn."""

    # ---- router's side

    async def register(self, record: RequestRecord) -> bool:
        """Set the record if the id is free; see ``common.ports.RequestRegistry``."""
        registration = self.registration_of(record)
        with self.doubting(registration):
            return self.is_new(record, await self._link.unbroken(scripts.register(self._link, registration)))

    async def restore(self, record: RequestRecord, age_ms: int) -> None:
        """Set the record again unless there is one; see ``common.ports.RequestRegistry``."""
        restoring = scripts.restore(self._link, self.registration_of(record), age_ms)
        self.is_new(record, await self._link.unbroken(restoring))

    async def unregistered(self, request_ids: Sequence[str]) -> list[str]:
        """Which of these requests have no record; see ``common.ports.RequestRegistry``."""
        unregistered: list[str] = []
        for first in range(0, len(request_ids), _MAX_PER_CALL):
            some = request_ids[first : first + _MAX_PER_CALL]
            unregistered += await self._link.unbroken(scripts.unregistered(self._link, some))
        return unregistered

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        """Whether exactly this request is registered.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
        """
        digest = await self._link.interruptible(scripts.digest(self._link, request_id))
        if digest is not None and digest != content_digest:
            raise RequestConflictError.of(request_id)
        return digest is not None

    async def withdraw(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete and forget it, so that its id can be used again.

        After a registration that ended without an answer the request may be there by another call; then it stays.
        """
        await self._link.unbroken(self._withdraw(request_id, self._doubtful.get(request_id)))
        self._doubtful.pop(request_id, None)

    # ---- one registration, for those who send it together with something else

    def registration_of(self, record: RequestRecord) -> scripts.Registration:
        """What is kept of a request."""
        timeouts_ms = [question.timeout_ms for question in record.questions] or [0]
        return scripts.Registration(
            request_id=record.request_id,
            digest=record.content_digest,
            token=uuid4().hex,
            envelope=seal(record),
            first_timeout_ms=min(timeouts_ms),
            ttl_ms=max(timeouts_ms) + 2 * self._retention_ms,
            num_questions=len(record.questions),
            max_requests=self._max_requests,
        )

    @contextmanager
    def doubting(self, registration: scripts.Registration) -> Iterator[None]:
        """Remember a registration that ends without an answer, so that ``withdraw`` hits no other call's request."""
        self._doubtful.pop(registration.request_id, None)
        try:
            yield
        except (RequestConflictError, QueueFullError):
            raise
        except BaseException:
            self._doubtful[registration.request_id] = registration.token
            raise

    def is_new(self, record: RequestRecord, state: scripts.RegisterState) -> bool:
        """What became of a registration; False: the same request is there.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
            QueueFullError: the registry is full of unfinished requests.
        """
        if state is scripts.RegisterState.CONFLICT:
            raise RequestConflictError.of(record.request_id)
        if state is scripts.RegisterState.FULL:
            raise QueueFullError(
                f"{self._max_requests} requests are running, as many as can be kept; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        return state is scripts.RegisterState.NEW

    async def _withdraw(self, request_id: str, token: str | None) -> None:
        if token is None or await scripts.is_registered_by(self._link, request_id, token):
            await publish_scripts.withdraw(self._link, request_id, None, forget=True)
