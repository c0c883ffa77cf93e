"""The projection table behind ``semantic_hash``: one cell per vocabulary token.

Invariants and semantics: tokens with similar embeddings have similar cells. An embedding is centred, whitened (few
directions that all words share would otherwise decide everything) and projected onto random directions of +1 and -1
drawn from a key; the direction it is nearest to is its bucket, and how near it is, weighted by the rarity of the
token, its priority. A cell is a 32-bit number: 16 bits of priority above 16 bits of bucket; what routers do with it is
told in ``router_svc.embedding``. Embeddings count in bf16, so the table is the same whatever the model runs in; the
same model and key give the same table, but for tokens within rounding of a border. Routers read the one a node left
them, so that all of them agree.

Sources: Andoni et al. 2015, "Practical and optimal LSH for angular distance", sec. 3 (the nearest of +-directions);
Achlioptas 2003 (directions of +1 and -1); Su et al. 2021, "Whitening sentence representations"; docs/routing.md
(measurements).

Not here: hashing questions (``router_svc.embedding``), where the table is kept (``common.model_files``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import shake_256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from common.errors import ModelError
from inference_svc.model_loader import LoadedModel

_CHUNK_ROWS = 16_384
_MAX_GROUP_PLANES = 6
"""Planes decided by one set of directions; the cost of a set grows with their number of buckets."""
_MAX_WHITENED = 256
_NUM_SAMPLES = 64
_SAMPLED_ROWS = 64
"""In one sample: neighbours in a vocabulary are no kin, and reading single rows would be slow."""
_SHRINKAGE = 0.3
"""Added to variances with mean 1, so that directions of noise are not blown up."""
_ROOT_ITERATIONS = 20
"""Twice what variances up to 1000 times the shrinkage need."""
_RARITY = 0.15
"""Power of a token's id in its priority: vocabularies list frequent pieces first."""
_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")

Rows = Callable[[int, int], torch.Tensor]
"""Embeddings ``[last - first, H]`` float32, of values that bf16 has, of tokens ``[first, last)``."""


def projection_table(model: LoadedModel, num_planes: int, hash_key: str) -> np.ndarray:
    """``[V]`` uint32.

    Args:
        model: whose input embeddings are used.
        num_planes: buckets are below 2 to the power of this, at most 16.
        hash_key: key of the deployment; another key gives other buckets.
    """
    rows = model.embedding_rows
    exact = model.precision == "bf16"
    return _table(
        rows if exact else lambda first, last: _rounded(rows(first, last)), model.vocab_size, num_planes, hash_key
    )


def projection_of_directory(path: Path, num_planes: int, hash_key: str) -> np.ndarray:
    """As ``projection_table``, read from a model's directory without loading the model.

    Raises:
        ModelError: there are no input embeddings in its files.
    """
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                name = next((name for name in opened.keys() if name.endswith(_EMBEDDING_NAMES)), None)
                if name is not None:
                    return _table_of(opened.get_slice(name), num_planes, hash_key)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} is not a safetensors file: {error}") from None
    raise ModelError(f"no input embeddings are found in {path}; start Kev with this model once, it leaves the table")


def _table_of(weight: Any, num_planes: int, hash_key: str) -> np.ndarray:
    """The table of a tensor that is read by slices."""
    return _table(lambda first, last: _rounded(weight[first:last]), weight.get_shape()[0], num_planes, hash_key)


@torch.inference_mode()
def _table(rows: Rows, num_tokens: int, num_planes: int, hash_key: str) -> np.ndarray:
    groups = [min(_MAX_GROUP_PLANES, num_planes - first) for first in range(0, num_planes, _MAX_GROUP_PLANES)]
    mean, directions = _directions(rows, num_tokens, [1 << (planes - 1) for planes in groups], hash_key)
    cells = np.empty(num_tokens, dtype=np.uint32)
    for start in range(0, num_tokens, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, num_tokens)
        projected = (rows(start, stop) - mean) @ directions
        cells[start:stop] = _cells(projected, groups, start)
    return cells


def _cells(projected: torch.Tensor, groups: list[int], first_id: int) -> np.ndarray:
    """Cells ``[T]`` of tokens ``first_id`` and following, from ``[T, directions]``."""
    buckets = torch.zeros(len(projected), dtype=torch.int64)
    scores: torch.Tensor | None = None
    column = shift = 0
    for planes in groups:
        part = projected[:, column : column + (1 << (planes - 1))]
        nearness, nearest = part.abs().max(dim=1)
        sign = part.gather(1, nearest[:, None])[:, 0] > 0
        buckets |= (nearest * 2 + sign) << shift
        if scores is None:
            scores = nearness / part.norm(dim=1).clamp_min(1e-12)
        column, shift = column + part.shape[1], shift + planes
    ids = torch.arange(first_id, first_id + len(projected), dtype=torch.float64)
    # Between 1 / sqrt(directions) and 1; the logarithm of their product with the weight lies between -4 and 4.
    score = scores.double().clamp_min(1e-3).log() + _RARITY * (ids + 1).log() if scores is not None else ids
    priorities = ((score + 8) * 4096).round().clamp(0, 0xFFFF).to(torch.int64)
    return (priorities << 16 | buckets).numpy().astype(np.uint32)


def _directions(
    rows: Rows, num_tokens: int, group_sizes: list[int], hash_key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre ``[H]`` and directions ``[H, sum of the sizes]`` that whiten and project at once."""
    step = max(_SAMPLED_ROWS, num_tokens // _NUM_SAMPLES)
    starts = range(0, num_tokens, step)
    sample = torch.cat([rows(start, min(start + _SAMPLED_ROWS, num_tokens)) for start in starts])
    mean = sample.mean(dim=0)
    width = sample.shape[1]
    num_whitened = min(width, _MAX_WHITENED)
    num_directions = sum(group_sizes)
    signs = _signs(hash_key, width * num_whitened + num_whitened * num_directions)
    reduce = signs[: width * num_whitened].reshape(width, num_whitened) / math.sqrt(num_whitened)
    spread = signs[width * num_whitened :].reshape(num_whitened, num_directions)
    reduced = ((sample - mean) @ reduce).double()
    covariance = reduced.T @ reduced / len(reduced)
    scale = covariance.trace() / num_whitened
    if not scale > 0:
        return mean, reduce @ spread
    whiten = _inverse_root(covariance / scale + _SHRINKAGE * torch.eye(num_whitened, dtype=torch.float64))
    return mean, reduce @ whiten.float() @ spread


def _inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix ** -0.5`` of a positive definite one.

    By products alone: an eigensolver takes seconds beside other processes, and single axes flip between libraries.
    Source: Higham 2008, "Functions of Matrices", sec. 6.3, coupled Newton iteration.
    """
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    norm = matrix.norm()
    root, inverse = matrix / norm, identity
    for _ in range(_ROOT_ITERATIONS):
        step = (3 * identity - inverse @ root) / 2
        root, inverse = root @ step, step @ inverse
    result: torch.Tensor = inverse / norm.sqrt()
    return result


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.bfloat16).float()


def _signs(hash_key: str, count: int) -> torch.Tensor:
    """So many times +1 or -1, drawn from a key."""
    drawn = np.frombuffer(shake_256(hash_key.encode()).digest(-(-count // 8)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(drawn)[:count].astype(np.float32) * 2 - 1)
