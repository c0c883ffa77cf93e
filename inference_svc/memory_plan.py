"""What one KV position costs, and how many positions fit.

Invariants and semantics: bytes are exact for what ``kv_cache`` allocates: every layer keeps every position of a
channel, sliding layers included; heads are KV heads, never query heads.

Not here: who owns which position (``slots``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

ALIGNMENT_BYTES = 64
"""Extents start on a cache line, so that no kernel sees a neighbour-dependent alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Shape of the KV cache of one model."""

    num_layers: int
    num_kv_heads: int
    key_head_size: int
    value_head_size: int
    element_bytes: int

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        width = self.key_head_size + self.value_head_size
        return self.num_layers * self.num_kv_heads * width * self.element_bytes

    @property
    def alignment_positions(self) -> int:
        """Smallest number of positions whose keys and whose values fill whole cache lines in every layer."""
        needed = 1
        for head_size in (self.key_head_size, self.value_head_size):
            row_bytes = self.num_kv_heads * head_size * self.element_bytes
            step = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, row_bytes)
            needed = needed * step // gcd(needed, step)
        return needed

    def num_positions(self, kv_cache_bytes: int, max_slots: int, max_context: int, alignment_positions: int) -> int:
        """Positions of the arena.

        Args:
            kv_cache_bytes: budget; 0 means room for ``max_slots`` full contexts.
            max_slots: slots of the engine.
            max_context: longest context of a channel, tokens.
            alignment_positions: extents start at its multiples.
        """
        align = alignment_positions
        if kv_cache_bytes == 0:
            return max_slots * (-(-max_context // align) * align)
        return kv_cache_bytes // self.position_bytes // align * align
