"""Makes the two directories that the images of a cluster hold of one model.

    python deploy/prepare_model.py MODEL MODELS TOKENIZERS [--config kev.yaml]

MODEL is what ``core.model_path`` may be: a directory, a GGUF file, a hub id or ``demo``. MODELS gets the whole model
with the table behind ``semantic_hash``; TOKENIZERS the same without the weights, for routers, which never load them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np

from common.config import load_config
from common.model_files import projection_path
from inference_svc.model_loader import LoadSettings, load_model
from inference_svc.projection import projection_table
from kev.models import resolve_model


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser("prepare_model.py")
    parser.add_argument("model")
    parser.add_argument("models", type=Path)
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument("--config", type=Path, help="for router.semantic_planes and router.hash_key")
    given = parser.parse_args()
    config = load_config(given.config)
    shutil.copytree(resolve_model(given.model, None, print).path, given.models)
    loaded = load_model(given.models, LoadSettings(precision=config.core.precision, max_context=16))
    table = projection_table(loaded, config.router.semantic_planes, config.router.hash_key)
    np.save(projection_path(given.models, config), table)
    shutil.copytree(given.models, given.tokenizers, ignore=shutil.ignore_patterns("*.safetensors*"))
    for path in (given.models, *given.models.rglob("*"), given.tokenizers, *given.tokenizers.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main())
