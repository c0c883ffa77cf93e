"""The loop of a peer's process: orders on standard input, replies on what was standard output.

Invariants and semantics: libraries print where they like; their standard output goes to standard error, so that only
replies are on the pipe. An order that fails is answered with ``Failed`` and the loop goes on; the end of the input, or
of the bench, ends the process. Standard library only.

Not here: the messages (``wire``), what a peer does (``peers``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from bench.compare.wire import Answer, Answered, Failed, Loaded, LoadOrder, Message, RunOrder, decode, encode

_PR_SET_PDEATHSIG = 1
"""prctl(2): a signal for when the parent dies. A stopped process would never see the end of its input."""


class NotOfferedError(Exception):
    """This peer does not do such a thing at all."""


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        """Start."""
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def of(self, perf_counter: float) -> float:
        """The same for a reading of ``time.perf_counter``."""
        return perf_counter - self._start


class Peer(Protocol):
    """A loaded system."""

    versions: dict[str, str]

    def prepare(self) -> None:
        """Forget what earlier orders left behind; not timed."""
        ...

    def run(self, order: RunOrder, clock: Clock) -> list[Answer]:
        """Answer all questions, in order."""
        ...


def serve(load: Callable[[LoadOrder], Peer]) -> None:
    """Obey until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    state = _State(load)
    while line := sys.stdin.readline():
        print(encode(state.reply(decode(line))), file=replies, flush=True)
    replies.close()
    os._exit(0)  # Threads of some libraries never end by themselves.


class _State:
    def __init__(self, load: Callable[[LoadOrder], Peer]) -> None:
        self._load = load
        self._peer: Peer | None = None

    def reply(self, order: Message) -> Message:
        try:
            if isinstance(order, LoadOrder):
                clock = Clock()
                self._peer = self._load(order)
                return Loaded(versions=self._peer.versions, load_s=clock.now())
            if isinstance(order, RunOrder) and self._peer is not None:
                self._peer.prepare()
                clock = Clock()
                answers = self._peer.run(order, clock)
                return Answered(answers=tuple(answers), total_s=clock.now())
            return Failed(message=f"{type(order).__name__} came out of turn")
        except NotOfferedError as error:
            return Failed(message=str(error), offered=False)
        except BaseException as error:  # Peers fail in ways of their own; the bench reports them and goes on.
            traceback.print_exc()
            return Failed(message=f"{type(error).__name__}: {str(error).strip()[:500]}")


def joined(ids: list[int] | tuple[int, ...]) -> str:
    """Token ids as ``Answer.output``."""
    return " ".join(map(str, ids))
