"""Work done for a connection, which ends when the connection does.

Invariants and semantics: a client that leaves ends the work for it at once, wherever it is: while the submission still
waits for room, while the answer is awaited, while events are sent. A request belongs to the open POST exchanges that
submitted it; when the last of them leaves without an answer, the request is withdrawn, which frees its slots. A retry
with the same id therefore keeps a request alive whose first connection broke. Requests submitted in the background,
by another gateway or by an earlier exchange that has ended belong to nobody and are never withdrawn here.

Not here: HTTP (``gateway.app``), events (``gateway.events``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from common.errors import DrainingError, KevError, RequestNotFoundError
from kev.gateway.backend import Backend

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client has closed its connection; nobody will read an answer."""


async def while_connected(receive: Receive, stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``, which is cancelled and awaited when the client leaves or ``stop`` is set.

    The body must have been read before: ``receive`` is consumed.

    Raises:
        ClientGoneError: the client left first.
        DrainingError: ``stop`` was set first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    stopping = asyncio.create_task(stop.wait())
    tasks = {working, leaving, stopping}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientGoneError
        raise DrainingError("Kev is shutting down and its grace period is over; send the request to another instance")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if working.done() and not working.cancelled():
            working.exception()  # retrieved, so that asyncio does not report it


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Submissions:
    """Which open exchanges own which request."""

    def __init__(self) -> None:
        self._owners: Counter[str] = Counter()
        self._withdrawals: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def own(self, backend: Backend, queries: object, options: Mapping[str, object]) -> AsyncIterator[str]:
        """Submit, and yield the request id. Leaving by any exception, cancellation included, gives up ownership.

        Raises:
            KevError: whatever ``submit`` raises.
        """
        foreign = await self._is_foreign(backend, options.get("request_id"))
        request_id = await self._submit(backend, queries, options, foreign=foreign)
        if foreign:
            yield request_id
            return
        self._owners[request_id] += 1
        try:
            yield request_id
        except BaseException:
            await self._leave(backend, request_id, withdraw=True)
            raise
        await self._leave(backend, request_id, withdraw=False)

    async def _is_foreign(self, backend: Backend, request_id: object) -> bool:
        if not isinstance(request_id, str) or self._owners[request_id] > 0:
            return False
        try:
            await backend.poll(request_id)
        except RequestNotFoundError:
            return False
        return True

    async def _submit(self, backend: Backend, queries: object, options: Mapping[str, object], *, foreign: bool) -> str:
        submitting = asyncio.create_task(backend.submit(queries, **options))
        try:
            await asyncio.wait({submitting})
        except asyncio.CancelledError:
            # The submission may have succeeded in the very moment of the cancellation; then it is withdrawn.
            submitting.cancel()
            await asyncio.wait({submitting})
            accepted = not submitting.cancelled() and submitting.exception() is None
            if accepted and not foreign and not self._owners[submitting.result()]:
                await self._withdraw(backend, submitting.result())
            raise
        return submitting.result()

    async def _leave(self, backend: Backend, request_id: str, *, withdraw: bool) -> None:
        self._owners[request_id] -= 1
        if self._owners[request_id] > 0:
            return
        del self._owners[request_id]
        if withdraw:
            await self._withdraw(backend, request_id)

    async def _withdraw(self, backend: Backend, request_id: str) -> None:
        # A task of its own: the exchange may be cancelled a second time while it leaves.
        task = asyncio.create_task(_cancel_quietly(backend, request_id))
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)
        await asyncio.shield(task)


async def _cancel_quietly(backend: Backend, request_id: str) -> None:
    try:
        await backend.cancel(request_id)
    except KevError as error:
        _log.debug("request %s could not be withdrawn: %s", request_id, error)
