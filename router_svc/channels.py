"""The pool of channels: who is on which channel, and who waits for one.

Invariants and semantics: all channels exist from the start. A question is on exactly one channel, or waits, or is not
here. A channel never holds more than ``channel_queue_size`` outstanding questions and the overflow queue never more
than ``overflow_queue_size``. Waiting questions are looked at in order of arrival whenever room appears: a later one
passes an earlier one only on a channel that the earlier one could not take.

The breaker: a question whose channel is ``breaker_queue_length`` or more outstanding questions longer than the
shortest one (an idle channel has none), or full, goes to the shortest one instead. 0 switches it off.

Not here: strategies (they come as ``choose``), publishing, time budgets, clocks (``now_s`` is passed in).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.errors import InvariantError
from common.types import ChannelSnapshot
from router_svc.strategies import Pick

_MIN_RETRY_AFTER_S = 0.05
_MAX_RETRY_AFTER_S = 60.0
_UNKNOWN_RETRY_AFTER_S = 1.0
_SMOOTHING = 0.2


class Chooser(Protocol):
    """Picks a channel for the loads of the moment. Equal choosers pick equally, so their questions form one line."""

    def __call__(self, loads: Sequence[int]) -> Pick:
        """The channel for ``loads``."""
        ...

    def __hash__(self) -> int:
        """Equal choosers have equal hashes."""
        ...


QuestionT = TypeVar("QuestionT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a question was put."""

    channel_id: int
    hash_bucket: int
    diverted_from: int | None = None
    """Channel that the strategy had picked, when the breaker chose another one."""


