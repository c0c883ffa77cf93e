"""The native functions of attention and of each row alone, as ctypes calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from inference_svc.kernels.library import Library, kernels

Floats = npt.NDArray[np.float32]

ALIGNMENT = 64


class CAttention(ctypes.Structure):
    """``kev::Attention``."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("ldq", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("ldo", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("kv_type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


_COUNT, _ADDRESS, _WHOLE, _NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_ROWS = (_ADDRESS, _COUNT)
_SIGNATURES = {
    "kev_attention_scratch_bytes": (_COUNT, _WHOLE, _COUNT, _COUNT, _COUNT),
    "kev_attention": (_WHOLE, _ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS),
    "kev_rms_norm": (_WHOLE, *_ROWS, _ADDRESS, _NUMBER, _NUMBER, _COUNT, *_ROWS, _COUNT, _COUNT),
    "kev_layer_norm": (_WHOLE, *_ROWS, _ADDRESS, _ADDRESS, _NUMBER, _COUNT, *_ROWS, _COUNT, _COUNT),
    "kev_rotate": (_WHOLE, *_ROWS, *[_COUNT] * 3, *[_ADDRESS] * 3, _COUNT, _COUNT),
    "kev_activate": (_WHOLE, _WHOLE, *_ROWS, *_ROWS, _COUNT, *_ROWS, _COUNT, _COUNT),
    "kev_add": (_WHOLE, *_ROWS, _COUNT, *_ROWS, _COUNT, _COUNT),
    "kev_soften": (_WHOLE, _ADDRESS, _COUNT, _NUMBER),
    "kev_store": (_WHOLE, _ADDRESS, _COUNT, _WHOLE, _ADDRESS),
    "kev_load": (_WHOLE, _ADDRESS, _COUNT, _WHOLE, _ADDRESS),
}


@contextmanager
def variant(name: str) -> Iterator[ctypes.CDLL]:
    """The native kernels, running this variant; skips the test where that is impossible."""
    found = kernels()
    if not isinstance(found, Library):
        pytest.skip(found)
    calls = found.calls
    for function_name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(calls, function_name)
        function.restype, function.argtypes = result, arguments
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
