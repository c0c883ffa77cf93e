"""The KV arena: one pair of tensors per layer, positions first, so that an extent is a contiguous piece of memory.

Invariants and semantics: a position's keys and values are written once by the forward that computes it; extents are
zeroed when they are released, so nothing of one question survives into another's memory. Memory is committed by the
operating system only where positions are written.

Not here: who owns which position (``slots``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from inference_svc.memory_plan import KVGeometry
from inference_svc.plan import KVView
from inference_svc.slots import Extent


class KVCache:
    """Keys ``[P, Hkv, Dk]`` and values ``[P, Hkv, Dv]`` of every layer."""

    def __init__(self, geometry: KVGeometry, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the arena (zeros).

        Args:
            geometry: layers, heads and head sizes.
            num_positions: ``P``.
            dtype: element type of keys and values.
            device: where the tensors live.
        """
        heads = geometry.num_kv_heads
        self.num_positions = num_positions
        self.on_fill: Callable[[int, int, float], None] | None = None
        """Told of every range that is filled, and with what; for arenas of other processes that mirror this one."""
        self.keys = [
            torch.zeros(num_positions, heads, geometry.key_head_size, dtype=dtype, device=device)
            for _ in range(geometry.num_layers)
        ]
        self.values = [
            torch.zeros(num_positions, heads, geometry.value_head_size, dtype=dtype, device=device)
            for _ in range(geometry.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store new tokens.

        Args:
            layer: layer index.
            rows: ``[T]`` int64 arena positions, all different.
            key: ``[Hkv, T, Dk]``.
            value: ``[Hkv, T, Dv]``.
        """
        self.keys[layer].index_copy_(0, rows, key.transpose(0, 1))
        self.values[layer].index_copy_(0, rows, value.transpose(0, 1))

    def read(self, layer: int, view: KVView, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[1, Hkv, L, Dk]`` and values ``[1, Hkv, L, Dv]`` of positions ``[first, last)`` of one question.

        A question whose prefix is stored elsewhere gets the two parts joined, so that the kernel sees the same numbers
        in the same shape wherever they are stored.
        """
        ranges = view.ranges(first, last)
        return _gather(self.keys[layer], ranges), _gather(self.values[layer], ranges)

    def scrub(self, extent: Extent) -> None:
        """Zero an extent in every layer."""
        self.fill(extent.start, extent.end, 0.0)

    def fill(self, start: int, end: int, value: float) -> None:
        """Set positions ``[start, end)`` of every layer to zero or NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[start:end].fill_(value)
        if self.on_fill is not None:
            self.on_fill(start, end, value)


def _gather(arena: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    parts = [arena[start:end] for start, end in ranges]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.transpose(0, 1).unsqueeze(0)