class ChannelPool(Generic[QuestionT]):
    """Owned by one event loop; every method changes state in one piece."""

    def __init__(
        self, num_channels: int, *, channel_queue_size: int, overflow_queue_size: int | None, breaker_queue_length: int
    ) -> None:
        """Create idle channels.

        Args:
            num_channels: at least 1; ids are 0 to this, exclusive.
            channel_queue_size: most outstanding questions on one channel, at least 1.
            overflow_queue_size: most waiting questions; None for no bound, 0 for no overflow queue.
            breaker_queue_length: see the module; 0 never diverts.

        Raises:
            InvariantError: a size is out of range.
        """
        if num_channels < 1 or channel_queue_size < 1 or breaker_queue_length < 0 or (overflow_queue_size or 0) < 0:
            raise InvariantError("a pool needs channels and room on each of them")
        self._loads = [0] * num_channels
        self._num_placed = [0] * num_channels
        self._num_diverted = [0] * num_channels
        self._channel_queue_size = channel_queue_size
        self._overflow_queue_size = overflow_queue_size
        self._breaker_queue_length = breaker_queue_length
        self._placed: dict[QuestionT, Placement] = {}
        self._waiting: dict[QuestionT, Chooser] = {}
        # One line per chooser, each question with its order of arrival: a look for free room asks the heads only.
        # OrderedDict, because finding the first key of a dict after many deletions is slow.
        self._lines: dict[Chooser, OrderedDict[QuestionT, int]] = {}
        self._arrivals = itertools.count()
        self._last_release_s: float | None = None
        self._release_interval_s: float | None = None

    @property
    def num_outstanding(self) -> int:
        """Questions on channels."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Questions in the overflow queue."""
        return len(self._waiting)

    @property
    def loads(self) -> tuple[int, ...]:
        """Outstanding questions per channel."""
        return tuple(self._loads)

    def shortage(self, num_questions: int) -> int:
        """How many of so many new questions certainly find no room now, whatever their channels."""
        if self._overflow_queue_size is None:
            return 0
        num_free = len(self._loads) * self._channel_queue_size - len(self._placed)
        return max(0, num_questions - num_free - (self._overflow_queue_size - len(self._waiting)))

    def find(self, question: QuestionT) -> Placement | None:
        """Where a question is; None while it waits or when it is not here."""
        return self._placed.get(question)

    def preview(self, choose: Chooser) -> Placement:
        """The strategy's pick for the loads of the moment, room or not; changes nothing."""
        pick = choose(self._loads)
        return Placement(channel_id=pick.channel_id, hash_bucket=pick.hash_bucket)

    def place(self, question: QuestionT, choose: Chooser) -> Placement | None:
        """Put a question on a channel; None when there is no room for it.

        Raises:
            InvariantError: the question is already here.
        """
        self._check_new(question)
        return self._try_place(question, choose)

    def enqueue(self, question: QuestionT, choose: Chooser) -> bool:
        """Let a question wait at the end of the overflow queue; False when the queue is full.

        Raises:
            InvariantError: the question is already here.
        """
        self._check_new(question)
        if self._overflow_queue_size is not None and len(self._waiting) >= self._overflow_queue_size:
            return False
        self._waiting[question] = choose
        self._lines.setdefault(choose, OrderedDict())[question] = next(self._arrivals)
        return True

    def drain(self) -> list[tuple[QuestionT, Placement]]:
        """Place every waiting question for which there is room now, in order."""
        moved: list[tuple[QuestionT, Placement]] = []
        # (order of arrival of the head, its chooser); orders are unique, so choosers are never compared.
        heads = [(next(iter(line.values())), choose) for choose, line in self._lines.items()]
        heapq.heapify(heads)
        while heads and len(self._placed) < len(self._loads) * self._channel_queue_size:
            _, choose = heapq.heappop(heads)
            line = self._lines[choose]
            question = next(iter(line))
            placement = self._try_place(question, choose)
            if placement is None:
                continue
            self._stop_waiting(question)
            moved.append((question, placement))
            if line:
                heapq.heappush(heads, (next(iter(line.values())), choose))
        return moved

    def release(self, question: QuestionT, now_s: float) -> None:
        """Take a question off its channel because it has its outcome.

        Args:
            question: placed before.
            now_s: seconds of a clock that never runs backwards; feeds ``retry_after_s``.

        Raises:
            InvariantError: the question is on no channel.
        """
        placement = self._placed.pop(question, None)
        if placement is None:
            raise InvariantError("released a question that is on no channel")
        self._loads[placement.channel_id] -= 1
        self._note_release(now_s)

    def withdraw(self, question: QuestionT) -> None:
        """Forget a question that will never run, on a channel or waiting; its place is not counted as used.

        Raises:
            InvariantError: the question is not here.
        """
        if question in self._waiting:
            self._stop_waiting(question)
            return
        placement = self._placed.pop(question, None)
        if placement is None:
            raise InvariantError("withdrew a question that is not in the pool")
        self._loads[placement.channel_id] -= 1
        self._num_placed[placement.channel_id] -= 1
        if placement.diverted_from is not None:
            self._num_diverted[placement.diverted_from] -= 1

    def retry_after_s(self, num_missing: int) -> float:
        """When ``num_missing`` more places are expected, in seconds, from the pace of the latest releases."""
        if self._release_interval_s is None:
            return _UNKNOWN_RETRY_AFTER_S
        return min(max(self._release_interval_s * num_missing, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)

    def snapshots(self) -> list[ChannelSnapshot]:
        """Occupancy of every channel, by id."""
        shortest = min(self._loads)
        return [
            ChannelSnapshot(
                channel_id=channel_id,
                num_queued=load,
                num_total=self._num_placed[channel_id],
                num_diverted=self._num_diverted[channel_id],
                breaker_open=self._breaker_open(load, shortest),
            )
            for channel_id, load in enumerate(self._loads)
        ]

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            InvariantError: the counts do not match who is here.
        """
        counted = [0] * len(self._loads)
        for placement in self._placed.values():
            counted[placement.channel_id] += 1
        if counted != self._loads or max(counted) > self._channel_queue_size:
            raise InvariantError(f"channel loads are {self._loads}, counted {counted}")
        if self._placed.keys() & self._waiting.keys():
            raise InvariantError("a question is on a channel and waits for one")
        if sum(map(len, self._lines.values())) != len(self._waiting):
            raise InvariantError("the lines do not hold exactly the questions that wait")
        if self._overflow_queue_size is not None and len(self._waiting) > self._overflow_queue_size:
            raise InvariantError(f"{len(self._waiting)} questions wait where {self._overflow_queue_size} may")

    def _stop_waiting(self, question: QuestionT) -> None:
        choose = self._waiting.pop(question)
        line = self._lines[choose]
        del line[question]
        if not line:
            del self._lines[choose]

    def _check_new(self, question: QuestionT) -> None:
        if question in self._placed or question in self._waiting:
            raise InvariantError("the question is already in the pool")

    def _try_place(self, question: QuestionT, choose: Chooser) -> Placement | None:
        pick = choose(self._loads)
        channel_id, diverted_from = pick.channel_id, None
        if self._breaker_queue_length and pick.may_divert:
            shortest = min(self._loads)
            if self._breaker_open(self._loads[channel_id], shortest):
                diverted_from, channel_id = channel_id, self._loads.index(shortest)
        if self._loads[channel_id] >= self._channel_queue_size:
            return None
        self._loads[channel_id] += 1
        self._num_placed[channel_id] += 1
        if diverted_from is not None:
            self._num_diverted[diverted_from] += 1
        placement = Placement(channel_id=channel_id, hash_bucket=pick.hash_bucket, diverted_from=diverted_from)
        self._placed[question] = placement
        return placement

    def _breaker_open(self, load: int, shortest: int) -> bool:
        if not self._breaker_queue_length or load == shortest:
            return False
        return load - shortest >= self._breaker_queue_length or load >= self._channel_queue_size

    def _note_release(self, now_s: float) -> None:
        if self._last_release_s is not None:
            interval_s = now_s - self._last_release_s
            before_s = self._release_interval_s if self._release_interval_s is not None else interval_s
            self._release_interval_s = before_s + _SMOOTHING * (interval_s - before_s)
        # The gap after the last question of a burst says nothing about the pace.
        self._last_release_s = now_s if self._placed else None
