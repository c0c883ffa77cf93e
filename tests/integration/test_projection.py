"""The table behind ``semantic_hash``, made from a model's embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.errors import ModelError
from inference_svc.model_loader import LoadSettings, load_model
from inference_svc.projection import projection_of_directory, projection_table
from router_svc.embedding import ProjectionTable
from tests.integration.tiny_checkpoint import save_checkpoint

VOCAB = 600


def save_rows(folder: Path, rows: torch.Tensor, name: str = "model.embed_tokens.weight") -> None:
    save_file({name: rows.contiguous()}, folder / "model.safetensors")


def clusters() -> torch.Tensor:
    """Tokens ``i`` and ``i + 300`` have nearly the same embedding."""
    torch.manual_seed(3)
    rows = torch.randn(VOCAB // 2, 48)
    return torch.cat([rows, rows + 0.05 * torch.randn_like(rows)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directory_and_loaded_model_give_one_table(tmp_path: Path, dtype: torch.dtype) -> None:
    """`kev route` and the router would disagree about the bucket."""
    save_checkpoint(tmp_path, "llama", dtype)
    read = projection_of_directory(tmp_path, 6, "kev")
    for precision in ("fp32", "bf16"):
        model = load_model(tmp_path, LoadSettings(precision=precision, max_context=64))
        assert np.array_equal(projection_table(model, 6, "kev"), read)


@pytest.mark.parametrize("num_planes", [1, 2, 6, 7, 12, 16])
def test_buckets_are_those_of_the_planes(tmp_path: Path, num_planes: int) -> None:
    """A router would refuse the table that a node left it."""
    save_rows(tmp_path, clusters())
    cells = projection_of_directory(tmp_path, num_planes, "kev")
    table = ProjectionTable(cells, num_planes)
    found = {table.bucket([token]) for token in range(VOCAB)}
    assert len(found) >= min(1 << num_planes, 100) * 0.9


def test_similar_tokens_share_a_bucket_and_others_do_not(tmp_path: Path) -> None:
    """The hash would be random, or everything would meet."""
    save_rows(tmp_path, clusters())
    cells = projection_of_directory(tmp_path, 6, "kev") & 0xFFFF
    half = VOCAB // 2
    assert np.mean(cells[:half] == cells[half:]) > 0.9
    assert np.mean(cells[:half] == np.roll(cells[half:], 1)) < 0.1


def test_the_key_decides_which_tokens_meet(tmp_path: Path) -> None:
    """Who shares a channel could be guessed from the model alone."""
    save_rows(tmp_path, clusters(), name="transformer.wte.weight")
    one, same, other = (projection_of_directory(tmp_path, 6, key) for key in ("a", "a", "b"))
    assert np.array_equal(one, same)
    assert np.mean((one & 0xFFFF) == (other & 0xFFFF)) < 0.1


@pytest.mark.parametrize("rows", [torch.zeros(40, 8), torch.ones(40, 8), torch.ones(1, 4)])
def test_embeddings_that_say_nothing_still_make_a_table(tmp_path: Path, rows: torch.Tensor) -> None:
    """A degenerate model would stop the start with NaN."""
    save_rows(tmp_path, rows)
    assert ProjectionTable(projection_of_directory(tmp_path, 6, "kev"), 6).bucket([0]) >= 0


def test_a_directory_without_embeddings_is_refused_in_words(tmp_path: Path) -> None:
    """`kev route` would end in a traceback."""
    with pytest.raises(ModelError, match="no input embeddings"):
        projection_of_directory(tmp_path, 6, "kev")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="not a safetensors file"):
        projection_of_directory(tmp_path, 6, "kev")
