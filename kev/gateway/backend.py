"""What the gateway and the command line need of the thing that answers.

Invariants and semantics: these are the methods of ``kev.AsyncEngine``; a remote client with the same methods serves
as well. All validation happens inside ``submit``, so callers hand on what they were given.

Not here: implementations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from common.types import ChannelSnapshot, EngineStats, IsolationReport, RequestView, Result, StreamEvent


class Backend(Protocol):
    """Accepts requests and tells what becomes of them. Every method raises ``KevError`` subclasses only."""

    async def submit(self, queries: Any, /, **options: Any) -> str:
        """Accept a request and return its id; the first two arguments are positional so that any option name is data.

        Raises:
            InvalidRequestError: a field is wrong; nothing was started.
            QueueFullError: there is no room now.
            RequestConflictError: the id belongs to another request.
            DrainingError: nothing new is accepted.
        """
        ...

    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        """All results, once every question has its outcome; waits at most ``timeout`` seconds.

        Raises:
            RequestNotFoundError: unknown or expired.
            DeadlineExceededError: the wait ended first; the request goes on.
        """
        ...

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands.

        Raises:
            RequestNotFoundError: unknown or expired.
        """
        ...

    def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        """Events from an index on: one ``result`` per question, then ``done``, then the iteration ends.

        Raises:
            RequestNotFoundError: unknown or expired; raised by the first step of the iteration.
        """
        ...

    async def cancel(self, request_id: str) -> int:
        """Withdraw what has no outcome yet and return the number of questions withdrawn.

        Raises:
            RequestNotFoundError: unknown or expired.
        """
        ...

    async def isolation(self) -> IsolationReport:
        """What isolation this process can promise."""
        ...

    async def channels(self) -> list[ChannelSnapshot]:
        """The channel pool."""
        ...

    async def stats(self) -> EngineStats:
        """Counters since start."""
        ...

    async def ready(self) -> None:
        """Return when requests would be answered now.

        Raises:
            KevError: they would not; the message says why.
        """
        ...

    async def close(self) -> None:
        """Stop and free everything; a second call does nothing."""
        ...
