"""A model directory as transformers reads it.

Invariants and semantics: weights come from safetensors only. In the type that they have on disk they are views of their
mapped files and take no memory of their own; in any other type they are copied.

Not here: whether it can be isolated (``architecture``), running it (``model_loader``).
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError, ModelError
from inference_svc.memory_plan import KVGeometry

_LOG = logging.getLogger("kev.model")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}
"""Type of keys and values, and of the weights as they are loaded."""


def read_config(path: Path) -> PretrainedConfig:
    """Its configuration, of the text model.

    Raises:
        ModelError: the directory cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model in {path} cannot be read: {_first_line(error)}") from error
    return config.get_text_config()


def read_module(
    path: Path, config: PretrainedConfig, precision: str, device: str, num_parts: int = 1
) -> PreTrainedModel:
    """The model; ``num_parts``: the part of it that this process holds.

    Raises:
        ConfigError: a precision that is not offered.
        ModelError: the directory cannot be read.
    """
    transformers_logging.disable_progress_bar()
    spread = {"distributed_config": DistributedConfig(tp_size=num_parts)} if num_parts > 1 else {}
    try:
        module = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype_of(precision), use_safetensors=True, local_files_only=True, **spread
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the model in {path} cannot be loaded: {_first_line(error)}") from error
    module = module.eval().requires_grad_(False)
    return module if spread else module.to(device)


def dtype_of(precision: str) -> torch.dtype:
    """Of the weights as they are loaded, and of keys and values.

    Raises:
        ConfigError: a precision that is not offered.
    """
    if precision not in _DTYPES:
        raise ConfigError(f"core.precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
    return _DTYPES[precision]


def warn_about_precision(precision: str, config: PretrainedConfig) -> None:
    """Say what a precision may do to a model."""
    if precision == "fp16" and config.dtype is torch.bfloat16:
        _LOG.warning(
            "core.precision is fp16 but %s was trained in bf16: values beyond 65,504 overflow and such answers end in "
            "an error; set core.precision: bf16",
            config.model_type,
        )


def max_context_of(config: PretrainedConfig, configured: int) -> int:
    """Positions of one channel: the smaller of the model's own and the configured limit."""
    own = getattr(config, "max_position_embeddings", None)
    if own is not None and own < configured:
        _LOG.info("core.max_context %d is above the model's %d positions; using %d", configured, own, own)
        return int(own)
    return configured


def geometry_of(config: PretrainedConfig, dtype: torch.dtype, num_parts: int = 1) -> KVGeometry:
    """Keys and values of one of ``num_parts`` parts of a model."""
    heads = int(config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVGeometry(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads) // num_parts,
        key_head_size=int(head_size),
        value_head_size=int(head_size),
        element_bytes=dtype.itemsize,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
