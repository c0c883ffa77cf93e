"""Keyed digests that are the same in every process, on every machine and after every restart.

Invariants and semantics: a digest depends on key and data only; another key gives unrelated digests. Source: BLAKE2b
in keyed mode, RFC 7693, sec. 2.9.

Not here: what the digests are used for (``ring``, ``strategies``, ``embedding``).
"""

from __future__ import annotations

import hashlib

_KEY_BYTES = 32
_DIGEST_BYTES = 8


class KeyedDigest:
    """64-bit digests under one key."""

    __slots__ = ("_keyed",)

    def __init__(self, key: str) -> None:
        # BLAKE2b takes keys of up to 64 bytes; hashing first takes keys of any length.
        fixed = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
        self._keyed = hashlib.blake2b(key=fixed, digest_size=_DIGEST_BYTES)

    def __call__(self, data: bytes) -> int:
        """The digest of ``data``, 0 to 2^64 - 1."""
        state = self._keyed.copy()
        state.update(data)
        return int.from_bytes(state.digest(), "big")
