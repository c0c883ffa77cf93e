"""Attention of isolated channels, registered in transformers under ``kev_<backend>``.

Invariants and semantics: a row sees the positions of its own question up to itself, inside the layer's window counted
in the question's own positions, and nothing else. Backends of one signature:

- ``cpu``: each question attends over its own KV extent, physically separate, with the library kernels of torch. The
  shapes a question is computed in depend on that question alone.
- ``reference``: one dense mask over the packed rows and all questions' keys, minus infinity across questions, in
  float32. It is the definition; tests compare the other backends with it.
- ``flex``: FlexAttention with a block mask over the KV arena (``flex``).

Attention keywords that change the mathematics and are not known here are refused: fail closed.

Not here: which rows there are (``scheduler``), where positions live (``kv_cache``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from common.errors import InvariantError, UnsupportedModelError
from inference_svc.kv_cache import KVCache
from inference_svc.plan import ForwardShapes, Segment, StepKind, StepPlan


class Backend(StrEnum):
    """Implementation of the isolated attention."""

    NATIVE = "native"
    """Kev's own kernels (``native_forward``); not a function of transformers."""
    CPU = "cpu"
    REFERENCE = "reference"
    FLEX = "flex"

    @property
    def attention_name(self) -> str:
        """Name under which transformers knows it."""
        return f"kev_{self.value}"


_HARMLESS_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits", "is_causal", "cache"}
)
"""Keywords that models hand to attention and that do not change what Kev computes."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention call."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class ForwardContext:
    """One forward as the attention functions see it."""

    segments: tuple[Segment, ...]
    cache: KVCache
    arena_rows: torch.Tensor
    """``[T]`` int64: arena position of each used row."""
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    """By (row, window): built once per forward, the same for every layer with that window."""
    calls: dict[int, LayerCall] = field(default_factory=dict)
    """What each layer called its attention with."""
    rows_per_segment: int = 1
    """Most rows a segment of this kind of forward can have."""
    min_segments: int = 1
    """Segments that a forward of this kind is laid out for at least."""
    layout: object | None = None
    """What a backend makes of the forward once, for all its layers."""
    compiled: bool = False
    """Whether kernels that can be compiled are, on a CPU too."""

    @classmethod
    def of(cls, plan: StepPlan, shapes: ForwardShapes, cache: KVCache, device: torch.device) -> ForwardContext:
        """The context of a plan."""
        rows = [s.kv.arena_position(p) for s in plan.segments for p in range(s.position, s.end)]
        return cls(
            plan.segments,
            cache,
            torch.tensor(rows, dtype=torch.int64, device=device),
            rows_per_segment=1 if plan.kind is StepKind.DECODE else shapes.segment_tokens,
            min_segments=shapes.decode_rows,
        )

    @property
    def num_used(self) -> int:
        """Rows that carry a token: ``T``."""
        return self.arena_rows.shape[0]


def first_visible(position: int, window: int | None) -> int:
    """First position that the token at ``position`` may see; ``window`` counts the token itself."""
    return 0 if window is None else max(0, position + 1 - window)


def visibility(segment: Segment, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """``[rows, L]`` bool: which of the positions ``[first, segment.end)`` each row may see."""
    queries = torch.arange(segment.position, segment.end, device=device)[:, None]
    keys = torch.arange(first, segment.end, device=device)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (queries - keys < window)


def cpu_attention(query: torch.Tensor, call: LayerCall, context: ForwardContext) -> torch.Tensor:
    """Attention of every question over its own extent.

    Args:
        query: ``[1, H, R, D]``; rows after the used ones are padding.
        call: the layer.
        context: the forward.

    Returns:
        ``[1, R, H, Dv]``; padding rows are zero.
    """
    _, num_heads, num_rows, _ = query.shape
    out = query.new_zeros(1, num_rows, num_heads, context.cache.values[call.layer].shape[-1])
    for segment in context.segments:
        rows = slice(segment.row, segment.row + segment.num_rows)
        first = first_visible(segment.position, call.window)
        key, value = context.cache.read(call.layer, segment.kv, first, segment.end)
        # A fresh copy has the allocator's alignment, whatever row of the forward the question got.
        own = query[:, :, rows].clone(memory_format=torch.contiguous_format)
        mask = _segment_mask(segment, first, call.window, context, query.device)
        attend = _capped_attention if call.softcap is not None else _library_attention
        out[:, rows] = attend(own, key, value, mask, call).transpose(1, 2)
    return out


def reference_attention(query: torch.Tensor, call: LayerCall, context: ForwardContext) -> torch.Tensor:
    """Attention over all questions' keys under one block-diagonal mask, in float32 or better.

    Args:
        query: ``[1, H, R, D]``.
        call: the layer.
        context: the forward.

    Returns:
        ``[1, R, H, Dv]``; padding rows are zero.
    """
    _, num_heads, num_rows, _ = query.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    parts = [context.cache.read(call.layer, s.kv, 0, s.end) for s in context.segments]
    key = torch.cat([k for k, _ in parts], dim=2)
    value = torch.cat([v for _, v in parts], dim=2)
    groups = num_heads // key.shape[1]
    key, value = (t.to(precise).repeat_interleave(groups, dim=1) for t in (key, value))
    blocks = [visibility(s, 0, call.window, query.device) for s in context.segments]
    mask = torch.block_diag(*(block.to(torch.uint8) for block in blocks)).bool()
    scores = _cap(query[:, :, : context.num_used].to(precise) @ key.transpose(2, 3) * call.scaling, call.softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    out = query.new_zeros(1, num_rows, num_heads, value.shape[-1])
    out[:, : context.num_used] = (weights @ value).transpose(1, 2).to(query.dtype)
    return out


def _segment_mask(
    segment: Segment, first: int, window: int | None, context: ForwardContext, device: torch.device
) -> torch.Tensor | None:
    """The mask of one segment, or None when every row sees every position."""
    if segment.num_rows == 1:
        return None
    place = (segment.row, window or 0)
    if place not in context.masks:
        context.masks[place] = visibility(segment, first, window, device)
    return context.masks[place]


def _library_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: LayerCall
) -> torch.Tensor:
    """``[1, H, rows, Dv]`` by torch's scaled dot product attention."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scaling, enable_gqa=grouped)


