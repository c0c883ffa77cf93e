"""The questions that wait for a channel: one line per chooser, in order of arrival less head starts.

Invariants and semantics: a question stands in line since it came, or since a given time before that (its head start);
who stands in line for longer is served first, of equals who came first. So a question is passed only by questions that
come before its head start is made up for, and nobody starves. A later one is tried before an earlier one only if an
earlier one of the same line, which would go to the same channels, found no room. Bounded by entries and by bytes: once
it holds ``max_entries`` questions, or ``max_bytes`` bytes, it takes no more; so its bytes stay below ``max_bytes`` plus
those of one question. An operation takes logarithmic time, whatever waits.

Not here: channels and what they pick (``channels``), what gives a head start (``question_pool``).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.errors import InvariantError

_MIN_TO_TIDY = 64

QuestionT = TypeVar("QuestionT", bound=Hashable)
ChooserT = TypeVar("ChooserT", bound=Hashable)

_Turn = tuple[float, int]
"""Since when somebody stands in line, and his number, which is given once."""


@dataclass(slots=True)
class _Line(Generic[QuestionT]):
    """Who would go to the same channels: a heap in which those who have left stay until they come up."""

    heap: list[tuple[_Turn, QuestionT]] = field(default_factory=list)
    num_waiting: int = 0


class OverflowQueue(Generic[QuestionT, ChooserT]):
    """Questions with their choosers."""

    def __init__(self, max_entries: int | None, max_bytes: int | None = None) -> None:
        """Nobody waits; None is no bound."""
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._waiting: dict[QuestionT, tuple[ChooserT, _Turn, int]] = {}
        self._lines: dict[ChooserT, _Line[QuestionT]] = {}
        self._numbers = itertools.count()
        self.num_bytes = 0
        """Of those who wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, question: object) -> bool:
        return question in self._waiting

    @property
    def room(self) -> int | None:
        """How many more questions its bounds allow for certain, bytes of one question aside; None: any number."""
        if self._max_bytes is not None and self.num_bytes >= self._max_bytes:
            return 0
        return None if self._max_entries is None else self._max_entries - len(self._waiting)

    def add(self, question: QuestionT, choose: ChooserT, num_bytes: int, since_s: float) -> bool:
        """Let a question wait that stands in line since ``since_s``; False: there is no room."""
        if self.room is not None and self.room < 1:
            return False
        turn = (since_s, next(self._numbers))
        self._waiting[question] = choose, turn, num_bytes
        line = self._lines.setdefault(choose, _Line())
        heapq.heappush(line.heap, (turn, question))
        line.num_waiting += 1
        self.num_bytes += num_bytes
        return True

    def remove(self, question: QuestionT) -> None:
        """A question waits no longer."""
        choose, _, num_bytes = self._waiting.pop(question)
        self.num_bytes -= num_bytes
        line = self._lines[choose]
        line.num_waiting -= 1
        if not line.num_waiting:
            del self._lines[choose]
        elif len(line.heap) > max(_MIN_TO_TIDY, 2 * line.num_waiting):
            line.heap = [entry for entry in line.heap if self._waits(entry)]
            heapq.heapify(line.heap)

    def serve(self, try_place: Callable[[QuestionT, ChooserT], bool]) -> None:
        """Offer places in turn; who is placed waits no longer, and a line ends with the first who is not."""
        # Turns are unique, so choosers and questions are never compared.
        heads = [(self._head(line)[0], choose) for choose, line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            _, choose = heapq.heappop(heads)
            line = self._lines[choose]
            question = self._head(line)[1]
            if not try_place(question, choose):
                continue
            self.remove(question)
            if line.num_waiting:
                heapq.heappush(heads, (self._head(line)[0], choose))

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            InvariantError: lines, bytes and bounds do not match.
        """
        in_lines = [question for line in self._lines.values() for turn, question in filter(self._waits, line.heap)]
        if len(in_lines) != len(self._waiting) or set(in_lines) != set(self._waiting):
            raise InvariantError("the lines do not hold exactly the questions that wait")
        if sum(line.num_waiting for line in self._lines.values()) != len(self._waiting):
            raise InvariantError("the lines are miscounted")
        if self.num_bytes != sum(num_bytes for _, _, num_bytes in self._waiting.values()):
            raise InvariantError(f"{self.num_bytes} bytes are noted for those who wait")
        if self._max_entries is not None and len(self._waiting) > self._max_entries:
            raise InvariantError(f"{len(self._waiting)} questions wait where {self._max_entries} may")

    def _waits(self, entry: tuple[_Turn, QuestionT]) -> bool:
        turn, question = entry
        found = self._waiting.get(question)
        return found is not None and found[1] == turn

    def _head(self, line: _Line[QuestionT]) -> tuple[_Turn, QuestionT]:
        """The first who still waits; the line has one."""
        while not self._waits(line.heap[0]):
            heapq.heappop(line.heap)
        return line.heap[0]
