"""Where packed tensors go while a model is packed, and where they lie afterwards.

Invariants and semantics: tensors are added one after the other, each in blocks as they are made, so that nothing as
large as a tensor need be held beside it. They get numbers from 1 and have addresses only when the store is finished.

Not here: what is packed (``native_model``), a store that is a file (``native_image``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

from common.errors import InvariantError
from inference_svc.kernels.library import Library


@dataclass(frozen=True, slots=True)
class Structures:
    """A model's structures as bytes, with numbers of tensors in the place of pointers."""

    model: bytes
    layers: bytes
    mlps: bytes


class TensorStore(Protocol):
    """Takes the tensors of one model."""

    def add(self, dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[torch.Tensor]) -> int:
        """Take a tensor; its number.

        Args:
            dtype: of the tensor.
            shape: of the tensor.
            blocks: its bytes in order, in contiguous pieces of any type.
        """
        ...

    def finish(self, structures: Structures) -> tuple[torch.Tensor, ...]:
        """All tensors by number, each on a cache line; nothing is added afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """Tensors in memory of this process."""

    library: Library
    _tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[torch.Tensor]) -> int:
        """See ``TensorStore``."""
        whole = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        self.library.calls.kev_prefer_huge_pages(whole.data_ptr(), whole.numel())
        filled = 0
        for block in blocks:
            piece = block.flatten().view(torch.uint8)
            whole[filled : filled + piece.numel()] = piece
            filled += piece.numel()
        check_filled(filled, dtype, shape)
        self._tensors.append(whole.view(dtype).view(shape))
        return len(self._tensors)

    def finish(self, structures: Structures) -> tuple[torch.Tensor, ...]:
        """See ``TensorStore``."""
        return tuple(self._tensors)


def check_filled(num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Compare what was given with what was announced.

    Raises:
        InvariantError: they differ.
    """
    if num_bytes != prod(shape) * dtype.itemsize:
        raise InvariantError(f"{num_bytes} bytes were packed as a {dtype} tensor of shape {list(shape)}")
