"""Tiny random models of the architectures Kev must isolate, built from configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from inference_svc.attention import Backend
from inference_svc.model_loader import LoadedModel, LoadSettings, wrap_model

VOCAB = 160
WINDOW = 24
MAX_CONTEXT = 256

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen2": lambda: Qwen2Config(**{**_COMMON, "num_key_value_heads": 2}),
    "qwen3": lambda: Qwen3Config(**_GROUPED),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_GROUPED,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_GROUPED, "num_key_value_heads": 1},
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": lambda: Phi3Config(**{**_COMMON, "num_key_value_heads": 2}, sliding_window=WINDOW),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON, rotary_pct=0.5),
}
ARCHITECTURES = tuple(CONFIGS)


@cache
def stock_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The architecture as transformers runs it, with random weights that make peaked answers."""
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model.eval()


@cache
def loaded_model(name: str, dtype: torch.dtype = torch.float32, backend: Backend = Backend.CPU) -> LoadedModel:
    """The same weights, ready for Kev."""
    stock = stock_model(name, dtype)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    model.load_state_dict(stock.state_dict())
    settings = LoadSettings(precision="fp32", max_context=MAX_CONTEXT, backend=backend)
    return wrap_model(model.eval().requires_grad_(False), settings, fingerprint=f"tiny-{name}")
