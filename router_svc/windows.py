"""How often, or how much, lately: counts per key over a sliding window.

Invariants and semantics: time is cut into ``num_slots`` slots per window; what happened counts while its slot is the
one of now or one of the ``num_slots - 1`` before it, exactly. Memory is bounded: a slot names at most ``max_keys``
keys; what comes on further keys in that slot counts in the total only. A key that comes often in a slot is among its
first keys, so it is never the one that goes unnamed. Time is passed in and never runs backwards.

Not here: what the counts mean (``breakers``, ``hot_spots``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.errors import InvariantError

NUM_SLOTS = 12
_MAX_KEYS = 4096

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class _Slot(Generic[KeyT]):
    index: int
    counts: dict[KeyT, int] = field(default_factory=dict)
    total: int = 0


class SlidingCounts(Generic[KeyT]):
    """Counts per key; not for several threads."""

    __slots__ = ("_counts", "_max_keys", "_num_slots", "_slots", "_slots_per_s", "_total")

    def __init__(self, window_s: float, *, num_slots: int = NUM_SLOTS, max_keys: int = _MAX_KEYS) -> None:
        """Nothing has happened.

        Args:
            window_s: length of the window, above 0; what happened leaves up to one slot before its end.
            num_slots: slots per window, at least 1.
            max_keys: most keys that one slot names, at least 1.

        Raises:
            InvariantError: a size is out of range.
        """
        if not window_s > 0 or num_slots < 1 or max_keys < 1:
            raise InvariantError("a window needs a length, slots and room for keys")
        self._num_slots = num_slots
        self._slots_per_s = num_slots / window_s
        self._max_keys = max_keys
        self._slots: deque[_Slot[KeyT]] = deque([_Slot(0)])
        self._counts: dict[KeyT, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Everything in the window as of the latest time told, named or not."""
        return self._total

    def add(self, key: KeyT, now_s: float, amount: int = 1) -> int:
        """Count ``amount``, at least 1; returns the key's count in the window."""
        self.move_to(now_s)
        slot = self._slots[-1]
        slot.total += amount
        self._total += amount
        in_slot = slot.counts.get(key, 0)
        if not in_slot and len(slot.counts) >= self._max_keys:
            return self._counts.get(key, 0)
        slot.counts[key] = in_slot + amount
        self._counts[key] = count = self._counts.get(key, 0) + amount
        return count

    def move_to(self, now_s: float) -> None:
        """Forget what has left the window."""
        index = int(now_s * self._slots_per_s)
        slots = self._slots
        if index <= slots[-1].index:
            return
        slots.append(_Slot(index))
        while slots[0].index <= index - self._num_slots:
            self._forget(slots.popleft())

    def count(self, key: KeyT) -> int:
        """How often a key is in the window."""
        return self._counts.get(key, 0)

    def most_common(self, number: int) -> list[tuple[KeyT, int]]:
        """The keys with the highest counts, highest first."""
        ordered = sorted(self._counts.items(), key=lambda item: item[1], reverse=True)
        return ordered[:number]

    def clear(self) -> None:
        """Nothing has happened."""
        last = self._slots[-1].index
        self._slots = deque([_Slot(last)])
        self._counts.clear()
        self._total = 0

    def _forget(self, slot: _Slot[KeyT]) -> None:
        self._total -= slot.total
        counts = self._counts
        for key, number in slot.counts.items():
            left = counts[key] - number
            if left:
                counts[key] = left
            else:
                del counts[key]
