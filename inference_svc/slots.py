"""The KV ledger: which sequence owns which positions of the arena.

Invariants and semantics: an extent is a contiguous range of positions with one owner; held extents never overlap;
free + held = total at all times. Every reservation gets a new epoch, so a stale extent is recognised after its
positions went to somebody else. Reads and writes of a plan are checked against the ledger before the forward runs;
a violation raises ``InvariantError`` and fails that question only.

Not here: tensors (``kv_cache``), who gets admitted when (``scheduler``).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from common.errors import InvariantError


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A held range of positions ``[start, start + length)``."""

    start: int
    length: int
    epoch: int
    owner: str

    @property
    def end(self) -> int:
        """First position after the extent."""
        return self.start + self.length


class KVLedger:
    """Books of one arena. Owned by the engine thread."""

    def __init__(self, num_positions: int, alignment_positions: int = 1) -> None:
        """Open the books of an arena.

        Args:
            num_positions: size of the arena.
            alignment_positions: extents start and end at multiples of this.

        Raises:
            InvariantError: the arena is empty or not a multiple of the alignment.
        """
        if num_positions <= 0 or num_positions % alignment_positions:
            raise InvariantError(f"an arena of {num_positions} positions is no multiple of {alignment_positions}")
        self.num_positions = num_positions
        self._alignment = alignment_positions
        self._free: list[tuple[int, int]] = [(0, num_positions)]
        self._held: dict[int, Extent] = {}
        self._next_epoch = 1

    def reserve(self, owner: str, num_positions: int) -> Extent | None:
        """Take the first free range that fits; None if there is none now."""
        size = self._rounded(num_positions)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                rest = [(start + size, end)] if end - start > size else []
                self._free[index : index + 1] = rest
                extent = Extent(start, size, self._next_epoch, owner)
                self._next_epoch += 1
                self._held[extent.start] = extent
                return extent
        return None

    def release(self, extent: Extent) -> None:
        """Give an extent back.

        Raises:
            InvariantError: it is not held, or its positions belong to a later reservation.
        """
        if self._held.get(extent.start) != extent:
            raise InvariantError(f"extent {extent} is not held")
        del self._held[extent.start]
        insort(self._free, (extent.start, extent.end))
        merged: list[tuple[int, int]] = []
        for start, end in self._free:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def check(self, extent: Extent, owner: str, first: int, last: int) -> None:
        """Confirm that ``owner`` holds ``extent`` and that offsets ``[first, last)`` lie inside it.

        Raises:
            InvariantError: stale extent, wrong owner or a row out of range.
        """
        if self._held.get(extent.start) != extent:
            raise InvariantError(f"KV extent {extent} is stale: its positions were released or given to another")
        if extent.owner != owner:
            raise InvariantError(f"KV extent {extent} belongs to {extent.owner}, not to {owner}")
        if not 0 <= first <= last <= extent.length:
            raise InvariantError(f"KV rows {first}:{last} leave extent {extent}")

    def can_ever_fit(self, num_positions: int) -> bool:
        """Whether the range would fit into the empty arena."""
        return self._rounded(num_positions) <= self.num_positions

    def held(self, owner: str) -> list[Extent]:
        """Extents of one owner."""
        return [extent for extent in self._held.values() if extent.owner == owner]

    @property
    def num_held(self) -> int:
        """Positions held now."""
        return sum(extent.length for extent in self._held.values())

    @property
    def num_free(self) -> int:
        """Positions free now, possibly in several ranges."""
        return sum(end - start for start, end in self._free)

    def check_integrity(self) -> None:
        """Verify the books: no overlap, nothing lost.

        Raises:
            InvariantError: the books are wrong.
        """
        ranges = sorted([(e.start, e.end) for e in self._held.values()] + self._free)
        position = 0
        for start, end in ranges:
            if start != position or end <= start:
                raise InvariantError(f"KV books broken at position {position}: next range is {start}:{end}")
            position = end
        if position != self.num_positions:
            raise InvariantError(f"KV books end at {position} of {self.num_positions} positions")

    def _rounded(self, num_positions: int) -> int:
        if num_positions <= 0:
            raise InvariantError(f"cannot reserve {num_positions} positions")
        return -(-num_positions // self._alignment) * self._alignment
