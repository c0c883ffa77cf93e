"""The memory bill of a deployment: weights, KV per channel and level, working memory, and how many channels fit.

Invariants and semantics: pure arithmetic over the shapes of a model, the same that ``node`` reserves by. Estimates are
of what Kev allocates on a CPU with its own kernels: never below it, and at most 5 % above. KV is counted in KV heads;
sliding layers keep every position of a channel, as the arena does. ``strict`` stores a common prefix once per channel,
``loose`` and ``shared`` store it once.

Not here: reading a model's files (``weight_files``), who owns which position (``slots``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from common.errors import ConfigError
from common.types import IsolationLevel, KVCacheMode
from inference_svc.memory_plan import KVGeometry
from inference_svc.plan import ForwardShapes

_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2}
_PANEL_ROWS = 16
"""Packed weights come in panels of this many outputs."""
_CHANNEL_BYTES = 8
"""Scale and sum of one int8 output channel."""
_FLOAT_BYTES = 4
_ROW_SCRATCH_BYTES = 2048 + 128
"""The linears' scratch per row beside the row itself in 16 bits (``linear.cpp``)."""
_PASS_ROWS_PER_THREAD, _MAX_PASS_ROWS, _SLICE_OUTPUTS, _PREPARED_BYTES = 16, 24, 128, 136
"""Rows that threads work on by themselves, and their working memory (``forward.cpp``, ``forward_rows.cpp``)."""
_LEAST_UNITS, _MOST_UNITS, _SCORE_BYTES, _TILE_ROWS, _STEP = 12, 144, 512 << 10, 2 * 144 + 64 + 256 + 2, 64
_SHELF_BYTES = 4 << 20
"""The attention's scratch per thread (``attention_block.h``), keys and values laid out too (``attention_cut.h``)."""
_ROUTERS = (".gate.weight", ".router.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the bill needs to know of a model."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    num_rotary_tables: int = 1
    """Kinds of layers with positions of their own."""
    num_experts: int = 0

    def geometry(self, precision: str) -> KVGeometry:
        """KV of this model."""
        return KVGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            key_head_size=self.head_size,
            value_head_size=self.head_size,
            element_bytes=_KV_BYTES[precision],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a deployment is planned for."""

    precision: str
    max_context: int
    """Positions of one channel at most."""
    num_channels: int
    """Questions in one forward."""
    channel_tokens: int
    """Positions a question really needs: prefix, prompt and answer."""
    prefix_tokens: int = 0
    """Of these, the leading ones that all questions share."""
    prefill_rows: int = 128
    segment_tokens: int = 64
    num_threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelBill:
    """KV under one level and one way of keeping it."""

    level: IsolationLevel
    kv_cache: KVCacheMode
    channel_bytes: int
    """Of one more channel."""
    common_bytes: int
    """Of what is stored once for all of them."""

    def bytes_for(self, num_channels: int) -> int:
        """KV of so many channels."""
        return self.common_bytes + num_channels * self.channel_bytes

    def channels_within(self, num_bytes: int) -> int:
        """Channels whose KV fits."""
        return max(0, (num_bytes - self.common_bytes) // self.channel_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBill:
    """The whole bill, bytes."""

    weight_bytes: int
    working_bytes: int
    """Activations, scratch and tables of positions."""
    position_bytes: int
    """KV of one token over all layers."""
    levels: tuple[LevelBill, ...]

    @property
    def fixed_bytes(self) -> int:
        """What is needed before the first channel."""
        return self.weight_bytes + self.working_bytes


def memory_bill(shape: ModelShape, load: Load, weight_bytes: int | None = None) -> MemoryBill:
    """The bill of a load.

    Args:
        shape: the model.
        load: what it is planned for.
        weight_bytes: of the packed weights when the tensors are known; else they are counted from the shape.

    Raises:
        ConfigError: the load contradicts itself.
    """
    _check(load)
    geometry = shape.geometry(load.precision)
    align = geometry.alignment_positions
    whole = _rounded(load.max_context, align) * geometry.position_bytes
    exact = _rounded(load.channel_tokens, align) * geometry.position_bytes
    own = _rounded(max(1, load.channel_tokens - load.prefix_tokens), align) * geometry.position_bytes
    prefix = _rounded(load.prefix_tokens, align) * geometry.position_bytes
    levels = [
        LevelBill(level=IsolationLevel.STRICT, kv_cache=KVCacheMode.UNIFIED, channel_bytes=whole, common_bytes=0),
        LevelBill(level=IsolationLevel.STRICT, kv_cache=KVCacheMode.SPLIT, channel_bytes=exact, common_bytes=0),
    ]
    for level in (IsolationLevel.LOOSE, IsolationLevel.SHARED):
        levels.append(LevelBill(level=level, kv_cache=KVCacheMode.SPLIT, channel_bytes=own, common_bytes=prefix))
    equalizer_bytes = shape.hidden * _FLOAT_BYTES if load.precision == "int8" else 0
    counted = counted_weights(shape, load.precision) if weight_bytes is None else weight_bytes
    return MemoryBill(
        weight_bytes=counted + equalizer_bytes,
        working_bytes=working_bytes(shape, load),
        position_bytes=geometry.position_bytes,
        levels=tuple(levels),
    )


def article_kv_bytes(num_layers: int, hidden: int, context: int, element_bytes: int, num_channels: int) -> int:
    """KV by the rule 2 x layers x hidden x context x bytes x channels, which takes every head for a KV head."""
    return 2 * num_layers * hidden * context * element_bytes * num_channels


def packed_matrix_bytes(num_outputs: int, num_inputs: int, precision: str) -> int:
    """One matrix as the kernels keep it: outputs in whole panels, inputs in whole words."""
    element = _ELEMENT_BYTES[precision]
    rows, columns = _rounded(num_outputs, _PANEL_ROWS), _rounded(num_inputs, 4 // element)
    return rows * columns * element + (rows * _CHANNEL_BYTES if precision == "int8" else 0)


def packed_bytes(tensors: Mapping[str, tuple[int, ...]], precision: str) -> int:
    """Tensors of these shapes as the kernels keep them.

    Matrices are packed, stacks of them one by one; vectors and the routers of experts are float32.
    """
    total = 0
    for name, shape in tensors.items():
        if len(shape) < 2:
            total += _FLOAT_BYTES * (shape[0] if shape else 1)
            continue
        kept = "fp32" if name.endswith(_ROUTERS) else precision
        total += prod(shape[:-2]) * packed_matrix_bytes(shape[-2], shape[-1], kept)
    return total


def counted_weights(shape: ModelShape, precision: str) -> int:
    """Weights of a decoder with gated MLPs and a tied head."""
    query, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    layer: dict[str, tuple[int, ...]] = {
        "qkv": (query + 2 * kv, shape.hidden),
        "out": (shape.hidden, query),
        "up": (2 * shape.mlp_width, shape.hidden),
        "down": (shape.hidden, shape.mlp_width),
        "norm before attention": (shape.hidden,),
        "norm before mlp": (shape.hidden,),
    }
    embedding = packed_matrix_bytes(shape.vocabulary, shape.hidden, precision)
    return packed_bytes(layer, precision) * shape.num_layers + embedding


def working_bytes(shape: ModelShape, load: Load) -> int:
    """Activations of one forward, the kernels' scratch, rows of logits and rotary tables; an upper bound."""
    shapes = ForwardShapes.of(load.num_channels, load.prefill_rows, load.segment_tokens, ragged=True)
    query = shape.num_heads * shape.head_size
    qkv = query + 2 * shape.num_kv_heads * shape.head_size
    mixture = shape.num_experts > 1
    shared_rows = max(shapes.decode_rows, min(shapes.max_rows, _PASS_ROWS_PER_THREAD * load.num_threads - 1))
    if mixture:
        shared_rows = max(shapes.max_rows, shapes.decode_rows)
    rows = max(shapes.max_rows, shapes.decode_rows) * (shape.hidden + query + qkv)
    rows += shapes.max_rows * (2 * shape.hidden + shape.num_experts if mixture else 0)
    shared = 2 * shape.hidden + 2 * shape.mlp_width
    widest = max(shape.hidden, query, shape.mlp_width)
    scratch = shared_rows * (widest * 2 + _ROW_SCRATCH_BYTES)
    activations = (rows + shared_rows * shared) * _FLOAT_BYTES + scratch
    if not mixture:
        row = 2 * shape.hidden + min(2 * shape.mlp_width, _SLICE_OUTPUTS) + shape.mlp_width
        prepared = widest * 2 + _PREPARED_BYTES
        activations += load.num_threads * _MAX_PASS_ROWS * (row * _FLOAT_BYTES + prepared)
    positions = _rounded(load.max_context + _STEP, _STEP) + 16
    scores = max(_LEAST_UNITS * positions * _FLOAT_BYTES, min(_MOST_UNITS * positions * _FLOAT_BYTES, _SCORE_BYTES))
    head = _rounded(shape.head_size, _STEP) * _FLOAT_BYTES
    shelf = min(_SHELF_BYTES, shape.num_heads * (2 * _rounded(load.max_context, _STEP) + 1) * head)
    attention = load.num_threads * (scores + _TILE_ROWS * head + shelf)
    logits = shapes.decode_rows * (shape.vocabulary + shape.hidden) * _FLOAT_BYTES
    tables = shape.num_rotary_tables * load.max_context * shape.head_size * _FLOAT_BYTES
    return activations + attention + logits + tables


def _check(load: Load) -> None:
    if load.channel_tokens > load.max_context:
        wanted = f"a channel of {load.channel_tokens} tokens is longer than the context of {load.max_context}"
        raise ConfigError(f"{wanted} (core.max_context)")
    if load.prefix_tokens >= load.channel_tokens:
        raise ConfigError(
            f"a common prefix of {load.prefix_tokens} tokens leaves nothing of a channel of {load.channel_tokens}"
        )


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
