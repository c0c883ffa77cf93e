"""Tells of failures that repeat while something is away, without a line for each of them.

Invariants and semantics: a failure is told when it begins or reads otherwise, then once in ``interval_s`` with how
often it has come, and its end is told if more than one line was due. Nothing is kept but the last message.

Not here: who tries again, and when (``redis_link``, ``redis_listener``, ``redis_source``, ``redis_upkeep``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_INTERVAL_S = 10.0


class OutageLog:
    """The lines about one thing that may be away."""

    def __init__(
        self, log: logging.Logger, *, interval_s: float = _INTERVAL_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing has failed yet.

        Args:
            log: where lines go, as warnings.
            interval_s: seconds between two lines about the same failure.
            now_s: seconds of a clock that never runs backwards.
        """
        self._log = log
        self._interval_s = interval_s
        self._now_s = now_s
        self._message = ""
        self._told_at_s = 0.0
        self._num_untold = 0
        self._num_failed = 0

    def failed(self, message: str) -> None:
        """It has failed once more."""
        now_s = self._now_s()
        self._num_failed += 1
        if message == self._message and now_s - self._told_at_s < self._interval_s:
            self._num_untold += 1
            return
        again = f" ({self._num_untold} more times since the last such line)" if self._num_untold else ""
        self._log.warning("%s%s", message, again)
        self._message, self._told_at_s, self._num_untold = message, now_s, 0

    def worked(self) -> None:
        """It works, again or still."""
        if not self._num_failed:
            return
        if self._num_untold:
            self._log.warning("works again after %d failures: %s", self._num_failed, self._message)
        self._message, self._num_untold, self._num_failed = "", 0, 0
