"""Read-only prefixes: token runs whose KV is stored once and seen by several sequences.

Invariants and semantics: an entry is found by (tenant, model, SHA-256 of the ids), and its ids are compared on every
hit, so no collision and no other tenant can ever be served. One sequence, the builder, writes the entry; the others
wait until it is complete; if the builder leaves early the next one continues at the token where it stopped. A complete
entry is never written again. References are counted; with ``keep`` an unreferenced complete entry stays until its room
is needed, else it goes with its last user. What is stored stays within ``max_positions`` as far as it is unreferenced:
the least recently used goes first. Hit or miss, a question's bits are the same: a prefix is cut and computed alike.

Not here: the decision to share (the router sets ``num_shared``), tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from common.errors import InvariantError
from inference_svc.slots import Extent, KVLedger

PrefixKey = tuple[str, str, bytes]
"""(tenant, fingerprint of the model, SHA-256 of the token ids)."""


@dataclass(slots=True)
class PrefixEntry:
    """One stored prefix."""

    key: PrefixKey
    ids: tuple[int, ...]
    extent: Extent
    num_computed: int = 0
    num_references: int = 0
    builder_id: int | None = None
    """Sequence that is writing it; None when complete or abandoned."""
    mask_digest: bytes = b""
    """Chain over the segments that wrote it; every user's receipt continues it."""

    @property
    def complete(self) -> bool:
        """All its tokens are in the KV cache."""
        return self.num_computed == len(self.ids)

    @property
    def owner(self) -> str:
        """Owner name of its extent in the ledger."""
        return self.extent.owner


class PrefixTable:
    """All prefixes of one engine. Owned by the engine thread."""

    def __init__(
        self,
        ledger: KVLedger,
        *,
        keep: bool,
        scrub: Callable[[Extent], None],
        model: str = "",
        max_positions: int | None = None,
    ) -> None:
        """An empty table.

        Args:
            ledger: books of the arena that prefixes are stored in.
            keep: whether complete prefixes outlive their users.
            scrub: zeroes the memory of an extent before its positions are given away.
            model: fingerprint of the model that computes them.
            max_positions: positions beyond which unused entries go although there is room; None for no such limit.
        """
        self._ledger = ledger
        self._keep = keep
        self._model = model
        self._max_positions = max_positions
        self._scrub = scrub
        self._entries: OrderedDict[PrefixKey, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_positions(self) -> int:
        """Positions that all entries hold."""
        return sum(entry.extent.length for entry in self._entries.values())

    @property
    def num_references(self) -> int:
        """References on all entries."""
        return sum(entry.num_references for entry in self._entries.values())

    def find(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry | None:
        """The entry with exactly these ids of this tenant, or None."""
        entry = self._entries.get(prefix_key(tenant, self._model, ids))
        return entry if entry is not None and entry.ids == ids else None

    def acquire(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry | None:
        """Take a reference on the prefix, creating it if needed; None when there is no room now."""
        entry = self.find(tenant, ids)
        if entry is None:
            entry = self._create(tenant, ids)
        if entry is not None:
            entry.num_references += 1
            self._entries.move_to_end(entry.key)
            self._trim()
        return entry

    def release(self, entry: PrefixEntry, sequence_id: int) -> None:
        """Give a reference back; a builder that leaves makes room for the next one.

        Raises:
            InvariantError: there was no reference.
        """
        if entry.num_references <= 0:
            raise InvariantError(f"prefix {entry.owner} has no reference to give back")
        entry.num_references -= 1
        if entry.builder_id == sequence_id:
            entry.builder_id = None
        if entry.num_references == 0 and not (self._keep and entry.complete):
            self._drop(entry)
        self._trim()

    def evict_one(self) -> bool:
        """Drop the least recently used unreferenced entry. False: there is none."""
        for entry in self._entries.values():
            if entry.num_references == 0:
                self._drop(entry)
                return True
        return False

    def _create(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry | None:
        key = prefix_key(tenant, self._model, ids)
        if key in self._entries:
            return None
        extent = self._ledger.reserve(f"prefix:{key[-1].hex()[:16]}", len(ids))
        if extent is None:
            return None
        entry = PrefixEntry(key, ids, extent)
        self._entries[key] = entry
        return entry

    def _trim(self) -> None:
        """Drop unused entries while all of them together hold more than they may."""
        while self._max_positions is not None and self.num_positions > self._max_positions and self.evict_one():
            pass

    def _drop(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        self._scrub(entry.extent)
        self._ledger.release(entry.extent)


def prefix_key(tenant: str, model: str, ids: tuple[int, ...]) -> PrefixKey:
    """Key of a prefix: the ids are hashed as little-endian 8-byte integers."""
    digest = sha256()
    for token_id in ids:
        digest.update(token_id.to_bytes(8, "little"))
    return tenant, model, digest.digest()
