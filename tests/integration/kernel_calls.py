"""The native functions of attention and of each row alone, as ctypes calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from inference_svc.kernels.attention_calls import declare_attention
from inference_svc.kernels.library import Library, kernels

Floats = npt.NDArray[np.float32]

ALIGNMENT = 64


@contextmanager
def variant(name: str) -> Iterator[ctypes.CDLL]:
    """The native kernels, running this variant; skips the test where that is impossible."""
    found = kernels()
    if not isinstance(found, Library):
        pytest.skip(found)
    calls = found.calls
    declare_attention(calls)
    before = calls.kev_isa_name()
    if calls.kev_isa_select(name.encode()):
        pytest.skip(f"this machine cannot run {name}")
    try:
        yield calls
    finally:
        calls.kev_isa_select(before)


def rounded(x: Floats) -> Floats:
    """The nearest bfloat16 numbers (ties to even), as floats."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def as_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """Floats that a bfloat16 can hold, as bfloat16."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)
