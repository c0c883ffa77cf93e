"""What a decoder is made of: a transformers model read into plain tensors and numbers.

Invariants and semantics: only families whose mathematics is known here are read, each part is looked at instead of
guessed (how a norm weighs is measured on the norm, window and scale come from the model's own attention calls), and
anything else is refused: fail closed. Nothing is copied before it is asked for: a linear is a function that returns
its rows, and they are asked for in blocks.

Not here: packing and running (``native_model``), proof that the reading is right (``native_check``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from common.errors import UnsupportedModelError
from inference_svc.attention import LayerCall
from inference_svc.file_pages import let_go
from inference_svc.kernels.layout import Activation, NormKind

FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "mixtral", "qwen3_moe"}
)
"""Values of ``model_type`` that are known here."""

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
}
_Part = Any
"""A module of transformers: what it holds depends on the family."""

_NORM_TOLERANCE = 0.03
"""Largest difference to a formula, relative to the largest output: twice what bfloat16 rounding makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization; ``kind`` NONE where the model has none."""

    kind: NormKind = NormKind.NONE
    weight: torch.Tensor | None = None
    """``[width]`` float32."""
    bias: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    """Added to the weight (Gemma stores it around zero)."""
    source: nn.Module | None = None
    """What it was read from."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Rows of one or several linears of the model, one below the other."""

    parts: Callable[[], Sequence[torch.Tensor]]
    """Makes the ``[n_i, k]`` weights, in order."""
    bias: torch.Tensor | None = None
    """``[sum n_i]`` float32."""
    source: nn.Module | None = None
    """The module that alone has these rows."""
    columns: torch.Tensor | None = None
    """``[k]`` float32: what each column is multiplied with as it is packed."""
    divisors: torch.Tensor | None = None
    """``[sum n_i]`` float32: what each row is divided by as it is packed."""

    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        parts = self.parts()
        return sum(part.shape[0] for part in parts), parts[0].shape[1]

    def blocks(self, num_rows: int) -> Iterator[torch.Tensor]:
        """The rows as they are packed, ``num_rows`` at a time; file pages are let go when the next block is asked."""
        first = 0
        for pieces in _pieces(self.parts(), num_rows):
            rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            last = first + rows.shape[0]
            if self.divisors is not None:
                rows = rows / self.divisors[first:last].to(rows.dtype)[:, None]
            yield rows if self.columns is None else rows.float() * self.columns
            let_go(pieces)
            first = last

    def with_columns(self, scales: torch.Tensor) -> Linear:
        """With columns multiplied once more."""
        return replace(self, columns=scales if self.columns is None else self.columns * scales)

    def with_rows_divided(self, divisors: torch.Tensor) -> Linear:
        """With rows and their bias divided once more by ``[sum n_i]`` float32; powers of two divide exactly."""
        bias = None if self.bias is None else self.bias / divisors
        return replace(self, divisors=divisors if self.divisors is None else self.divisors * divisors, bias=bias)


def _pieces(parts: Sequence[torch.Tensor], num_rows: int) -> Iterator[list[torch.Tensor]]:
    """Parts ``[n_i, k]``, one below the other, cut after every ``num_rows`` rows."""
    pieces: list[torch.Tensor] = []
    missing = num_rows
    for part in parts:
        first = 0
        while first < part.shape[0]:
            piece = part.detach()[first : first + missing]
            pieces.append(piece)
            first += piece.shape[0]
            missing -= piece.shape[0]
            if not missing:
                yield pieces
                pieces, missing = [], num_rows
    if pieces:
        yield pieces


@dataclass(frozen=True, slots=True)
class Mlp:
    """Up (gate rows first when gated) and down."""

    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer."""

    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm
    query: Norm
    key: Norm
    qkv: Linear
    out: Linear
    mlps: tuple[Mlp, ...]
    """One, or all experts."""
    router: Linear | None
    """Scores the experts; None for a plain MLP."""
    num_chosen: int
    renormalize: bool
    call: LayerCall
    cos: torch.Tensor
    """``[max_context, half]`` float32."""
    sin: torch.Tensor
    release: Callable[[], None]
    """Frees the layer's weights in the model it was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A whole model."""

    layers: tuple[DecoderLayer, ...]
    embedding: Linear
    embedding_scale: float
    embedding_columns: torch.Tensor | None = None
    """``[hidden]`` float32: what each column of a token's embedding is multiplied with besides."""
    head: Linear | None
    """None: tied to the embedding."""
    final_norm: Norm
    final_softcap: float
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    mlp_width: int
    vocabulary: int
    max_context: int
    activation: Activation
    gated: bool
    parallel_residual: bool


