"""Waits at Redis for a change, on behalf of everybody in the process who waits for one.

Invariants and semantics: at most one blocking read at a time, only while somebody waits, and it takes nothing: a
waiter that is cancelled leaves it alone. A waiter notes a signal's ``version``, looks at Redis, and then waits past
that version; a change after the look ends the wait. While the store is away waits just run their time, so a waiter
waits in slices and looks again: what rings no bell (a lease that runs out) is seen then, too.

Not here: what the change was (the waiter looks again).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from common.errors import KevError
from common.outage_log import OutageLog
from common.redis_link import RedisLink
from common.wakeup import WakeUp

_PAUSE_S = 0.2

_log = logging.getLogger("kev.redis")


class Signal:
    """Counts changes of one kind."""

    __slots__ = ("_changed", "version")

    def __init__(self) -> None:
        self.version = 0
        self._changed = WakeUp()

    def set(self) -> None:
        """There may be something new."""
        self.version += 1
        self._changed.wake_all()

    async def wait_past(self, version: int, wait_s: float) -> None:
        """Return when ``version`` is no longer the current one, or after ``wait_s`` seconds."""
        if self.version == version:
            await self._changed.wait(wait_s)


class RedisListener:
    """Turns new entries of streams into signals."""

    def __init__(self, link: RedisLink, streams: Mapping[str, tuple[Signal, ...]]) -> None:
        """Listen to nothing yet.

        Args:
            link: where to listen.
            streams: keys of streams, with the signals that a new entry sets.
        """
        self._link = link
        self._streams = streams
        self._num_waiting = 0
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._outage = OutageLog(_log)

    async def wait(self, signal: Signal, version: int, wait_s: float) -> None:
        """Wait until the signal is past ``version``, at most ``wait_s`` seconds."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="kev-redis-listener")
        self._num_waiting += 1
        self._wanted.set()
        try:
            await signal.wait_past(version, wait_s)
        finally:
            self._num_waiting -= 1

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        positions: dict[str, str] = {}
        while True:
            if not self._num_waiting:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                if not positions:
                    positions = await self._link.interruptible(self._link.last_ids(list(self._streams)))
                    changed = list(self._streams)
                else:
                    new = await self._link.interruptible(self._link.wait_for_entries(positions))
                    positions.update(new)
                    changed = list(new)
            except KevError as error:
                self._outage.failed(f"cannot listen for changes: {error}")
                positions = {}
                await asyncio.sleep(_PAUSE_S)
                continue
            self._outage.worked()
            for stream in changed:
                for signal in self._streams[stream]:
                    signal.set()
