"""Turns a GGUF file into a plain model directory: bf16 safetensors, config, tokenizer.

Invariants and semantics: every weight is unpacked, nothing of the quantization remains in the configuration, and a
weight that the file lacks is an error. The output loads like any other model directory.

Not here: which file, where to, and how often (``kev.models``, ``kev.model_cache``).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging

from common.errors import ModelError


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the model of ``gguf`` into the directory ``out``.

    Needs memory for all weights in bf16.

    Raises:
        ModelError: weights are missing in the file.
    """
    with _quiet():
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        packed, told = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        # The library fills what is missing with random numbers.
        if told["missing_keys"]:
            raise ModelError(f"{gguf.name} lacks weights: {', '.join(sorted(told['missing_keys'])[:3])}")
        _plain(packed).save_pretrained(out)
        tokenizer.save_pretrained(out)


def _plain(packed: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that knows nothing of GGUF; the loaded one refuses to be saved."""
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(packed)(config).to(torch.bfloat16)
    weights = {name: weight.to(torch.bfloat16) for name, weight in packed.state_dict().items()}
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    return plain


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's bars (one of them asks no setting) and hints about loading; its errors are raised."""
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
