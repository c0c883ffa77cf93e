"""Blocking methods over asynchronous ones, for ordinary code: what ``kev.Engine`` and ``kev.Client`` share.

Invariants and semantics: the backend runs on an event loop of its own in a thread of its own, so it may be used from
any thread, inside notebooks and at import time. A caller that is interrupted cancels its call. ``close`` lets every
call that other threads still wait for have its outcome, then ends loop and thread.

Not here: what the methods do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from common.errors import EngineDeadError, KevError
from common.types import ChannelSnapshot, EngineStats, IsolationReport, RequestView, Result, StreamEvent

_T = TypeVar("_T")


class AsyncBackend(Protocol):
    """The asynchronous methods (``kev.AsyncEngine``, ``kev.AsyncClient``)."""

    async def submit(self, queries: Any, /, **options: Any) -> str:
        """See ``AsyncEngine.submit``."""
        ...

    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        """See ``AsyncEngine.wait``."""
        ...

    async def poll(self, request_id: str) -> RequestView:
        """See ``AsyncEngine.poll``."""
        ...

    async def ask(self, queries: Any, /, **options: Any) -> list[Result]:
        """See ``AsyncEngine.ask``."""
        ...

    def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        """See ``AsyncEngine.stream``."""
        ...

    async def cancel(self, request_id: str) -> int:
        """See ``AsyncEngine.cancel``."""
        ...

    async def isolation(self) -> IsolationReport:
        """See ``AsyncEngine.isolation``."""
        ...

    async def channels(self) -> list[ChannelSnapshot]:
        """See ``AsyncEngine.channels``."""
        ...

    async def stats(self) -> EngineStats:
        """See ``AsyncEngine.stats``."""
        ...

    async def close(self) -> None:
        """See ``AsyncEngine.close``."""
        ...


class Blocking:
    """The methods of a backend, blocking. Use it as a context manager, or call ``close``."""

    _kind = "engine"
    """What it is in the words of an error."""

    def __init__(self, backend: AsyncBackend) -> None:
        """Run a backend on a loop of its own."""
        self._backend = backend
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._handing_over = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kev-loop", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, queries: Any, /, **options: Any) -> str:
        """Accept independent questions; returns the request id. See ``AsyncEngine.submit``."""
        return self._call(self._backend.submit(queries, **options))

    def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        """All results; waits at most ``timeout`` seconds. See ``AsyncEngine.wait``."""
        return self._call(self._backend.wait(request_id, timeout))

    def poll(self, request_id: str) -> RequestView:
        """The request as it stands. See ``AsyncEngine.poll``."""
        return self._call(self._backend.poll(request_id))

    def ask(self, queries: Any, /, **options: Any) -> list[Result]:
        """Submit and wait. See ``AsyncEngine.ask``."""
        return self._call(self._backend.ask(queries, **options))

    def stream(self, request_id: str, from_event_index: int = 0) -> Iterator[StreamEvent]:
        """Events of a request as they come. See ``AsyncEngine.stream``."""
        events = self._backend.stream(request_id, from_event_index)
        try:
            while True:
                try:
                    yield self._call(next_event(events))
                except StopAsyncIteration:
                    return
        finally:
            with suppress(EngineDeadError):  # closed meanwhile, and the stream with it
                self._call(close_events(events))

    def cancel(self, request_id: str) -> int:
        """Withdraw the questions without an outcome. See ``AsyncEngine.cancel``."""
        return self._call(self._backend.cancel(request_id))

    def isolation(self) -> IsolationReport:
        """What isolation can be promised. See ``AsyncEngine.isolation``."""
        return self._call(self._backend.isolation())

    def channels(self) -> list[ChannelSnapshot]:
        """The channel pool."""
        return self._call(self._backend.channels())

    def stats(self) -> EngineStats:
        """Counters since start."""
        return self._call(self._backend.stats())

    def close(self) -> None:
        """Stop and free everything. A second call does nothing."""
        with suppress(EngineDeadError):
            self._hand_over(self._end(), last=True).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        """Close, and let every call that other threads still wait for have its outcome before the loop stops."""
        await self._backend.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls)
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _hand_over(self, work: Coroutine[Any, Any, _T], *, last: bool = False) -> Future[_T]:
        """Start work on the loop; the lock sees to it that nothing comes after the last."""
        if threading.current_thread() is self._thread:
            work.close()
            name = type(self).__name__
            raise KevError(f"kev.{name} was called from its own event loop; use kev.Async{name} there")
        with self._handing_over:
            if self._closing:
                work.close()
                raise EngineDeadError(f"the {self._kind} is closed; open a new one")
            self._closing = last
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = self._hand_over(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def next_event(events: AsyncIterator[StreamEvent]) -> StreamEvent:
    """The next event, as a coroutine."""
    return await anext(events)


async def close_events(events: AsyncIterator[StreamEvent]) -> None:
    """Close a stream, if it is of a kind that can be closed."""
    close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
    if close is not None:
        await close()
