"""Questions for attention: laid out in an arena that holds NaN wherever the call may not look, and the exact answer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from inference_svc.kernels.attention_calls import CAttention
from inference_svc.kernels.layout import CSegment, Precision
from tests.integration.kernel_calls import ALIGNMENT, Floats, as_bf16, rounded

GAP = 3
"""Rows of NaN between what is laid out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all questions of one call have in common."""

    num_heads: int = 4
    num_kv_heads: int = 1
    head_size: int = 16
    window: int = 0
    softcap: float = 0.0
    kv_type: Precision = Precision.F32

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_size**-0.5))


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Queries ``[N, heads, size]`` and keys and values ``[N, kv heads, size]`` of N positions."""

    shape: Shape
    queries: Floats
    keys: Floats
    values: Floats

    @classmethod
    def random(cls, shape: Shape, length: int, seed: int = 0, spread: float = 1.0) -> Self:
        rng = np.random.default_rng(seed)
        kv = (length, shape.num_kv_heads, shape.head_size)
        queries = rng.standard_normal((length, shape.num_heads, shape.head_size)).astype(np.float32)
        keys, values = (rng.standard_normal(kv).astype(np.float32) * np.float32(spread) for _ in range(2))
        if shape.kv_type is Precision.BF16:
            keys, values = rounded(keys), rounded(values)
        return cls(shape, queries, keys, values)

    def branch(self, num_prefix: int, length: int, seed: int) -> Self:
        """Another question with the same keys and values up to ``num_prefix``."""
        other = type(self).random(self.shape, length, seed)
        other.keys[:num_prefix] = self.keys[:num_prefix]
        other.values[:num_prefix] = self.values[:num_prefix]
        return other

    def __len__(self) -> int:
        return len(self.queries)

    def first_visible(self, position: int) -> int:
        return max(0, position - self.shape.window + 1) if self.shape.window else 0

    def exact(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """The outputs ``[last - first, heads, size]`` of positions ``[first, last)`` in float64."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        keys, values = (x.astype(np.float64).repeat(group, axis=1) for x in (self.keys, self.values))
        rows = []
        for position in range(first, last):
            seen = slice(self.first_visible(position), position + 1)
            scores = np.einsum("hd,phd->hp", self.queries[position].astype(np.float64), keys[seen]) * shape.scale
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            rows.append(np.einsum("hp,phd->hd", weights, values[seen]))
        return np.stack(rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``[first, last)`` of a question, its first ``num_prefix`` positions stored apart from the others.

    Pieces with the same ``shared`` store their prefix once for all of them.
    """

    question: Question
    first: int
    last: int
    num_prefix: int = 0
    shared: int | None = None


def attend(calls: ctypes.CDLL, shape: Shape, pieces: Sequence[Piece], threads: int = 1) -> list[Floats]:
    """The outputs of every piece, computed in one call, with NaN in every number that no row of it may see."""
    layout = _Layout(shape, pieces)
    width = shape.num_heads * shape.head_size
    out = np.full((len(layout.queries), width + 5), 7.0, np.float32)
    call = CAttention(
        layout.queries.ctypes.data,
        layout.queries.shape[1],
        layout.keys.ctypes.data,
        layout.values.ctypes.data,
        out.ctypes.data,
        out.shape[1],
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.window,
        shape.scale,
        shape.softcap,
        int(shape.kv_type),
    )
    longest = max((piece.last for piece in pieces), default=1)
    num_bytes = calls.kev_attention_scratch_bytes(threads, longest, shape.head_size, shape.num_heads)
    scratch = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)  # NaN as well
    start = scratch.ctypes.data + -scratch.ctypes.data % ALIGNMENT
    pool = calls.kev_pool_create(threads)
    try:
        status = calls.kev_attention(pool, ctypes.addressof(call), layout.segments, len(pieces), start)
    finally:
        calls.kev_pool_destroy(pool)
    assert status == 0
    written = np.zeros(out.shape, bool)
    for segment in layout.segments:
        written[segment.row : segment.row + segment.num_rows, :width] = True
    assert (out[~written] == 7.0).all()
    shaped = (shape.num_heads, shape.head_size)
    return [out[s.row : s.row + s.num_rows, :width].reshape(s.num_rows, *shaped) for s in layout.segments]


class _Layout:
    """Pieces side by side in one arena and one packed row of queries."""

    def __init__(self, shape: Shape, pieces: Sequence[Piece]) -> None:
        places = sum(max(piece.last, piece.num_prefix) + 2 * GAP for piece in pieces) + GAP
        rows = sum(piece.last - piece.first + 1 for piece in pieces) + 1
        nan = np.float32(np.nan)
        self.keys = np.full((places, shape.num_kv_heads, shape.head_size), nan)
        self.values = self.keys.copy()
        self.queries = np.full((rows, shape.num_heads * shape.head_size + 3), nan)
        self.segments = (CSegment * len(pieces))()
        place, row = GAP, 1
        prefixes: dict[int, int] = {}
        for index, piece in enumerate(pieces):
            prefix = place if piece.shared is None else prefixes.setdefault(piece.shared, place)
            private = place + piece.num_prefix + GAP if prefix == place else place
            self.segments[index] = CSegment(
                row, piece.last - piece.first, piece.first, prefix, piece.num_prefix, private
            )
            for position in range(piece.question.first_visible(piece.first), piece.last):
                apart = position >= piece.num_prefix
                at = private + position - piece.num_prefix if apart else prefix + position
                self.keys[at] = piece.question.keys[position]
                self.values[at] = piece.question.values[position]
            queries = piece.question.queries[piece.first : piece.last]
            self.queries[row : row + len(queries), :-3] = queries.reshape(
                len(queries), shape.num_heads * shape.head_size
            )
            place, row = private + max(0, piece.last - piece.num_prefix) + GAP, row + len(queries) + 1
        if shape.kv_type is Precision.BF16:
            self.keys, self.values = as_bf16(self.keys), as_bf16(self.values)
