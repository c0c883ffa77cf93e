"""What the services read of a model directory without loading the model.

Not here: finding or converting models (``kev.models``), the tokenizer (``tokenization``), weights (``inference_svc``).
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from common.config import Config
from common.errors import ConfigError, ModelError


def model_dir(config: Config) -> Path:
    """The directory of the model, which services neither search nor download.

    Raises:
        ConfigError: ``core.model_path`` is no directory.
    """
    path = Path(config.core.model_path).expanduser()
    if not path.is_dir():
        told = f"kev.core.model_path: {config.core.model_path} is not a directory here"
        raise ConfigError(f"{told}; the services need one, kev up finds the directory of demo and hub ids for them")
    return path


def max_context(path: Path, config: Config) -> int:
    """Positions of one channel: the smaller of the configured limit and the model's own.

    Raises:
        ModelError: config.json cannot be read.
    """
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the model in {path} cannot be read: config.json: {type(error).__name__}") from None
    text = content.get("text_config", content) if isinstance(content, dict) else {}
    own = text.get("max_position_embeddings")
    return min(own, config.core.max_context) if isinstance(own, int) else config.core.max_context


def projection_path(path: Path, config: Config) -> Path:
    """Where the table behind ``semantic_hash`` lies beside the model, so that a router needs no torch to use it."""
    key = sha256(config.router.hash_key.encode()).hexdigest()[:12]
    return path / f"kev-cells-{config.router.semantic_planes}-{key}.npy"
