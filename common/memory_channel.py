"""One channel of the memory transport: what waits in it and what is leased to whom.

Invariants and semantics: an entry is either waiting or leased to one consumer; a consumer holds one at most. Who may
take an entry is asked with ``head``, everything else is told.

Not here: lease ids, attempts and the clock (``common.memory``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.types import WorkItem


@dataclass(slots=True, eq=False)
class Entry:
    """A published item."""

    item: WorkItem
    order: int
    published_at_s: float
    in_line_since_s: float
    """The same, less the head start that its priority gives it."""
    num_bytes: int
    attempt: int = 0
    lease_id: str = ""
    """Of the current lease; empty while the entry waits."""
    consumer: str = ""
    """Holder of the current lease, or of the last one."""
    given_up_by: str | None = None
    """Consumer that could not answer it and leaves it to others."""
    expires_at_s: float = 0.0


@dataclass(slots=True)
class Channel:
    """The entries of one channel."""

    waiting: deque[Entry] = field(default_factory=deque)
    leased: dict[str, Entry] = field(default_factory=dict)
    """By consumer."""
    num_bytes: int = 0

    @property
    def depth(self) -> int:
        """Entries that wait or are leased."""
        return len(self.waiting) + len(self.leased)

    def head(self, consumer: str, now_s: float) -> Entry | None:
        """The entry that the consumer may lease now: one whose lease has run out, its own first, else the next."""
        own = self.leased.get(consumer)
        if own is not None:
            return own if own.expires_at_s <= now_s else None
        expired = [entry for entry in self.leased.values() if entry.expires_at_s <= now_s]
        if expired:
            return min(expired, key=lambda entry: entry.order)
        return next((entry for entry in self.waiting if entry.given_up_by != consumer), None)

    def append(self, entry: Entry) -> None:
        """A new entry waits."""
        self.waiting.append(entry)
        self.num_bytes += entry.num_bytes

    def give(self, entry: Entry, consumer: str) -> None:
        """Lease an entry, whether it waits or was leased to somebody else."""
        self._take_out(entry)
        self.leased[consumer] = entry
        entry.consumer = consumer

    def take_back(self, entry: Entry) -> None:
        """End a lease; the entry waits in front of the others."""
        self._take_out(entry)
        self.waiting.appendleft(entry)
        entry.lease_id = ""

    def remove(self, entry: Entry) -> None:
        """The entry is gone."""
        self._take_out(entry)
        self.num_bytes -= entry.num_bytes
        entry.lease_id = ""

    def _take_out(self, entry: Entry) -> None:
        if entry.lease_id:
            del self.leased[entry.consumer]
        else:
            self.waiting.remove(entry)
