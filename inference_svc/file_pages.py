"""Lets go of pages of weight files that were read, so that a model need never be in memory as a whole.

Invariants and semantics: weights that are loaded in the type they have on disk are views of their mapped files: the
kernel reads a page when it is touched, and again after it was let go. Only pages that show a safetensors file are ever
let go; anything else, and any system that does not tell its mappings, is left alone. Weights must not have been written
to: their pages would show the file again.

Not here: which weights are done with (``decoder``, ``equalize``, ``kernels.packed``).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import torch
from torch import nn

_MAPS = Path("/proc/self/maps")
_DONT_NEED = 4
"""MADV_DONTNEED of Linux."""
_BLOCK_ROWS = 4096


def let_go(tensors: Iterable[torch.Tensor]) -> int:
    """Let go of the file pages that lie wholly in tensors; the bytes that were let go."""
    files = _file_mappings()
    num_bytes = 0
    for tensor in tensors if files else ():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(low <= first and last <= high for low, high in files):
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            if advise(first, last - first, _DONT_NEED) == 0:
                num_bytes += last - first
    return num_bytes


@contextmanager
def let_go_after_use(module: nn.Module) -> Iterator[None]:
    """While this lasts, layers and embeddings let go of their pages as soon as they have run, a head block by block."""
    hooks, heads = [], [part for part in module.modules() if _is_head(part)]
    for part in module.modules():
        parts = list(part) if isinstance(part, nn.ModuleList) else [part] if isinstance(part, nn.Embedding) else []
        hooks += [one.register_forward_hook(lambda done, _args, _made: _let_go_of(done)) for one in parts]
    for head in heads:
        head.__class__ = _HeadInBlocks
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for head in heads:
            head.__class__ = nn.Linear


def _is_head(part: nn.Module) -> TypeGuard[nn.Linear]:
    return type(part) is nn.Linear and part.out_features > 8 * part.in_features


class _HeadInBlocks(nn.Linear):
    """A linear that lets go of its rows as it goes through them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        made = []
        for first in range(0, self.out_features, _BLOCK_ROWS):
            rows = self.weight[first : first + _BLOCK_ROWS]
            bias = None if self.bias is None else self.bias[first : first + _BLOCK_ROWS]
            made.append(nn.functional.linear(input, rows, bias))
            let_go([rows])
        return torch.cat(made, -1)


def _let_go_of(module: nn.Module) -> None:
    let_go(module.parameters())


def _file_mappings() -> list[tuple[int, int]]:
    """Addresses at which safetensors files are mapped."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        if line.endswith(".safetensors"):
            low, high = line.split(" ", 1)[0].split("-")
            found.append((int(low, 16), int(high, 16)))
    return found
