"""A decoder packed for Kev's own kernels.

Invariants and semantics: the packed weights are the only copy; each layer's own weights are released as soon as it is
packed. The structures that the kernels read point into ``tensors``, which this object keeps alive, and nowhere else.
Weights that several layers or parts share (rotary tables, a tied head) are stored once.

Not here: reading the model (``decoder``), running it (``native_forward``), keeping it on disk (``native_image``).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Self

import torch

from common.errors import InvariantError
from inference_svc.decoder import Decoder, DecoderLayer, Linear, Norm
from inference_svc.kernels.layout import CLayer, CMlp, CModel, CNorm, CWeight, Precision
from inference_svc.kernels.library import Library
from inference_svc.kernels.packed import PackedWeight
from inference_svc.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A description over one KV arena, with what it points at."""

    description: CModel
    kept: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class NativeModel:
    """Packed weights and what they mean. Keys and values have no place yet."""

    model: CModel
    layers: ctypes.Array[CLayer]
    mlps: ctypes.Array[CMlp]
    """All layers' MLPs, layer after layer."""
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def pack(cls, decoder: Decoder, precision: Precision, kv_precision: Precision, library: Library) -> Self:
        """Pack a decoder layer by layer, releasing the weights it was read from."""
        packer = _Packer(library, precision)
        layers = (CLayer * len(decoder.layers))()
        mlps = (CMlp * sum(len(layer.mlps) for layer in decoder.layers))()
        number = 0
        for entry, layer in zip(layers, decoder.layers, strict=True):
            packer.fill_layer(entry, layer)
            for mlp in layer.mlps:
                packer.fill_mlp(mlps[number], mlp.up, mlp.down)
                number += 1
            layer.release()
        embedding = packer.weight(decoder.embedding)
        model = CModel(
            embedding=embedding,
            head=embedding if decoder.head is None else packer.weight(decoder.head),
            head_bias=None if decoder.head is None else packer.address(decoder.head.bias),
            embedding_columns=packer.address(decoder.embedding_columns),
            final_norm=packer.norm(decoder.final_norm),
            num_layers=len(decoder.layers),
            hidden=decoder.hidden,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_size=decoder.head_size,
            mlp_width=decoder.mlp_width,
            vocabulary=decoder.vocabulary,
            max_context=decoder.max_context,
            embedding_scale=decoder.embedding_scale,
            final_softcap=decoder.final_softcap,
            activation=decoder.activation,
            gated=decoder.gated,
            parallel_residual=decoder.parallel_residual,
            kv_type=kv_precision,
        )
        return cls(model, layers, mlps, tuple(packer.kept.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def tied(self) -> bool:
        """The head is the embedding."""
        return bool(self.model.head.data == self.model.embedding.data)

    def placed_over(self, cache: KVCache) -> PlacedModel:
        """The description with the keys and values of one arena."""
        layers = (CLayer * len(self.layers))()
        ctypes.memmove(layers, self.layers, ctypes.sizeof(layers))
        number = 0
        for entry, keys, values in zip(layers, cache.keys, cache.values, strict=True):
            entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
            entry.mlps = ctypes.pointer(self.mlps[number])
            number += max(1, entry.num_experts)
        model = CModel()
        ctypes.memmove(ctypes.byref(model), ctypes.byref(self.model), ctypes.sizeof(model))
        model.layers = layers
        return PlacedModel(model, (self, layers, cache))

    def embedding_rows(self, first: int, last: int, library: Library) -> torch.Tensor:
        """Embeddings ``[last - first, hidden]`` float32 of tokens ``[first, last)``, without the model's scale."""
        width = self.model.hidden
        made = torch.empty(last - first, width)
        weight = ctypes.byref(self.model.embedding)
        library.check(library.calls.kev_unpack_rows(None, weight, first, last - first, made.data_ptr(), width))
        if self.model.embedding_columns:
            columns = (ctypes.c_float * width).from_address(self.model.embedding_columns)
            made *= torch.frombuffer(columns, dtype=torch.float32)
        return made


@dataclass(slots=True)
class _Packer:
    """Packs parts and remembers the tensors by their addresses."""

    library: Library
    precision: Precision
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def fill_layer(self, entry: CLayer, layer: DecoderLayer) -> None:
        """Describe one layer, its MLPs apart."""
        entry.before_attention = self.norm(layer.before_attention)
        entry.after_attention = self.norm(layer.after_attention)
        entry.before_mlp = self.norm(layer.before_mlp)
        entry.after_mlp = self.norm(layer.after_mlp)
        entry.query, entry.key = self.norm(layer.query), self.norm(layer.key)
        entry.qkv, entry.qkv_bias = self.weight(layer.qkv), self.address(layer.qkv.bias)
        entry.out, entry.out_bias = self.weight(layer.out), self.address(layer.out.bias)
        if layer.router is not None:
            # Scores decide which experts run: they keep full precision whatever the weights have.
            entry.router = self.weight(layer.router, Precision.F32)
            entry.num_experts, entry.num_chosen = len(layer.mlps), layer.num_chosen
            entry.renormalize = layer.renormalize
        entry.cos, entry.sin = self.address(layer.cos), self.address(layer.sin)
        entry.rotary_half = layer.cos.shape[1]
        entry.window = layer.call.window or 0
        entry.scale = layer.call.scaling
        entry.softcap = layer.call.softcap or 0.0

    def fill_mlp(self, entry: CMlp, up: Linear, down: Linear) -> None:
        """Describe one MLP."""
        entry.up, entry.up_bias = self.weight(up), self.address(up.bias)
        entry.down, entry.down_bias = self.weight(down), self.address(down.bias)

    def norm(self, norm: Norm) -> CNorm:
        """Describe a norm."""
        return CNorm(
            weight=self.address(norm.weight),
            bias=self.address(norm.bias),
            eps=norm.eps,
            offset=norm.offset,
            kind=norm.kind,
        )

    def weight(self, linear: Linear, precision: Precision | None = None) -> CWeight:
        """Pack and describe the rows of a linear."""
        parts = [part.detach() for part in linear.parts()]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        kept_as = self.precision if precision is None else precision
        packed = PackedWeight.pack(joined, kept_as, self.library, linear.columns)
        for tensor in (packed.data, packed.scale, packed.sums):
            if tensor is not None:
                self._keep(tensor)
        return packed.described()

    def address(self, tensor: torch.Tensor | None) -> int | None:
        """Where the kernels find a tensor of floats."""
        if tensor is None:
            return None
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            raise InvariantError(f"a {tensor.dtype} tensor where the kernels read contiguous floats")
        return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> int:
        self.kept[tensor.data_ptr()] = tensor
        return tensor.data_ptr()
