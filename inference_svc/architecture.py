"""Which architectures can be isolated, and what is said of the others.

Invariants and semantics: an architecture is accepted when every layer is plain causal attention (full or sliding), and
when nothing in it lets one row's numbers depend on another row: recurrent layers, encoder-decoders, mixtures of experts
on stock float kernels and rotary scalings that look at the longest row are refused with the reason and the way out.
Fail closed: what is not known to be safe is refused.

Not here: loading (``model_loader``), proof (``probe``).
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from common.errors import UnsupportedModelError
from inference_svc.attention import Backend

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_RECURRENT_SIGNS = ("ssm_state_size", "mamba_d_state", "linear_num_key_heads", "conv_kernel", "time_mix_extra_dim")
_EXPERT_SIGNS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_architecture(config: PretrainedConfig, max_context: int, backend: Backend = Backend.CPU) -> None:
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
    if backend is not Backend.NATIVE and any((getattr(text, sign, None) or 0) > 1 for sign in _EXPERT_SIGNS):
        message = f"{kind} routes tokens to experts: the shapes of its float kernels depend on the neighbours' tokens"
        raise UnsupportedModelError(
            f"{message}, so strict isolation cannot be kept; use a dense model, or core.backend: native where it knows "
            "the model"
        )
    _check_rotary(kind, text, max_context)


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


def check_parallel(config: PretrainedConfig, num_ranks: int) -> None:
    """Refuse to spread a model over so many processes.

    Raises:
        UnsupportedModelError: transformers has no plan for it, or its heads cannot be divided.
    """
    kind = config.model_type
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(f"transformers has no tensor parallel plan for {kind}; set core.tensor_parallel: 1")
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % num_ranks or kv_heads % num_ranks:
        message = f"{kind} has {heads} heads and {kv_heads} KV heads, which {num_ranks} processes cannot share evenly"
        raise UnsupportedModelError(f"{message}; set core.tensor_parallel to a number that divides both")
