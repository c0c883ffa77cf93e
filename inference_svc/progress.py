"""Tells in the log how far a long work has come, now and then.

Not here: work whose progress somebody watches on a terminal (``kev.model_cache``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from common.clock import SystemClock
from common.ports import Clock

_LOG = logging.getLogger("kev.model")
_EVERY_S = 5.0


@dataclass(slots=True)
class Progress:
    """One line every few seconds; nothing of work that is done before."""

    clock: Clock = field(default_factory=SystemClock)
    _told_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._told_s = self.clock.monotonic()

    def tell(self, what: str, done: int, total: int) -> None:
        """``what``: ``done`` of ``total``."""
        if done < total and self.clock.monotonic() - self._told_s >= _EVERY_S:
            self._told_s = self.clock.monotonic()
            _LOG.info("%s: %d of %d", what, done, total)
