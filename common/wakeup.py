"""Wakes every task that waits for a change.

Invariants and semantics: a caller checks its condition and then calls ``wait`` with no ``await`` in between; every
``wake_all`` after that check ends the wait. All waiters wake, so that the cancellation of one never swallows the
wake-up of another. One event loop; a cancelled wait leaves nothing behind.

Not here: the condition itself, which stays with its owner and is checked again after each wake-up.
"""

from __future__ import annotations

import asyncio


class WakeUp:
    """A broadcast without memory: it reaches those who wait at that moment."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake_all(self) -> None:
        """End every wait that has begun."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next ``wake_all``; ``None`` waits for ever.

        Returns:
            False when ``timeout_s`` seconds of real time passed first.
        """
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
