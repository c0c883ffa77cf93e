"""The questions that wait for a channel: one line per chooser, all in order of arrival.

Invariants and semantics: first come, first served: a later question is tried before an earlier one only if an earlier
one of the same line, which would go to the same channels, found no room. Bounded by entries and by bytes: once it holds
``max_entries`` questions, or ``max_bytes`` bytes, it takes no more; so its bytes stay below ``max_bytes`` plus those of
one question. Every operation takes constant time, whatever waits.

Not here: channels and what they pick (``channels``).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from common.errors import InvariantError

QuestionT = TypeVar("QuestionT", bound=Hashable)
ChooserT = TypeVar("ChooserT", bound=Hashable)


class OverflowQueue(Generic[QuestionT, ChooserT]):
    """Questions with their choosers, oldest first."""

    def __init__(self, max_entries: int | None, max_bytes: int | None = None) -> None:
        """Nobody waits; None is no bound."""
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._waiting: dict[QuestionT, tuple[ChooserT, int]] = {}
        # Each question with its order of arrival: a look for free room asks the heads of the lines only.
        # OrderedDict, because finding the first key of a dict after many deletions is slow.
        self._lines: dict[ChooserT, OrderedDict[QuestionT, int]] = {}
        self._arrivals = itertools.count()
        self.num_bytes = 0
        """Of those who wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, question: object) -> bool:
        return question in self._waiting

    @property
    def room(self) -> int | None:
        """How many questions certainly find no bound of entries; None: any number."""
        if self._max_bytes is not None and self.num_bytes >= self._max_bytes:
            return 0
        return None if self._max_entries is None else self._max_entries - len(self._waiting)

    def add(self, question: QuestionT, choose: ChooserT, num_bytes: int) -> bool:
        """Let a question wait at the end; False: there is no room."""
        if self.room is not None and self.room < 1:
            return False
        self._waiting[question] = choose, num_bytes
        self._lines.setdefault(choose, OrderedDict())[question] = next(self._arrivals)
        self.num_bytes += num_bytes
        return True

    def remove(self, question: QuestionT) -> None:
        """A question waits no longer."""
        choose, num_bytes = self._waiting.pop(question)
        self.num_bytes -= num_bytes
        line = self._lines[choose]
        del line[question]
        if not line:
            del self._lines[choose]

    def serve(self, try_place: Callable[[QuestionT, ChooserT], bool]) -> None:
        """Offer places, oldest first; who is placed waits no longer, and a line ends with the first who is not."""
        # Orders are unique, so choosers are never compared.
        heads = [(next(iter(line.values())), choose) for choose, line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            _, choose = heapq.heappop(heads)
            line = self._lines[choose]
            question = next(iter(line))
            if not try_place(question, choose):
                continue
            self.remove(question)
            if line:
                heapq.heappush(heads, (next(iter(line.values())), choose))

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            InvariantError: lines, bytes and bounds do not match.
        """
        if sum(map(len, self._lines.values())) != len(self._waiting):
            raise InvariantError("the lines do not hold exactly the questions that wait")
        if self.num_bytes != sum(num_bytes for _, num_bytes in self._waiting.values()):
            raise InvariantError(f"{self.num_bytes} bytes are noted for those who wait")
        if self._max_entries is not None and len(self._waiting) > self._max_entries:
            raise InvariantError(f"{len(self._waiting)} questions wait where {self._max_entries} may")
