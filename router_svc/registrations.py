"""What the registry knows of request ids, asked by one call per id at a time.

Invariants and semantics: calls of one id are served one after the other, so that a retry joins what runs already. A
request whose submission did not complete is withdrawn before its id is used again; a withdrawal that fails is repeated.
A lookup that decides about a refusal takes ``_LOOKUP_S`` at most: a store that is slow or away must not hold it up.

Not here: registering (``service``, through ``common.ports.Intake``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from common.errors import KevError, RequestConflictError, StoreUnavailableError
from common.ports import RequestRegistry
from common.types import RequestRecord, RequestSpec

_LOOKUP_S = 0.025

_log = logging.getLogger(__name__)


class Registrations:
    """The registry as the router uses it, for one event loop."""

    def __init__(self, registry: RequestRegistry, wake_up: Callable[[], object]) -> None:
        """Nothing is asked yet.

        Args:
            registry: where requests are registered.
            wake_up: called when ``retry_withdrawals`` has something to do.
        """
        self._registry = registry
        self._wake_up = wake_up
        self._to_withdraw: dict[str, None] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def has_withdrawals(self) -> bool:
        """Whether requests wait for their withdrawal."""
        return bool(self._to_withdraw)

    def lock_of(self, request_id: str) -> asyncio.Lock:
        """To be held while something is decided about an id."""
        lock = self._locks.get(request_id)
        if lock is None:
            lock = self._locks[request_id] = asyncio.Lock()
        return lock

    async def knows(self, spec: RequestSpec) -> bool:
        """Whether exactly this request is registered; False also when the store cannot say so at once.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
        """
        try:
            async with asyncio.timeout(_LOOKUP_S):
                return await self._registry.lookup(spec.request_id, spec.content_digest)
        except (TimeoutError, StoreUnavailableError):
            return False

    async def lost(self, request_ids: Sequence[str]) -> list[str]:
        """Which of these registered requests the store has lost."""
        return await self._registry.unregistered(request_ids)

    async def restore(self, record: RequestRecord, age_ms: int) -> bool:
        """Register a request again that the store has lost; False: its id belongs to another one by now."""
        try:
            await self._registry.restore(record, age_ms)
        except RequestConflictError:
            return False
        return True

    def withdraw_later(self, request_id: str) -> None:
        """Have a request withdrawn by the next call of its id, or by ``retry_withdrawals``."""
        self._to_withdraw[request_id] = None
        self._wake_up()

    async def withdraw_if_due(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete; the caller holds the lock of the id.

        Raises:
            KevError: it stays due.
        """
        if request_id in self._to_withdraw:
            await self._registry.withdraw(request_id)
            self._to_withdraw.pop(request_id, None)

    async def try_withdraw(self, request_id: str) -> None:
        """Withdraw now what is due; after a failure or an interruption it stays due."""
        try:
            async with self.lock_of(request_id):
                await self.withdraw_if_due(request_id)
        except KevError:
            _log.exception("could not withdraw a request; trying again")

    async def retry_withdrawals(self) -> None:
        """Withdraw what is due."""
        for request_id in list(self._to_withdraw):
            await self.try_withdraw(request_id)
