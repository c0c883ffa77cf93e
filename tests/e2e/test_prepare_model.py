"""The script that puts a model into the images of a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load_config
from common.model_files import max_context, projection_path
from common.tokenization import Tokenizer
from router_svc.embedding import ProjectionTable
from tests.e2e.documents import ROOT
from tests.e2e.tiny_model import save_tiny_model


@pytest.mark.timeout(120)
def test_a_router_finds_what_it_needs_without_the_weights(tmp_path: Path) -> None:
    """Routers in containers fall back to a hash of words, or carry gigabytes of weights that they never load."""
    save_tiny_model(tmp_path / "given")
    models, tokenizers = tmp_path / "models/m", tmp_path / "tokenizers/m"
    command = [sys.executable, "deploy/prepare_model.py", str(tmp_path / "given"), str(models), str(tokenizers)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    config = load_config(None, env={})
    assert list(models.glob("*.safetensors")) and not list(tokenizers.glob("*.safetensors"))
    for folder in (models, tokenizers):
        tokenizer = Tokenizer.from_dir(folder, prompt_template=config.core.prompt_template, knowledge_prefix="")
        table = ProjectionTable.load(projection_path(folder, config), config.router.semantic_planes)
        assert table.num_planes == config.router.semantic_planes
        assert 0 <= table.bucket(tokenizer.encode_plain("hello")) < 2**table.num_planes
        assert max_context(folder, config) > 0
        assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir()), "user 10001 must read it"
