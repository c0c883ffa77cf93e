"""The projection table behind ``semantic_hash``: one short signed vector per vocabulary token.

Invariants and semantics: row t is the model's embedding of token t, centred over the vocabulary and projected onto
``num_planes`` random directions of +1 and -1 drawn from a key; the signs of a question's mean row are its bucket. The
same model and key give the same table in every process and with every version of the libraries. Sources: Charikar 2002
(random hyperplanes), Achlioptas 2003 (planes of +1 and -1).

Not here: hashing questions (``router_svc.embedding``).
"""

from __future__ import annotations

from hashlib import shake_256

import numpy as np
import torch

from inference_svc.model_loader import LoadedModel

_CHUNK_ROWS = 16_384


@torch.inference_mode()
def projection_table(model: LoadedModel, num_planes: int, hash_key: str) -> np.ndarray:
    """``[V, num_planes]`` float32.

    Args:
        model: whose input embeddings are used.
        num_planes: random directions.
        hash_key: key of the deployment; another key gives other buckets.
    """
    width = model.embedding_rows(0, 1).shape[1]
    num_signs = width * num_planes
    drawn = np.frombuffer(shake_256(hash_key.encode()).digest(-(-num_signs // 8)), dtype=np.uint8)
    signs = np.unpackbits(drawn)[:num_signs].reshape(width, num_planes)
    planes = torch.from_numpy(signs.astype(np.float32) * 2 - 1)
    size = model.vocab_size
    chunks = [
        model.embedding_rows(start, min(start + _CHUNK_ROWS, size)) @ planes for start in range(0, size, _CHUNK_ROWS)
    ]
    table = torch.cat(chunks)
    return np.asarray((table - table.mean(dim=0)).numpy())