def _capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: LayerCall
) -> torch.Tensor:
    """``[1, H, rows, Dv]`` with logits soft-capped before the mask. Source: Gemma 2 report (2024), sec. 2."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = _cap(query @ key.transpose(2, 3) * call.scaling, call.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


AttentionBody = Callable[[torch.Tensor, LayerCall, ForwardContext], torch.Tensor]


def _hook(body: AttentionBody) -> Callable[..., tuple[torch.Tensor, None]]:
    """The function that transformers calls in every layer."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        kev_context: ForwardContext | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        if kev_context is None:
            raise InvariantError("the model was called without a step plan")
        if attention_mask is not None or dropout:
            raise UnsupportedModelError(
                f"{type(module).__name__} brings its own mask or dropout; Kev cannot isolate it"
            )
        _refuse_unknown(module, others)
        layer = module.layer_idx
        if not isinstance(layer, int):
            raise UnsupportedModelError(f"{type(module).__name__} has no layer index; Kev cannot give it a KV cache")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        call = LayerCall(layer, scale, sliding_window, softcap)
        return attend(body, query, key, value, call, kev_context), None

    return attention


def attend(
    body: AttentionBody,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: LayerCall,
    context: ForwardContext,
) -> torch.Tensor:
    """One layer's attention in a forward: the new keys and values go into the arena, then every row looks.

    Args:
        body: the backend.
        query: ``[1, H, R, D]``.
        key: ``[1, Hkv, R, D]``.
        value: ``[1, Hkv, R, Dv]``.
        call: the layer.
        context: the forward.

    Returns:
        ``[1, R, H, Dv]``.
    """
    used = context.num_used
    context.cache.write(call.layer, context.arena_rows, key[0, :, :used], value[0, :, :used])
    context.calls[call.layer] = call
    return body(query, call, context)


def _refuse_unknown(module: torch.nn.Module, others: dict[str, object]) -> None:
    unknown = sorted(name for name, value in others.items() if name not in _HARMLESS_KEYWORDS and value is not None)
    if unknown or others.get("is_causal") is False:
        names = ", ".join(unknown) or "is_causal=False"
        message = f"{type(module).__name__} passes attention keywords Kev does not know ({names}); its answers would be"
        raise UnsupportedModelError(f"{message} wrong, so it is refused; use a model with plain causal attention")


def no_mask(*_args: object, **_keywords: object) -> None:
    """Mask hook of transformers: the step plan says who sees what, nothing is built."""


def register(backend: Backend, body: AttentionBody) -> None:
    """Make a backend known to transformers; safe to call again."""
    AttentionInterface.register(backend.attention_name, _hook(body))
    AttentionMaskInterface.register(backend.attention_name, no_mask)
