"""Whether and when a call that failed is tried again.

Invariants and semantics: only UNAVAILABLE is tried again, with full jitter, until patience has ended. A try that may
reach a server that is up costs a retry of the connection's budget (one per ten calls, and a reserve), so that retries
never become the load. While there is no connection, and while a server says that it drains, waiting costs nothing: the
next try is made when somebody is there again. A restart of the only server is therefore sat out by any number of
callers, each for as long as its own patience lasts. A call that a server had for a while begins a new patience when it
breaks.

Not here: the calls (``common.grpc_calls``).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable

from common.errors import DrainingError, KevError

_MAY_PASS = "UNAVAILABLE"
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_LOOK_EVERY_S = 0.1
"""Callers look for a new connection at most so long apart, so that they do not all call at once when there is one."""
_HAD_S = 1.0
"""A try that lasted so long had a server: what failed before is over."""
_RETRY_RESERVE = 100.0
_RETRIES_PER_CALL = 0.1


class RetryBudget:
    """At most one retry per ten calls in the long run, of all calls over one connection."""

    def __init__(self) -> None:
        self._tokens = _RETRY_RESERVE

    def earn(self) -> None:
        """A call begins."""
        self._tokens = min(_RETRY_RESERVE, self._tokens + _RETRIES_PER_CALL)

    def spend(self) -> bool:
        """Take one retry; False: none is left."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Patience:
    """Decides for one call."""

    def __init__(self, patience_s: float, budget: RetryBudget, is_connected: Callable[[], bool]) -> None:
        """Nothing has failed yet.

        Args:
            patience_s: seconds from the first failure in a row to the last try.
            budget: of all calls over the same connection.
            is_connected: whether there is a connection; makes one if there is none.
        """
        self._patience_s = patience_s
        self._budget = budget
        self._is_connected = is_connected
        self._num_failures = 0
        self._first_failure_s = self._tried_at_s = 0.0

    def progress(self) -> None:
        """The call got somewhere: what failed before no longer counts."""
        self._num_failures = 0

    async def pause_after(self, error: KevError, until_s: float = math.inf) -> None:
        """Wait before the next try, which must begin before ``until_s`` of the monotonic clock.

        Source: full jitter, Brooker 2015, "Exponential Backoff And Jitter".

        Raises:
            KevError: ``error``, when trying again is of no use or patience has ended.
        """
        now_s = time.monotonic()
        if self._num_failures == 0 or now_s - self._tried_at_s > _HAD_S:
            self._first_failure_s, self._num_failures = now_s, 0
        self._num_failures += 1
        end_s = min(self._first_failure_s + self._patience_s, until_s)
        may_pass = error.retryable and error.grpc_code == _MAY_PASS
        if not may_pass or now_s >= end_s or not (self._is_free_after(error) or self._budget.spend()):
            raise error
        longest_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(self._num_failures, 10))
        await asyncio.sleep(min(random.uniform(0, longest_s), end_s - now_s))
        while not self._is_connected():
            if time.monotonic() >= end_s:
                raise error
            await asyncio.sleep(random.uniform(0, _LOOK_EVERY_S))
        self._tried_at_s = time.monotonic()

    def _is_free_after(self, error: KevError) -> bool:
        return isinstance(error, DrainingError) or not self._is_connected()
