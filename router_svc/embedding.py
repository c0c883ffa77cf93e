"""Semantic buckets: which side of a few planes a question's tokens lie on.

Invariants and semantics: the bucket of a question is the sign bits of the mean of its tokens' rows, bit p for plane p,
in ``[0, 2^planes)``. It depends on the question's own tokens only (not on their order), so it is the same alone and in
a batch, in every process and after a restart. Tokens outside the table are ignored; with no token left the bucket is
0. Source: Charikar 2002, "Similarity estimation techniques from rounding algorithms", sec. 3 (random hyperplanes).

``ProjectionTable`` is semantic: its rows are embeddings projected on the planes. ``HashedProjection`` needs no model
and is lexical: questions with the same tokens meet, synonyms do not.

Not here: making the table (``inference_svc.projection``), choosing a channel for a bucket (``strategies``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelError
from router_svc.digest import KeyedDigest

MAX_PLANES = 16
_MAX_ROWS_KEPT = 65_536

Floats = NDArray[np.floating[Any]]


class Projection(Protocol):
    """Turns token ids into a bucket."""

    @property
    def num_planes(self) -> int:
        """Planes; buckets are 0 to ``2^num_planes - 1``."""
        ...

    def bucket(self, token_ids: Sequence[int]) -> int:
        """The bucket of a question."""
        ...


class ProjectionTable:
    """Rows ``[vocab, planes]`` of float16 or float32: a model's centred embeddings, projected on the planes."""

    def __init__(self, rows: Floats) -> None:
        """Use ``rows`` as they are, without a copy.

        Raises:
            ModelError: not two-dimensional, another number format, no or too many planes, or a number is not finite.
        """
        if rows.ndim != 2 or rows.dtype not in (np.float16, np.float32):
            raise ModelError(
                f"a projection table is [vocab, planes] of float16 or float32, got {rows.shape} {rows.dtype}"
            )
        if rows.shape[0] < 1 or not 1 <= rows.shape[1] <= MAX_PLANES:
            raise ModelError(f"a projection table has tokens and 1 to {MAX_PLANES} planes, got {rows.shape}")
        if not np.isfinite(rows).all():
            raise ModelError("the projection table holds numbers that are not finite; make it again from the model")
        self._rows = rows

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProjectionTable:
        """Map a ``.npy`` file; processes on one machine share its memory.

        Raises:
            ModelError: the file cannot be read or is no projection table.
        """
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the projection table {os.fspath(path)}: {error}") from error
        return cls(rows)

    @property
    def num_planes(self) -> int:
        """Planes of the table."""
        return int(self._rows.shape[1])

    def bucket(self, token_ids: Sequence[int]) -> int:
        """The bucket of a question; 0 when no token is in the table."""
        ids = np.asarray(token_ids, dtype=np.int64)
        known = ids[(ids >= 0) & (ids < self._rows.shape[0])]
        if not known.size:
            return 0
        # The sign of the sum is the sign of the mean; an exact sum does not depend on the order of the tokens.
        return _sign_bits([math.fsum(plane) for plane in self._rows[known].T.tolist()])


class HashedProjection:
    """Rows drawn from a keyed hash of the token id: works with any tokenizer, without a model."""

    def __init__(self, num_planes: int, hash_key: str) -> None:
        self._num_planes = num_planes
        self._offsets = np.array([KeyedDigest(hash_key)(b"plane:%d" % p) for p in range(num_planes)], dtype=np.uint64)
        self._rows: dict[int, list[int]] = {}
        """Rows drawn so far: most questions are too short for numpy to pay."""

    @property
    def num_planes(self) -> int:
        """Planes of the hash."""
        return self._num_planes

    def bucket(self, token_ids: Sequence[int]) -> int:
        """The bucket of a question; 0 when it has no tokens."""
        ids = [token_id for token_id in token_ids if token_id >= 0]
        rows = self._rows
        if len(rows) > _MAX_ROWS_KEPT:
            self._rows = rows = {}
        missing = list({token_id for token_id in ids if token_id not in rows})
        if missing:
            rows.update(zip(missing, self._drawn(missing), strict=True))
        # Integers add up exactly; a sum of exactly 0 is as good as never seen, which sums of +1 and -1 would give to
        # every second pair of tokens.
        return _sign_bits([sum(plane) for plane in zip(*(rows[token_id] for token_id in ids), strict=True)])

    def _drawn(self, token_ids: Sequence[int]) -> list[list[int]]:
        """The upper 32 bits of each hash as a number around 0."""
        ids = np.asarray(token_ids, dtype=np.uint64)
        rows: list[list[int]] = (
            (_mix(ids[:, None] + self._offsets) >> np.uint64(32)).astype(np.int64) - 2**31
        ).tolist()
        return rows


def _sign_bits(sums: Sequence[float]) -> int:
    bits = 0
    for plane, value in enumerate(sums):
        bits |= (value > 0) << plane
    return bits


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers, wrapping around. Source: SplitMix64; Steele, Lea, Flood 2014, fig. 17."""
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
