"""Sends calls that are made at the same time together: one write, one read, in the order in which they were made.

Invariants and semantics: a call is sent at once while a lane is free; those made meanwhile go together as soon as one
is. Every call gets its own reply or its own error; what hits the connection hits all calls of its batch, and each of
them decides for itself whether to be sent again. A call whose caller left before it was sent is never sent. Once sent,
a batch is read to its end, so that no reply is left for the next one.

Not here: connections and what an error means (``common.redis_link``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Command = tuple[str | bytes | int, ...]
Send = Callable[[Sequence[Command]], Awaitable[Sequence[object]]]
"""Sends commands together; a reply or an exception for each, in their order. Raises what hit all of them."""

_MAX_COMMANDS = 64


class Batches:
    """Collects the commands of one event loop."""

    def __init__(self, send: Send, *, num_lanes: int) -> None:
        """Nothing is sent before the first call.

        Args:
            send: see ``Send``.
            num_lanes: most batches under way at a time.
        """
        self._send = send
        self._num_free = num_lanes
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, command: Command) -> Any:
        """The reply to a command.

        Raises:
            Exception: what the command was answered with, or what hit its batch.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, reply))
        if self._num_free:
            self._num_free -= 1
            task = asyncio.create_task(self._work_off(), name="kev-redis-batches")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await reply

    async def close(self) -> None:
        """Cut off what is under way; those who wait for a reply are cancelled."""
        for _, reply in self._waiting:
            reply.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work_off(self) -> None:
        try:
            while batch := self._next_batch():
                await self._exchange(batch)
        finally:
            self._num_free += 1

    def _next_batch(self) -> list[tuple[Command, asyncio.Future[Any]]]:
        batch: list[tuple[Command, asyncio.Future[Any]]] = []
        while self._waiting and len(batch) < _MAX_COMMANDS:
            command, reply = self._waiting.popleft()
            if not reply.done():
                batch.append((command, reply))
        return batch

    async def _exchange(self, batch: list[tuple[Command, asyncio.Future[Any]]]) -> None:
        replies: Sequence[object]
        try:
            replies = await self._send([command for command, _ in batch])
        except asyncio.CancelledError:
            for _, reply in batch:
                reply.cancel()
            raise
        except Exception as error:
            replies = [error] * len(batch)
        for (_, reply), answer in zip(batch, replies, strict=True):
            if reply.done():
                continue
            if isinstance(answer, BaseException):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)
