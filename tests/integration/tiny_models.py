"""Tiny random models of the architectures Kev must isolate, built from configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
    "mixtral": lambda: MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_GROUPED, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, mlp_only_layers=[1]
    ),
}
MIXTURES = ("mixtral", "qwen3_moe")
"""Mixtures of experts: only Kev's own kernels keep strict isolation for them."""
ARCHITECTURES = tuple(name for name in CONFIGS if name not in MIXTURES)


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is run."""

    precision: str
    backend: Backend

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are loaded."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def __str__(self) -> str:
        return f"{self.backend}-{self.precision}"


TORCH_FORMS = tuple(Form(precision, Backend.CPU) for precision in ("fp32", "bf16", "int8"))
NATIVE_FORMS = tuple(Form(precision, Backend.NATIVE) for precision in ("fp32", "bf16", "int8"))
FORMS = TORCH_FORMS + NATIVE_FORMS
EVERY_FORM = [(name, form) for form in FORMS for name in ARCHITECTURES] + [
    (name, form) for form in NATIVE_FORMS for name in MIXTURES
]
"""Every architecture in every form that may promise strict isolation."""


def form_id(value: object) -> str:
    """Name of a test's parameter."""
    return str(value)


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
def loaded_model(
    name: str, dtype: torch.dtype = torch.float32, backend: Backend = Backend.CPU, precision: str = ""
) -> LoadedModel:
    """The same weights, ready for Kev."""
    chosen = precision or ("fp32" if dtype is torch.float32 else "bf16")
    settings = LoadSettings(precision=chosen, max_context=MAX_CONTEXT, backend=backend)
    return wrap_model(fresh_module(name, dtype), settings, fingerprint=f"tiny-{name}-{chosen}-{backend}")


def fresh_module(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in a module that nobody else uses."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    model.load_state_dict(stock_model(name, dtype).state_dict())
    return model.eval().requires_grad_(False)


def model_as(name: str, form: Form) -> LoadedModel:
    """A model in one of the forms."""
    return loaded_model(name, form.dtype, form.backend, form.precision)
