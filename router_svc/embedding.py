"""Semantic buckets: the cell in which the most telling token of a question lies.

Invariants and semantics: every token has a *cell*, a 32-bit number: 16 bits of priority above 16 bits of bucket. The
bucket of a question is that of its largest cell, in ``[0, 2^planes)``. It depends on the question's own tokens only
(not on their order or number), so it is the same alone and in a batch, in every process and after a restart. Tokens
without a cell are ignored; with no token left the bucket is 0.

Why a maximum and no mean: two questions meet when their most telling tokens fall into one cell. With random priorities
that is as likely as their weighted overlap (min-wise hashing), while the signs of a mean change with every word that
differs; docs/routing.md measures both. Sources: Broder 1997, "On the resemblance and containment of documents"
(min-wise hashing); Cohen 1997, "Size-estimation framework", sec. 2 (exponential races for weighted sets).

``ProjectionTable`` is semantic: tokens with similar embeddings have similar priorities and the same bucket.
``HashedProjection`` needs no model and is lexical: questions that share a telling token meet, synonyms do not.

Not here: making the table (``inference_svc.projection``), which words are looked at (``topic``), choosing a channel
for a bucket (``strategies``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelError
from router_svc.digest import KeyedDigest

MAX_PLANES = 16
_BUCKET_MASK = 0xFFFF
_MAX_CELLS_KEPT = 65_536
_RARITY = 2.0
"""Power of a token's id that is its weight in the race; see ``_weight``."""

Cells = NDArray[np.uint32]


class Projection(Protocol):
    """Turns token ids into a bucket."""

    kind: str
    """Which words meet, for people."""

    @property
    def num_planes(self) -> int:
        """Planes; buckets are 0 to ``2^num_planes - 1``."""
        ...

    def bucket(self, token_ids: Sequence[int]) -> int:
        """The bucket of a question."""
        ...


class ProjectionTable:
    """One cell per token of a model's vocabulary."""

    kind = "similar words of the model's embedding meet"

    def __init__(self, cells: Cells, num_planes: int) -> None:
        """Use ``cells`` as they are, without a copy.

        Args:
            cells: ``[vocab]`` uint32, see the module.
            num_planes: buckets are below ``2^num_planes``.

        Raises:
            ModelError: not one-dimensional, another number format, no tokens, or a bucket out of range.
        """
        if cells.ndim != 1 or cells.dtype != np.uint32 or not cells.shape[0]:
            raise ModelError(f"a projection table is [vocab] of uint32, got {cells.shape} {cells.dtype}")
        if not 1 <= num_planes <= MAX_PLANES or int((cells & _BUCKET_MASK).max()) >> num_planes:
            raise ModelError(f"the projection table has other buckets than those of {num_planes} planes; make it again")
        self._cells = cells
        self._num_planes = num_planes

    @classmethod
    def load(cls, path: str | os.PathLike[str], num_planes: int) -> ProjectionTable:
        """Map a ``.npy`` file; processes on one machine share its memory.

        Raises:
            ModelError: the file cannot be read or is no projection table.
        """
        try:
            cells = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the projection table {os.fspath(path)}: {error}") from error
        return cls(cells, num_planes)

    @property
    def num_planes(self) -> int:
        """Planes of the table."""
        return self._num_planes

    def bucket(self, token_ids: Sequence[int]) -> int:
        """The bucket of a question; 0 when no token is in the table."""
        size = self._cells.shape[0]
        known = [token_id for token_id in token_ids if 0 <= token_id < size]
        return int(self._cells[known].max()) & _BUCKET_MASK if known else 0


class HashedProjection:
    """Cells drawn from a keyed hash of the token id: works with any tokenizer, without a model."""

    kind = "equal words meet; there is no table of the model's"

    def __init__(self, num_planes: int, hash_key: str) -> None:
        self._num_planes = num_planes
        self._digest = KeyedDigest(hash_key)
        self._cells: dict[int, int] = {}
        """Cells drawn so far."""

    @property
    def num_planes(self) -> int:
        """Planes of the hash."""
        return self._num_planes

    def bucket(self, token_ids: Sequence[int]) -> int:
        """The bucket of a question; 0 when it has no tokens."""
        cells = self._cells
        if len(cells) > _MAX_CELLS_KEPT:
            self._cells = cells = {}
        largest = 0
        for token_id in token_ids:
            cell = cells.get(token_id)
            if cell is None:
                cell = cells[token_id] = self._drawn(token_id) if token_id >= 0 else 0
            largest = max(largest, cell)
        return largest & _BUCKET_MASK

    def _drawn(self, token_id: int) -> int:
        """A token's cell: the heavier the token, the likelier a high priority."""
        drawn = self._digest(b"token:%d" % token_id)
        bucket = drawn & ((1 << self._num_planes) - 1)
        # The winner of a race of exponential clocks, whose rates are the weights, is a token with a probability of its
        # share of the weight. Priorities are the logarithm of the time, so that 16 bits hold all rates.
        time = -math.log(((drawn >> 16) + 1) / (1 << 48))
        return priority(math.log(_weight(token_id)) - math.log(max(time, 1e-15))) << 16 | bucket


def priority(score: float) -> int:
    """A score between -64 and 64 as 16 bits, in the same order."""
    return max(0, min(0xFFFF, round((score + 64.0) * 512)))


def _weight(token_id: int) -> float:
    """Vocabularies list their tokens in the order of merging, so that a low id is a frequent piece and tells little.

    Source: measured in docs/routing.md; Arora 2017, "A simple but tough-to-beat baseline", for why to weigh at all.
    """
    return float((token_id + 1) ** _RARITY)
