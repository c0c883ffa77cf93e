"""Loads a model for the isolated forward, or says why it cannot be isolated.

Invariants and semantics: weights come from safetensors only. An architecture is accepted when every layer is plain
causal attention (full or sliding) that goes through transformers' attention interface, and when nothing in it lets
one row's numbers depend on another row: recurrent layers, encoder-decoders, mixtures of experts on stock float kernels
and rotary scalings that look at the longest row are refused with the reason and the way out. Fail closed: what is not
known to be safe is refused.

Not here: finding the model (``kev.models``), proving the forward on this machine (``probe``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import lcm
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common.errors import ConfigError, ModelError, UnsupportedModelError
from inference_svc.attention import AttentionBody, Backend, cpu_attention, reference_attention, register
from inference_svc.flex import BLOCK_POSITIONS, flex_backend
from inference_svc.memory_plan import KVGeometry

_LOG = logging.getLogger("kev.model")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BODIES: Mapping[Backend, AttentionBody] = {
    Backend.CPU: cpu_attention,
    Backend.REFERENCE: reference_attention,
    Backend.FLEX: flex_backend,
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_RECURRENT_SIGNS = ("ssm_state_size", "mamba_d_state", "linear_num_key_heads", "conv_kernel", "time_mix_extra_dim")
_EXPERT_SIGNS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PAGES = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the isolated forward."""

    module: PreTrainedModel
    geometry: KVGeometry
    dtype: torch.dtype
    device: torch.device
    backend: Backend
    vocab_size: int
    max_context: int
    """Positions of one channel: the smaller of the configured limit and the model's own."""
    fingerprint: str
    """SHA-256 over configuration, tensor layout, sampled weight pages, precision and backend."""

    @property
    def alignment_positions(self) -> int:
        """Positions at whose multiples KV extents start."""
        blocks = BLOCK_POSITIONS if self.backend is Backend.FLEX else 1
        return lcm(self.geometry.alignment_positions, blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How to load."""

    precision: str
    max_context: int
    backend: Backend = Backend.CPU
    device: str = "cpu"
    num_threads: int = 0
    """Threads of one forward; 0 keeps torch's default (all cores)."""


def load_model(path: Path, settings: LoadSettings) -> LoadedModel:
    """Load a model directory.

    Raises:
        ConfigError: a precision that is not offered.
        ModelError: the directory cannot be read.
        UnsupportedModelError: the architecture cannot be isolated.
    """
    dtype = _dtype(settings.precision)
    _register_backends()
    transformers_logging.disable_progress_bar()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    config = _read_config(path)
    _warn_about_precision(settings.precision, config)
    max_context = _max_context(config, settings.max_context)
    check_architecture(config, max_context)
    name = settings.backend.attention_name
    try:
        module = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=name, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the model in {path} cannot be loaded: {_first_line(error)}") from error
    module = module.eval().requires_grad_(False).to(settings.device)
    return wrap_model(module, settings, fingerprint=fingerprint_of(path, settings))


def wrap_model(module: PreTrainedModel, settings: LoadSettings, *, fingerprint: str) -> LoadedModel:
    """Check a model that is already in memory and describe it.

    Raises:
        UnsupportedModelError: the architecture cannot be isolated.
    """
    _register_backends()
    module.set_attn_implementation(settings.backend.attention_name)
    config = module.config.get_text_config()
    max_context = _max_context(config, settings.max_context)
    check_architecture(config, max_context)
    if not getattr(module, "_supports_attention_backend", False):
        message = f"{type(module).__name__} does not use transformers' attention interface, so its channels cannot be"
        raise UnsupportedModelError(
            f"{message} separated; use a model that does, such as Llama, Qwen, Mistral or Gemma"
        )
    weight = next(module.parameters())
    return LoadedModel(
        module=module,
        geometry=_geometry(config, weight.dtype),
        dtype=weight.dtype,
        device=weight.device,
        backend=settings.backend,
        vocab_size=int(config.vocab_size),
        max_context=max_context,
        fingerprint=fingerprint,
    )


def check_architecture(config: PretrainedConfig, max_context: int) -> None:
    """Refuse what cannot be isolated.

    Raises:
        UnsupportedModelError: with the reason and the way out.
    """
    kind = config.model_type
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; Kev runs decoder-only language models")
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{kind} attends in both directions; Kev runs causal language models")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if layer_types - _LAYER_TYPES or any(getattr(text, sign, None) for sign in _RECURRENT_SIGNS):
        found = ", ".join(sorted(layer_types - _LAYER_TYPES)) or "recurrent state"
        message = f"{kind} has layers that carry state outside the KV cache ({found}), which cannot be split by channel"
        raise UnsupportedModelError(f"{message}; use a model with full or sliding attention only")
    if any((getattr(text, sign, None) or 0) > 1 for sign in _EXPERT_SIGNS):
        message = f"{kind} routes tokens to experts: the shapes of its float kernels depend on the neighbours' tokens"
        raise UnsupportedModelError(f"{message}, so strict isolation cannot be kept; use a dense model")
    _check_rotary(kind, text, max_context)


def fingerprint_of(path: Path, settings: LoadSettings) -> str:
    """SHA-256 that tells models apart without reading all of a large file.

    It covers config.json, every safetensors header and 64 evenly spaced pages of each file.
    """
    digest = sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as handle:
            header_bytes = int.from_bytes(handle.read(8), "little")
            digest.update(handle.read(min(header_bytes, size)))
            for page in range(_PAGES):
                handle.seek(max(0, size - _PAGE_BYTES) * page // (_PAGES - 1))
                digest.update(handle.read(_PAGE_BYTES))
    digest.update(f"{settings.precision}:{settings.backend}:{settings.device}:torch-{torch.__version__}".encode())
    return digest.hexdigest()


def _register_backends() -> None:
    for backend, body in _BODIES.items():
        register(backend, body)


def _dtype(precision: str) -> torch.dtype:
    if precision == "int8":
        raise ConfigError("core.precision int8 is not offered in this version; use bf16, fp16 or fp32")
    if precision not in _DTYPES:
        raise ConfigError(f"core.precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
    return _DTYPES[precision]


def _read_config(path: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model in {path} cannot be read: {_first_line(error)}") from error
    return config.get_text_config()


def _warn_about_precision(precision: str, config: PretrainedConfig) -> None:
    if precision == "fp16" and config.dtype is torch.bfloat16:
        _LOG.warning(
            "core.precision is fp16 but %s was trained in bf16: values beyond 65,504 overflow and such answers end in "
            "an error; set core.precision: bf16",
            config.model_type,
        )


def _max_context(config: PretrainedConfig, configured: int) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if own is not None and own < configured:
        _LOG.info("core.max_context %d is above the model's %d positions; using %d", configured, own, own)
        return int(own)
    return configured


def _check_rotary(kind: str, config: PretrainedConfig, max_context: int) -> None:
    """Scalings that switch with the longest row of a forward would let a long neighbour change a short question."""
    parameters: Mapping[str, object] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = limit or config.max_position_embeddings
        if isinstance(limit, int) and max_context > limit:
            message = (
                f"{kind} scales its rotary positions by the longest row ({rope['rope_type']}) beyond {limit} tokens"
            )
            raise UnsupportedModelError(f"{message}, so neighbours would change answers; set core.max_context: {limit}")


def _geometry(config: PretrainedConfig, dtype: torch.dtype) -> KVGeometry:
    heads = int(config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVGeometry(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        key_head_size=int(head_size),
        value_head_size=int(head_size),
        element_bytes=dtype.itemsize,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
