"""The structures of the C ABI as ctypes sees them; ``kernels.h`` and ``forward.h`` say what the fields mean.

Invariants and semantics: same fields, same order, same sizes as in the headers; ``check_layout`` compares the sizes
with the library that is loaded, so that a stale build is refused instead of misread.

Not here: who fills them (``inference_svc.native_model``), the library itself (``library``).
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

from common.errors import InvariantError

Address = ctypes.c_void_p


class Precision(IntEnum):
    """Element type of packed weights, keys and values."""

    F32 = 0
    BF16 = 1
    I8 = 2


class NormKind(IntEnum):
    """Normalization before, inside or after a block."""

    NONE = 0
    RMS = 1
    LAYER = 2


class Activation(IntEnum):
    """Function between the linears of an MLP."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3


class Work(IntEnum):
    """What a forward's time is spent on: ``work_times.h``."""

    EMBED = 0
    NORM = 1
    PREPARE = 2
    QKV = 3
    ROTATE = 4
    ATTENTION = 5
    OUT = 6
    UP = 7
    ACTIVATE = 8
    DOWN = 9
    EXPERTS = 10
    HEAD = 11
    WAIT = 12


class CWeight(ctypes.Structure):
    """``kev::Weight``."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("data", Address),
        ("scale", Address),
        ("sums", Address),
        ("precision", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class CSegment(ctypes.Structure):
    """``kev::Segment``."""

    _fields_ = (
        ("row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("prefix_start", ctypes.c_int64),
        ("num_prefix", ctypes.c_int64),
        ("private_start", ctypes.c_int64),
    )


class CNorm(ctypes.Structure):
    """``kev::Norm``."""

    _fields_ = (
        ("weight", Address),
        ("bias", Address),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class CMlp(ctypes.Structure):
    """``kev::Mlp``."""

    _fields_ = (("up", CWeight), ("down", CWeight), ("up_bias", Address), ("down_bias", Address))


class CLayer(ctypes.Structure):
    """``kev::Layer``."""

    _fields_ = (
        ("before_attention", CNorm),
        ("after_attention", CNorm),
        ("before_mlp", CNorm),
        ("after_mlp", CNorm),
        ("query", CNorm),
        ("key", CNorm),
        ("qkv", CWeight),
        ("out", CWeight),
        ("qkv_bias", Address),
        ("out_bias", Address),
        ("cos", Address),
        ("sin", Address),
        ("keys", Address),
        ("values", Address),
        ("mlps", ctypes.POINTER(CMlp)),
        ("router", CWeight),
        ("rotary_half", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("renormalize", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class CModel(ctypes.Structure):
    """``kev::Model``."""

    _fields_ = (
        ("layers", ctypes.POINTER(CLayer)),
        ("embedding", CWeight),
        ("head", CWeight),
        ("head_bias", Address),
        ("embedding_columns", Address),
        ("final_norm", CNorm),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("mlp_width", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("max_context", ctypes.c_int64),
        ("embedding_scale", ctypes.c_float),
        ("final_softcap", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("parallel_residual", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
    )


class CStep(ctypes.Structure):
    """``kev::Step``."""

    _fields_ = (
        ("ids", Address),
        ("positions", Address),
        ("places", Address),
        ("segments", ctypes.POINTER(CSegment)),
        ("wanted", Address),
        ("num_rows", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("num_wanted", ctypes.c_int64),
        ("num_greedy", ctypes.c_int64),
        ("best", Address),
        ("best_value", Address),
        ("logits", Address),
    )


_IN_ORDER = (CWeight, CSegment, CNorm, CMlp, CLayer, CModel, CStep)


def check_layout(library: ctypes.CDLL) -> None:
    """Compare the sizes of all structures with the loaded library's.

    Raises:
        InvariantError: the library was built from other headers.
    """
    library.kev_size_of.restype = ctypes.c_int64
    for index, structure in enumerate(_IN_ORDER):
        found, expected = library.kev_size_of(ctypes.c_int32(index)), ctypes.sizeof(structure)
        if found != expected:
            message = f"the native kernels belong to another version of Kev ({structure.__name__}: {found} bytes there"
            raise InvariantError(f"{message}, {expected} here); install Kev again")
