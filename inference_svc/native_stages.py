"""Single parts of a packed model, runnable by themselves: its embedding, one of its layers, its end.

Invariants and semantics: a stage is a whole model as the kernels see it. What the part is given stands in the
embedding, row by row, in float32; what a part before the end gives comes out of a head that changes nothing. Stages
point into the packed weights and copy none of them.

Not here: what a part should give (``layer_reference``), the comparison (``native_check``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from inference_svc.decoder import Decoder, Linear, Norm
from inference_svc.forward import WantedRow
from inference_svc.kernels.layout import CLayer, CMlp, CModel, CNorm, NormKind, Precision
from inference_svc.kernels.library import Library
from inference_svc.kernels.packed import PackedWeight
from inference_svc.kv_cache import KVCache
from inference_svc.memory_plan import KVGeometry
from inference_svc.native_forward import NativeForward
from inference_svc.native_model import NativeModel
from inference_svc.plan import ForwardShapes, KVView, Segment, StepKind, StepPlan
from inference_svc.slots import Extent

_SEGMENTS = (17, 1, 6, 1, 12, 1, 2)
"""Tokens of a prompt's segments, long and short."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Makes and runs the parts of models of one geometry."""

    library: Library
    geometry: KVGeometry
    num_threads: int

    def layer_in_fp32(self, decoder: Decoder, index: int, window: int | None, hidden: torch.Tensor) -> torch.Tensor:
        """One layer as it was read, packed in float32 for this once; see ``layer``."""
        layer = decoder.layers[index]
        one = replace(layer, call=replace(layer.call, window=window), release=lambda: None)
        width = max(hidden.shape)
        alone = replace(
            decoder,
            layers=(one,),
            embedding=Linear(lambda: [_padded(hidden, width)]),
            embedding_scale=1.0,
            embedding_columns=None,
            head=Linear(lambda: [torch.eye(width, hidden.shape[1])]),
            final_norm=_plain_norm(hidden.shape[1]),
            final_softcap=0.0,
            vocabulary=width,
        )
        packed = NativeModel.pack(alone, Precision.F32, Precision.F32, self.library)
        return self._run(packed, range(len(hidden)), torch.float32)[:, : hidden.shape[1]]

    def end_in_fp32(self, decoder: Decoder, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Last norm and head as they were read, for some tokens; see ``end``."""
        head = decoder.head or decoder.embedding
        [rows] = [part[tokens].float() for part in head.parts()]
        rows = rows if head.columns is None else rows * head.columns
        width = max(len(hidden), len(tokens))
        bias = None if head.bias is None else _padded(head.bias[tokens, None], width)[:, 0].contiguous()
        alone = replace(
            decoder,
            layers=(),
            embedding=Linear(lambda: [_padded(hidden, width)]),
            embedding_scale=1.0,
            embedding_columns=None,
            head=Linear(lambda: [_padded(rows, width)], bias),
            vocabulary=width,
        )
        packed = NativeModel.pack(alone, Precision.F32, Precision.F32, self.library)
        return self._run(packed, range(len(hidden)), torch.float32)[:, : len(tokens)]

    def embedding(self, native: NativeModel, ids: Sequence[int]) -> torch.Tensor:
        """Rows ``[R, hidden]`` as the first layer gets them."""
        model = _copied(native.model)
        kept = self._plain_end(model)
        stage = NativeModel(model, (CLayer * 0)(), (CMlp * 0)(), (*native.tensors, *kept))
        model.num_layers = 0
        return self._run(stage, ids, torch.float32)[:, : model.hidden]

    def layer(
        self, native: NativeModel, index: int, window: int | None, hidden: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """What one layer makes of rows.

        Args:
            native: the packed model.
            index: of the layer.
            window: instead of its own.
            hidden: ``[T, hidden]`` float32.
            dtype: of keys and values.

        Returns:
            ``[R, hidden]`` float32: the rows that ``wanted_rows`` names.
        """
        model = _copied(native.model)
        added = (*self._given(model, hidden), *self._plain_end(model))
        model.num_layers, model.vocabulary = 1, max(hidden.shape)
        first = sum(max(1, layer.num_experts) for layer in native.layers[:index])
        entry = CLayer()
        ctypes.memmove(ctypes.byref(entry), ctypes.byref(native.layers[index]), ctypes.sizeof(CLayer))
        entry.window = window or 0
        mlps = native.mlps[first : first + max(1, entry.num_experts)]
        stage = NativeModel(model, (CLayer * 1)(entry), (CMlp * len(mlps))(*mlps), (*native.tensors, *added))
        return self._run(stage, range(len(hidden)), dtype)[:, : model.hidden]

    def end(self, native: NativeModel, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of rows ``[T, hidden]``."""
        model = _copied(native.model)
        added = self._given(model, hidden)
        model.num_layers = 0
        stage = NativeModel(model, (CLayer * 0)(), (CMlp * 0)(), (*native.tensors, *added))
        return self._run(stage, range(len(hidden)), torch.float32)

    def whole(
        self, native: NativeModel, windows: Sequence[int | None], ids: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Logits ``[R, V]`` of a prompt, with other windows."""
        layers = (CLayer * len(native.layers))()
        ctypes.memmove(layers, native.layers, ctypes.sizeof(layers))
        for entry, window in zip(layers, windows, strict=True):
            entry.window = window or 0
        return self._run(NativeModel(native.model, layers, native.mlps, native.tensors), ids, dtype)

    def _given(self, model: CModel, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Put rows in the place of the embedding; returns what must be kept alive."""
        given = PackedWeight.pack(hidden, Precision.F32, self.library)
        model.embedding, model.embedding_scale, model.embedding_columns = given.described(), 1.0, None
        return (given.data,)

    def _plain_end(self, model: CModel) -> tuple[torch.Tensor, ...]:
        """Put an end that changes nothing in the place of the model's; returns what must be kept alive.

        Of the vocabulary's logits only the first ``hidden`` mean something.
        """
        eye, norm = PackedWeight.pack(torch.eye(model.hidden), Precision.F32, self.library), _plain_norm(model.hidden)
        weight = norm.weight if norm.weight is not None else torch.empty(0)
        model.head, model.head_bias, model.final_softcap = eye.described(), None, 0.0
        model.final_norm = CNorm(weight=weight.data_ptr(), eps=norm.eps, kind=norm.kind)
        return eye.data, weight

    def _run(self, model: NativeModel, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What comes out of a model ``[R, vocabulary]`` for a prompt, in one forward of several segments."""
        extent = Extent(0, len(ids), 0, "check")
        segments: list[Segment] = []
        for number, (first, last) in enumerate(_cuts(len(ids))):
            tokens = tuple(ids[first:last])
            view = KVView(private=extent)
            segments.append(
                Segment(sequence_id=number, slot=0, row=first, position=first, token_ids=tokens, kv=view, owner="check")
            )
        plan = StepPlan(step_index=0, kind=StepKind.MIXED, num_rows=len(ids), segments=tuple(segments))
        shapes = ForwardShapes.of(len(segments), len(ids), len(ids), ragged=True)
        geometry = replace(self.geometry, num_layers=len(model.layers), element_bytes=dtype.itemsize)
        cache = KVCache(geometry, len(ids), dtype, torch.device("cpu"))
        forward = NativeForward(self.library, model, cache, shapes, self.num_threads)
        made = forward.run(plan, [WantedRow(segment, greedy=False) for segment in segments])
        return torch.stack([row for row in made if isinstance(row, torch.Tensor)])


def wanted_rows(num_tokens: int) -> list[int]:
    """The rows of a prompt that a stage gives: the last one of each segment."""
    return [last - 1 for _, last in _cuts(num_tokens)]


def _cuts(num_tokens: int) -> list[tuple[int, int]]:
    cuts, first = [], 0
    for size in _SEGMENTS:
        if first < num_tokens:
            cuts.append((first, min(first + size, num_tokens)))
            first += size
    return cuts


def _plain_norm(width: int) -> Norm:
    """A norm that changes nothing: its epsilon is so large that the rows do not count beside it."""
    return Norm(kind=NormKind.RMS, weight=torch.full((width,), 2.0**30), eps=2.0**60)


def _copied(model: CModel) -> CModel:
    made = CModel()
    ctypes.memmove(ctypes.byref(made), ctypes.byref(model), ctypes.sizeof(CModel))
    return made


def _padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    made = torch.zeros(num_rows, rows.shape[1])
    made[: len(rows)] = rows
    return made