def read_decoder(module: PreTrainedModel, calls: Sequence[LayerCall], max_context: int) -> Decoder:
    """Read a model.

    Args:
        module: the model, on the CPU.
        calls: what each layer's attention was called with, in order.
        max_context: positions to make rotary tables for.

    Raises:
        UnsupportedModelError: it has a part that is not known here.
    """
    config = module.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(f"the native kernels do not know models of type {config.model_type}")
    inner: _Part = module.gpt_neox if config.model_type == "gpt_neox" else module.model
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    rotary = _RotaryTables(inner.rotary_emb, max_context)
    read = _read_neox_layer if config.model_type == "gpt_neox" else _read_layer
    layers = tuple(
        read(layer, config, calls[index], rotary.tables(_layer_type(config, index)), size)
        for index, layer in enumerate(inner.layers)
    )
    embedding: _Part = inner.embed_in if config.model_type == "gpt_neox" else inner.embed_tokens
    head: _Part = module.get_output_embeddings()
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    scale = getattr(embedding, "embed_scale", None)
    return Decoder(
        layers=layers,
        embedding=Linear(lambda: [embedding.weight]),
        embedding_scale=1.0 if scale is None else float(scale.to(embedding.weight.dtype)),
        head=None if tied else _linear(head),
        final_norm=_norm(inner.final_layer_norm if config.model_type == "gpt_neox" else inner.norm),
        final_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        hidden=int(config.hidden_size),
        mlp_width=_mlp_width(config),
        vocabulary=int(embedding.weight.shape[0]),
        max_context=max_context,
        activation=_activation(config),
        gated=config.model_type != "gpt_neox",
        parallel_residual=bool(config.model_type == "gpt_neox" and config.use_parallel_residual),
    )


def _read_layer(
    layer: _Part,
    config: PretrainedConfig,
    call: LayerCall,
    tables: tuple[torch.Tensor, torch.Tensor],
    _head_size: int,
) -> DecoderLayer:
    """A layer named as in Llama, with Gemma's norms after the blocks, Phi's fused rows or experts where they are."""
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    fused = hasattr(attention, "qkv_proj")
    mlps, router = _read_mlps(mlp)
    return DecoderLayer(
        before_attention=_norm(layer.input_layernorm),
        after_attention=_norm(layer.post_attention_layernorm) if sandwich else Norm(),
        before_mlp=_norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        after_mlp=_norm(layer.post_feedforward_layernorm) if sandwich else Norm(),
        query=_norm(getattr(attention, "q_norm", None)),
        key=_norm(getattr(attention, "k_norm", None)),
        qkv=_linear(attention.qkv_proj) if fused else _linear(attention.q_proj, attention.k_proj, attention.v_proj),
        out=_linear(attention.o_proj),
        mlps=mlps,
        router=router,
        num_chosen=int(getattr(config, "num_experts_per_tok", None) or 0) if router is not None else 0,
        renormalize=config.model_type == "mixtral" or bool(getattr(config, "norm_topk_prob", False)),
        call=call,
        cos=tables[0],
        sin=tables[1],
        release=lambda: release(layer),
    )


def _read_mlps(mlp: _Part) -> tuple[tuple[Mlp, ...], Linear | None]:
    if hasattr(mlp, "experts"):
        experts, gate = mlp.experts, mlp.gate

        def part(tensor_name: str, index: int) -> Linear:
            return Linear(lambda: [getattr(experts, tensor_name)[index]])

        count = int(experts.gate_up_proj.shape[0])
        made = tuple(Mlp(part("gate_up_proj", index), part("down_proj", index)) for index in range(count))
        return made, Linear(lambda: [gate.weight])
    up = _linear(mlp.gate_up_proj) if hasattr(mlp, "gate_up_proj") else _linear(mlp.gate_proj, mlp.up_proj)
    return (Mlp(up, _linear(mlp.down_proj)),), None


