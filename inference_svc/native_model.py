"""A decoder packed for Kev's own kernels.

Invariants and semantics: weights are packed in blocks of rows, straight into the store that keeps them; each layer's
own weights are released as soon as it is packed. So there are no more than a few blocks beside the packed weights, and
no copy but they afterwards. The structures that the kernels read point into ``tensors``, which this object keeps
alive, and nowhere else. Weights that several layers or parts share (rotary tables, a tied head) are stored once.

Not here: reading the model (``decoder``), running it (``native_forward``), the stores (``tensor_store``,
``native_image``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from common.errors import InvariantError
from inference_svc.decoder import Decoder, DecoderLayer, Linear, Norm
from inference_svc.kernels.layout import CLayer, CMlp, CModel, CNorm, CWeight, Precision
from inference_svc.kernels.library import Library
from inference_svc.kernels.packed import packed_blocks, packed_bytes
from inference_svc.kv_cache import KVCache
from inference_svc.native_pointers import pointed
from inference_svc.tensor_store import MemoryStore, Structures, TensorStore

_BLOCK_BYTES = 4 << 20
"""Of the rows, in float32, that are packed at a time."""


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
    def pack(
        cls,
        decoder: Decoder,
        precision: Precision,
        kv_precision: Precision,
        library: Library,
        store: TensorStore | None = None,
        on_layer: Callable[[int], None] = lambda _: None,
    ) -> Self:
        """Pack a decoder layer by layer, releasing the weights it was read from.

        Args:
            decoder: the model.
            precision: of the weights.
            kv_precision: of keys and values.
            library: the kernels.
            store: takes the packed tensors; None for this process's memory.
            on_layer: told how many layers are done.
        """
        store = MemoryStore(library) if store is None else store
        packer = _Packer(library, precision, store)
        layers = (CLayer * len(decoder.layers))()
        mlps = (CMlp * sum(len(layer.mlps) for layer in decoder.layers))()
        number = 0
        for index, (entry, layer) in enumerate(zip(layers, decoder.layers, strict=True)):
            packer.fill_layer(entry, layer)
            for mlp in layer.mlps:
                packer.fill_mlp(mlps[number], mlp.up, mlp.down)
                number += 1
            layer.release()
            on_layer(index + 1)
        structures = Structures(bytes(packer.model(decoder, kv_precision)), bytes(layers), bytes(mlps))
        return cls.of(structures, store.finish(structures))

    @classmethod
    def of(cls, structures: Structures, tensors: Sequence[torch.Tensor]) -> Self:
        """A model from its parts.

        Raises:
            ValueError: they do not belong together.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls(
            pointed(CModel, structures.model, addresses),
            pointed(CLayer * (len(structures.layers) // ctypes.sizeof(CLayer)), structures.layers, addresses),
            pointed(CMlp * (len(structures.mlps) // ctypes.sizeof(CMlp)), structures.mlps, addresses),
            tuple(tensors),
        )

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
    """Packs parts into a store; in the structures it fills, a pointer is the number of a tensor."""

    library: Library
    precision: Precision
    store: TensorStore
    kept: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Tensors of floats and their numbers, by address: shared ones are stored once."""

    def model(self, decoder: Decoder, kv_precision: Precision) -> CModel:
        """Describe everything but the layers."""
        embedding = self.weight(decoder.embedding)
        return CModel(
            embedding=embedding,
            head=embedding if decoder.head is None else self.weight(decoder.head),
            head_bias=None if decoder.head is None else self.floats(decoder.head.bias),
            embedding_columns=self.floats(decoder.embedding_columns),
            final_norm=self.norm(decoder.final_norm),
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

    def fill_layer(self, entry: CLayer, layer: DecoderLayer) -> None:
        """Describe one layer, its MLPs apart."""
        entry.before_attention = self.norm(layer.before_attention)
        entry.after_attention = self.norm(layer.after_attention)
        entry.before_mlp = self.norm(layer.before_mlp)
        entry.after_mlp = self.norm(layer.after_mlp)
        entry.query, entry.key = self.norm(layer.query), self.norm(layer.key)
        entry.qkv, entry.qkv_bias = self.weight(layer.qkv), self.floats(layer.qkv.bias)
        entry.out, entry.out_bias = self.weight(layer.out), self.floats(layer.out.bias)
        if layer.router is not None:
            # Scores decide which experts run: they keep full precision whatever the weights have.
            entry.router = self.weight(layer.router, Precision.F32)
            entry.num_experts, entry.num_chosen = len(layer.mlps), layer.num_chosen
            entry.renormalize = layer.renormalize
        entry.cos, entry.sin = self.floats(layer.cos), self.floats(layer.sin)
        entry.rotary_half = layer.cos.shape[1]
        entry.window = layer.call.window or 0
        entry.scale = layer.call.scaling
        entry.softcap = layer.call.softcap or 0.0

    def fill_mlp(self, entry: CMlp, up: Linear, down: Linear) -> None:
        """Describe one MLP."""
        entry.up, entry.up_bias = self.weight(up), self.floats(up.bias)
        entry.down, entry.down_bias = self.weight(down), self.floats(down.bias)

    def norm(self, norm: Norm) -> CNorm:
        """Describe a norm."""
        return CNorm(
            weight=self.floats(norm.weight),
            bias=self.floats(norm.bias),
            eps=norm.eps,
            offset=norm.offset,
            kind=norm.kind,
        )

    def weight(self, linear: Linear, precision: Precision | None = None) -> CWeight:
        """Pack and describe the rows of a linear."""
        kept_as = self.precision if precision is None else precision
        num_outputs, width = linear.shape()
        # Whole from the start: what lives on from each block would keep its neighbours' memory from being used again.
        scale, sums = torch.zeros(num_outputs), torch.zeros(num_outputs, dtype=torch.int32)

        def blocks() -> Iterator[torch.Tensor]:
            rows, first = max(16, _BLOCK_BYTES // (4 * width) // 16 * 16), 0
            for block in packed_blocks(linear.blocks(rows), kept_as, self.library):
                last = first + block.num_outputs
                if block.scale is not None and block.sums is not None:
                    scale[first:last], sums[first:last] = block.scale, block.sums
                yield block.data
                first = last

        num_bytes = packed_bytes(num_outputs, width, kept_as, self.library)
        described = CWeight(n=num_outputs, k=width, precision=kept_as)
        described.data = self.store.add(torch.uint8, (num_bytes,), blocks())
        if kept_as is Precision.I8:
            described.scale = self.store.add(torch.float32, (num_outputs,), [scale])
            described.sums = self.store.add(torch.int32, (num_outputs,), [sums])
        return described

    def floats(self, tensor: torch.Tensor | None) -> int | None:
        """The number of a tensor of floats."""
        if tensor is None:
            return None
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            raise InvariantError(f"a {tensor.dtype} tensor where the kernels read contiguous floats")
        if tensor.data_ptr() not in self.kept:
            number = self.store.add(torch.float32, tuple(tensor.shape), [tensor])
            self.kept[tensor.data_ptr()] = tensor, number
        return self.kept[tensor.data_ptr()][1]
