"""The ``flex`` backend: FlexAttention over the whole KV arena, with a block mask made from the step plan.

Invariants and semantics: every segment is a batch element of its own; its list of KV blocks holds its own blocks only,
in order of position, and its mask admits its own positions only. Extents start on block borders, so which of its
positions share a block depends on the question alone, and the number of batch elements and query rows is fixed per
kind of forward: a question's kernel does the same sums alone and in company. Prefix and private part are different
blocks here, so levels that store a prefix apart are isolated, but need not equal ``strict`` in the last bit.

Not here: the reference (``attention``). Source: Dong 2024, Flex Attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from inference_svc.attention import ForwardContext, LayerCall, first_visible
from inference_svc.plan import Segment

BLOCK_POSITIONS = 128
"""Size of a block of queries or keys; extents are aligned to it."""
_MAX_CODES = 64
_GROUP_STEP = 8
"""Prefill forwards have this many segments, or a multiple: few shapes, few compilations."""

_Tensor = torch.Tensor
_MaskMod = Callable[[_Tensor, _Tensor, _Tensor, _Tensor], _Tensor]
_ScoreMod = Callable[[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor], _Tensor]


@dataclass(slots=True)
class FlexLayout:
    """One forward as FlexAttention sees it: ``G`` segments of ``S`` rows, the unused ones empty."""

    segments: tuple[Segment, ...]
    gather: _Tensor
    """``[G * S]`` int64: row of the forward for each row of a segment; padding reads row 0."""
    scatter: _Tensor
    """``[T]`` int64: place among the ``G * S`` rows of each used row of the forward."""
    query_start: _Tensor
    """``[G]`` int32: position of a segment's first row."""
    private_start: _Tensor
    private_end: _Tensor
    prefix_start: _Tensor
    prefix_end: _Tensor
    num_groups: int
    rows_per_group: int
    num_positions: int
    masks: dict[int, BlockMask] = field(default_factory=dict)
    """By window; 0 is none."""

    @classmethod
    def of(cls, context: ForwardContext, device: torch.device) -> FlexLayout:
        """Lay a forward out."""
        segments, rows = context.segments, context.rows_per_segment
        groups = -(-max(len(segments), context.min_segments) // _GROUP_STEP) * _GROUP_STEP
        gather = torch.zeros(groups, rows, dtype=torch.int64)
        scatter: list[int] = []
        bounds = torch.zeros(5, groups, dtype=torch.int32)
        for group, segment in enumerate(segments):
            gather[group, : segment.num_rows] = torch.arange(segment.row, segment.row + segment.num_rows)
            scatter += range(group * rows, group * rows + segment.num_rows)
            private, prefix, num_prefix = segment.kv.private, segment.kv.prefix, segment.kv.num_prefix
            bounds[0, group] = segment.position
            bounds[1, group] = private.start
            bounds[2, group] = private.start + max(0, segment.end - num_prefix)
            if prefix is not None:
                bounds[3, group] = prefix.start
                bounds[4, group] = prefix.start + min(num_prefix, segment.end)
        query_start, private_start, private_end, prefix_start, prefix_end = bounds.to(device)
        return cls(
            segments=segments,
            gather=gather.flatten().to(device),
            scatter=torch.tensor(scatter, device=device),
            query_start=query_start,
            private_start=private_start,
            private_end=private_end,
            prefix_start=prefix_start,
            prefix_end=prefix_end,
            num_groups=groups,
            rows_per_group=rows,
            num_positions=context.cache.keys[0].shape[0],
        )

    def mask(self, window: int | None, device: torch.device) -> BlockMask:
        """The block mask for layers with a window (None: without)."""
        key = window or 0
        if key not in self.masks:
            self.masks[key] = self._build_mask(window, device)
        return self.masks[key]

    def _build_mask(self, window: int | None, device: torch.device) -> BlockMask:
        num_blocks = -(-self.num_positions // BLOCK_POSITIONS)
        counts = torch.zeros(self.num_groups, 1, 1, dtype=torch.int32)
        indices = torch.zeros(self.num_groups, 1, 1, num_blocks, dtype=torch.int32)
        for group, segment in enumerate(self.segments):
            blocks = _blocks(segment, window)
            counts[group] = len(blocks)
            indices[group, 0, 0, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return BlockMask.from_kv_blocks(
            counts.to(device),
            indices.to(device),
            BLOCK_SIZE=BLOCK_POSITIONS,
            mask_mod=self._visible(window),
            seq_lengths=(self.rows_per_group, self.num_positions),
        )

    def _visible(self, window: int | None) -> _MaskMod:
        query_start, private_start, private_end = self.query_start, self.private_start, self.private_end
        prefix_start, prefix_end = self.prefix_start, self.prefix_end

        def visible(b: _Tensor, _h: _Tensor, q: _Tensor, kv: _Tensor) -> _Tensor:
            in_prefix = (kv >= prefix_start[b]) & (kv < prefix_end[b])
            in_private = (kv >= private_start[b]) & (kv < private_end[b])
            num_prefix = prefix_end[b] - prefix_start[b]
            key = torch.where(in_prefix, kv - prefix_start[b], kv - private_start[b] + num_prefix)
            query = query_start[b] + q
            seen = (in_prefix | in_private) & (key <= query)
            return seen if window is None else seen & (query - key < window)

        return visible


def prepare(context: ForwardContext, windows: Iterable[int | None], device: torch.device) -> None:
    """Lay a forward out and make its masks, which cannot be made inside of compiled code.

    Args:
        context: the forward.
        windows: of the layers.
        device: where the arena is.
    """
    context.layout = layout = FlexLayout.of(context, device)
    for window in windows:
        layout.mask(window, device)


def flex_backend(query: _Tensor, call: LayerCall, context: ForwardContext) -> _Tensor:
    """Attention of every question over its own blocks of the arena.

    Args:
        query: ``[1, H, R, D]``; rows after the used ones are padding.
        call: the layer.
        context: the forward.

    Returns:
        ``[1, R, H, Dv]``; padding rows are zero.
    """
    if not isinstance(context.layout, FlexLayout):
        context.layout = FlexLayout.of(context, query.device)
    layout = context.layout
    _, num_heads, num_rows, head_size = query.shape
    groups, rows = layout.num_groups, layout.rows_per_group
    own = query[0].index_select(1, layout.gather).view(num_heads, groups, rows, head_size).transpose(0, 1).contiguous()
    key = context.cache.keys[call.layer].transpose(0, 1).unsqueeze(0)
    value = context.cache.values[call.layer].transpose(0, 1).unsqueeze(0)
    made = _kernel(context.compiled or query.device.type == "cuda")(
        own,
        key,
        value,
        score_mod=None if call.softcap is None else _capped(call.softcap),
        block_mask=layout.mask(call.window, query.device),
        scale=call.scaling,
        enable_gqa=num_heads != key.shape[1],
    )
    flat = made.transpose(1, 2).reshape(groups * rows, num_heads, value.shape[-1])
    out = query.new_zeros(1, num_rows, num_heads, value.shape[-1])
    out[0, : context.num_used] = flat.index_select(0, layout.scatter)
    return out


@cache
def _kernel(compiled: bool) -> Callable[..., _Tensor]:
    """The compiled kernel, which a GPU always has; the eager form is for small sizes."""
    kernel: Callable[..., _Tensor] = flex_attention
    if not compiled:
        return kernel
    # One code for each shape, window and arena; beyond torch's limit there is an error, never the eager form.
    torch._dynamo.config.recompile_limit = max(_MAX_CODES, torch._dynamo.config.recompile_limit)
    return torch.compile(kernel, dynamic=False, fullgraph=True)


@cache
def _capped(softcap: float) -> _ScoreMod:
    def capped(score: _Tensor, _b: _Tensor, _h: _Tensor, _q: _Tensor, _kv: _Tensor) -> _Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


def _blocks(segment: Segment, window: int | None) -> list[int]:
    """Blocks of the arena that hold what the segment may see, in order of position."""
    found: list[int] = []
    for start, end in segment.kv.ranges(first_visible(segment.position, window), segment.end):
        found += range(start // BLOCK_POSITIONS, (end - 1) // BLOCK_POSITIONS + 1)
    return found