def _read_neox_layer(
    layer: _Part,
    config: PretrainedConfig,
    call: LayerCall,
    tables: tuple[torch.Tensor, torch.Tensor],
    head_size: int,
) -> DecoderLayer:
    """A layer of GPT-NeoX: the rows of queries, keys and values alternate head by head."""
    attention, mlp = layer.attention, layer.mlp
    heads = int(config.num_attention_heads)

    def by_kind(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(heads, 3, head_size, -1).transpose(0, 1).reshape(3 * heads * head_size, -1)

    fused = attention.query_key_value
    bias = None if fused.bias is None else by_kind(fused.bias).flatten().float()
    return DecoderLayer(
        before_attention=_norm(layer.input_layernorm),
        after_attention=Norm(),
        before_mlp=_norm(layer.post_attention_layernorm),
        after_mlp=Norm(),
        query=Norm(),
        key=Norm(),
        qkv=Linear(lambda: [by_kind(fused.weight)], bias),
        out=_linear(attention.dense),
        mlps=(Mlp(_linear(mlp.dense_h_to_4h), _linear(mlp.dense_4h_to_h)),),
        router=None,
        num_chosen=0,
        renormalize=False,
        call=call,
        cos=tables[0],
        sin=tables[1],
        release=lambda: release(layer),
    )


class _RotaryTables:
    """Cosines and sines of all positions, made by the model's own module, once per kind of layer."""

    def __init__(self, rotary: _Part, max_context: int) -> None:
        self._rotary = rotary
        self._max_context = max_context
        self._made: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.inference_mode()
    def tables(self, layer_type: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``[max_context, half]`` float32 each."""
        if layer_type not in self._made:
            positions = torch.arange(self._max_context)[None]
            kind = () if layer_type is None else (layer_type,)
            cos, sin = (table[0].float() for table in self._rotary(torch.zeros(1), positions, *kind))
            half = cos.shape[-1] // 2
            if not torch.equal(cos[:, :half], cos[:, half:]) or not torch.equal(sin[:, :half], sin[:, half:]):
                raise UnsupportedModelError("the rotary positions of this model are not two equal halves")
            self._made[layer_type] = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        return self._made[layer_type]


def _layer_type(config: PretrainedConfig, index: int) -> str | None:
    return str(config.layer_types[index]) if config.model_type == "gemma3_text" else None


def _linear(*modules: _Part) -> Linear:
    biases = [module.bias for module in modules]
    source = modules[0] if len(modules) == 1 else None
    if all(bias is None for bias in biases):
        return Linear(lambda: [module.weight for module in modules], source=source)
    made = [
        torch.zeros(module.weight.shape[0]) if bias is None else bias.float()
        for module, bias in zip(modules, biases, strict=True)
    ]
    return Linear(lambda: [module.weight for module in modules], torch.cat(made), source)


@torch.inference_mode()
def _norm(module: _Part) -> Norm:
    if module is None:
        return Norm()
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.float().clone()
        return Norm(kind=NormKind.LAYER, weight=module.weight.float().clone(), bias=bias, eps=module.eps, source=module)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if eps is None or not hasattr(module, "weight"):
        raise UnsupportedModelError(f"{type(module).__name__} is a normalization that is not known here")
    weight = module.weight.float().clone()
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0))
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    found = module(x.to(module.weight.dtype)).float()
    errors = {offset: float((found - plain * (weight + offset)).abs().max()) for offset in (0.0, 1.0)}
    offset = min(errors, key=errors.__getitem__)
    if errors[offset] <= _NORM_TOLERANCE * float(found.abs().max()):
        return Norm(kind=NormKind.RMS, weight=weight, eps=float(eps), offset=offset, source=module)
    raise UnsupportedModelError(f"{type(module).__name__} weighs in a way that is not known here")


def release(module: nn.Module) -> None:
    """Give up the weights of a module, which cannot run any more."""
    let_go(module.parameters())
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def _mlp_width(config: PretrainedConfig) -> int:
    """The widest MLP of any layer."""
    return max(int(config.intermediate_size), int(getattr(config, "moe_intermediate_size", None) or 0))


def _activation(config: PretrainedConfig) -> Activation:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"the native kernels do not know the activation {name}")
    return _ACTIVATIONS[name]
