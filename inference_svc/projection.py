"""The projection table behind ``semantic_hash``: one short signed vector per vocabulary token.

Invariants and semantics: row t is the model's embedding of token t, centred over the vocabulary and projected onto
``num_planes`` random directions drawn from a key; the signs of a question's mean row are its bucket. The same model
and key give the same table in every process. Source: Charikar 2002, random hyperplanes.

Not here: hashing questions (``router_svc.embedding``).
"""

from __future__ import annotations

from hashlib import sha256

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
    weight = model.module.get_input_embeddings().weight
    seed = int.from_bytes(sha256(hash_key.encode()).digest()[:8], "little")
    drawn = np.random.Generator(np.random.PCG64(seed)).standard_normal((weight.shape[1], num_planes))
    planes = torch.from_numpy(drawn).to(torch.float32)
    chunks = [
        weight[start : start + _CHUNK_ROWS].float().cpu() @ planes for start in range(0, weight.shape[0], _CHUNK_ROWS)
    ]
    table = torch.cat(chunks)
    return np.asarray((table - table.mean(dim=0)).numpy())
