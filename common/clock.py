"""Clocks: the system's, and one that tests move by hand.

Not here: waiting; loops wait on events or with timeouts and ask the clock what time it is.
"""

from __future__ import annotations

import time

from common.errors import InvariantError


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never runs backwards."""
        return time.monotonic()

    def time(self) -> float:
        """Unix seconds, UTC."""
        return time.time()


class ManualClock:
    """A clock that stands still until ``advance`` is called."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now_s

    def time(self) -> float:
        """Unix seconds; the same counter."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward.

        Raises:
            InvariantError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise InvariantError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
