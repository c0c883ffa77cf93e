"""Cancels a call exactly where it awaits for the n-th time, as ``Task.cancel`` does when it comes at that moment.

Invariants and semantics: awaits of tasks that the call starts or shields do not count; they are not cancelled with it.

Not here: what must hold afterwards (the tests).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class _CancelledAt:
    """Awaits a call and cancels the task that does so where the call suspends for the n-th time."""

    def __init__(self, call: Coroutine[Any, Any, Any], place: int) -> None:
        self._call = call
        self._place = place
        self.num_awaits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._call.__await__()
        task = asyncio.current_task()
        assert task is not None
        sent: BaseException | None = None
        while True:
            try:
                waited_for = next(inner) if sent is None else inner.throw(sent)
            except StopIteration as end:
                return end.value
            self.num_awaits += 1
            if self.num_awaits == self._place:
                task.cancel()
            sent = None
            try:
                yield waited_for
            except BaseException as error:
                sent = error


async def cancelled_at(call: Coroutine[Any, Any, Any], place: int) -> bool:
    """Run a call and cancel it at an await; False: it has fewer, and ran to its end."""
    cut = _CancelledAt(call, place)

    async def run() -> None:
        await cut

    await asyncio.gather(asyncio.create_task(run()), return_exceptions=True)
    return cut.num_awaits >= place
