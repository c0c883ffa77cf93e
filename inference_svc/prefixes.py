"""Read-only prefixes: token runs whose KV is stored once and seen by several sequences.

Invariants and semantics: an entry is found by (tenant, SHA-256 of the ids) and its ids are compared on every hit, so
no collision and no other tenant can ever be served. One sequence, the builder, writes the entry; the others wait until
it is complete; if the builder leaves early the next one continues at the token where it stopped. A complete entry is
never written again. References are counted; with ``keep`` an unreferenced complete entry stays until its room is
needed, else it goes with its last user.

Not here: the decision to share (the router sets ``num_shared``), tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from common.errors import InvariantError
from inference_svc.slots import Extent, KVLedger

PrefixKey = tuple[str, bytes]
"""(tenant, SHA-256 of the token ids)."""


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

    def __init__(self, ledger: KVLedger, *, keep: bool, scrub: Callable[[Extent], None]) -> None:
        self._ledger = ledger
        self._keep = keep
        self._scrub = scrub
        self._entries: OrderedDict[PrefixKey, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry | None:
        """The entry with exactly these ids of this tenant, or None."""
        entry = self._entries.get(prefix_key(tenant, ids))
        return entry if entry is not None and entry.ids == ids else None

    def acquire(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry | None:
        """Take a reference on the prefix, creating it if needed; None when there is no room now."""
        entry = self.find(tenant, ids)
        if entry is None:
            entry = self._create(tenant, ids)
        if entry is not None:
            entry.num_references += 1
            self._entries.move_to_end(entry.key)
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

    def evict_one(self) -> bool:
        """Drop the least recently used unreferenced entry. False: there is none."""
        for entry in self._entries.values():
            if entry.num_references == 0:
                self._drop(entry)
                return True
        return False

    def _create(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry | None:
        key = prefix_key(tenant, ids)
        if key in self._entries:
            return None
        extent = self._ledger.reserve(f"prefix:{key[1].hex()[:16]}", len(ids))
        if extent is None:
            return None
        entry = PrefixEntry(key, ids, extent)
        self._entries[key] = entry
        return entry

    def _drop(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        self._scrub(entry.extent)
        self._ledger.release(entry.extent)


def prefix_key(tenant: str, ids: tuple[int, ...]) -> PrefixKey:
    """Key of a prefix: the ids are hashed as little-endian 8-byte integers."""
    digest = sha256()
    for token_id in ids:
        digest.update(token_id.to_bytes(8, "little"))
    return tenant, digest.digest()
