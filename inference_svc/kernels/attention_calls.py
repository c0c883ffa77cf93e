"""The native functions of attention and of each row alone, as ctypes sees them; ``kernels.h`` says what they do.

Invariants and semantics: same fields and arguments, in the same order, as ``kernels.h`` and ``capi_attention.h`` have.
Kev itself calls these functions inside the native forward; here they are reached one by one, to test and to measure.

Not here: the native forward and the linears (``library``).
"""

from __future__ import annotations

import ctypes

from inference_svc.kernels.layout import Address


class CAttention(ctypes.Structure):
    """``kev::Attention``."""

    _fields_ = (
        ("q", Address),
        ("ldq", ctypes.c_int64),
        ("keys", Address),
        ("values", Address),
        ("out", Address),
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


def declare_attention(calls: ctypes.CDLL) -> None:
    """Give ctypes the signatures of ``capi_attention.h``."""
    whole, count, number = ctypes.c_int, ctypes.c_int64, ctypes.c_float
    rows = (Address, count)
    signatures = {
        "kev_attention_scratch_bytes": (count, whole, count, count, count),
        "kev_attention": (whole, *[Address] * 3, count, Address),
        "kev_rms_norm": (whole, *rows, Address, number, number, count, *rows, count, count),
        "kev_layer_norm": (whole, *rows, Address, Address, number, count, *rows, count, count),
        "kev_rotate": (whole, *rows, *[count] * 3, *[Address] * 3, count, count),
        "kev_activate": (whole, whole, *rows, *rows, count, *rows, count, count),
        "kev_add": (whole, *rows, count, *rows, count, count),
        "kev_soften": (whole, Address, count, number),
        "kev_store": (whole, Address, count, whole, Address),
        "kev_load": (whole, Address, count, whole, Address),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
