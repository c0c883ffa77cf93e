"""An event loop whose time jumps: whoever sleeps an hour is woken at once, and the clock says an hour has passed.

Invariants and semantics: time moves only when no task can run, and then exactly to the next timer. Work handed to a
thread is done on the spot, so nothing depends on threads. A loop in which everybody waits for ever says so instead of
hanging.

Not here: what happens in that time (``world``).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from common.errors import InvariantError

_T = TypeVar("_T")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for files it moves the time on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let ``timeout`` seconds pass; no file is ever ready."""
        if timeout is None:
            raise InvariantError("the simulation stands still: every task waits for another one")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is a number that starts at 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._jumping.now_s

    def run_in_executor(self, executor: object, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        """Call ``func`` now."""
        done: asyncio.Future[_T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class LoopClock:
    """``common.ports.Clock`` over a loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def time(self) -> float:
        """The same counter."""
        return self._loop.time()


def run_virtually(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in virtual time; waits cost nothing."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
