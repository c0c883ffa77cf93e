"""The check at load: every way of reading or packing a model wrong that is known of is found, in each precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from common.errors import UnsupportedModelError
from inference_svc.attention import Backend, cpu_attention, register
from inference_svc.decoder import Decoder, DecoderLayer, Linear, Mlp, Norm, read_decoder
from inference_svc.kernels.layout import Activation, Precision
from inference_svc.kernels.library import Library, kernels
from inference_svc.model_loader import LoadSettings, wrap_model
from inference_svc.native_check import ModelSize, NativeCheck, reference_of
from inference_svc.native_model import NativeModel
from inference_svc.source_model import geometry_of
from tests.integration.tiny_models import (
    ARCHITECTURES,
    MAX_CONTEXT,
    MIXTURES,
    NATIVE_FORMS,
    Form,
    form_id,
    fresh_module,
)

Misreading = Callable[[Decoder], Decoder]


@cache
def _read(name: str, form: Form) -> tuple[NativeCheck, Decoder]:
    """A model as it is read before it is packed, and what it is compared with."""
    module = fresh_module(name, form.dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.ndim == 1:  # else norms and biases would all be alike
            parameter += torch.empty(parameter.shape).normal_(std=0.2, generator=generator).to(parameter.dtype)
    register(Backend.CPU, cpu_attention)
    module.set_attn_implementation(Backend.CPU.attention_name)
    config = module.config
    geometry = geometry_of(config, form.dtype)
    size = ModelSize(geometry=geometry, kv_dtype=form.dtype, max_context=MAX_CONTEXT, vocab_size=config.vocab_size)
    reference = reference_of(module, size)
    decoder = read_decoder(module, reference.calls, MAX_CONTEXT)
    kept = tuple(replace(layer, release=lambda: None) for layer in decoder.layers)
    check = NativeCheck(reference=reference, size=size, library=_library(), num_threads=1)
    return check, replace(decoder, layers=kept)


def _library() -> Library:
    found = kernels()
    if not isinstance(found, Library):
        pytest.skip(found)
    return found


def _packed(decoder: Decoder, form: Form) -> NativeModel:
    precision = {"fp32": Precision.F32, "bf16": Precision.BF16, "int8": Precision.I8}[form.precision]
    kv_precision = Precision.F32 if form.precision == "fp32" else Precision.BF16
    return NativeModel.pack(decoder, precision, kv_precision, _library())


def _one_layer(change: Callable[[DecoderLayer], DecoderLayer], index: int = 1) -> Misreading:
    """Change one layer only: the others are read right."""

    def misread(decoder: Decoder) -> Decoder:
        layers = list(decoder.layers)
        layers[index] = change(layers[index])
        return replace(decoder, layers=tuple(layers))

    return misread


def _rows(linear: Linear, order: Callable[[torch.Tensor], torch.Tensor]) -> Linear:
    """The rows of a linear in another order."""
    parts = linear.parts
    return replace(linear, parts=lambda: [order(torch.cat([part.detach() for part in parts()]))])


def _mlp(change: Callable[[Linear], Linear]) -> Misreading:
    return _one_layer(lambda layer: replace(layer, mlps=tuple(Mlp(change(one.up), one.down) for one in layer.mlps)))


def _call(**changes: float | int | None) -> Misreading:
    return _one_layer(lambda layer: replace(layer, call=replace(layer.call, **changes)))  # type: ignore[arg-type]


def _norm(name: str, **changes: object) -> Misreading:
    def change(layer: DecoderLayer) -> DecoderLayer:
        norm: Norm = getattr(layer, name)
        return replace(layer, **{name: replace(norm, **changes)})  # type: ignore[arg-type]

    return _one_layer(change)


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows.chunk(2)[::-1])


def _interleaved(rows: torch.Tensor, size: int = 16) -> torch.Tensor:
    """Rows of every head as if pairs of neighbours turned together, instead of pairs of halves."""
    return rows.reshape(-1, 2, size // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _turned(factor: float) -> Misreading:
    """Angles of another scale."""

    def change(layer: DecoderLayer) -> DecoderLayer:
        angles = torch.atan2(layer.sin, layer.cos) * factor
        return replace(layer, cos=angles.cos(), sin=angles.sin())

    return _one_layer(change)


MISREADINGS: list[tuple[str, str, Misreading]] = [
    ("norm offset", "gemma3", _norm("before_attention", offset=0.0)),
    ("norm offset", "llama", _norm("before_mlp", offset=1.0)),
    ("head norm offset", "gemma3", _norm("key", offset=0.0)),
    ("norm epsilon", "gemma2", _norm("before_attention", eps=1e-2)),
    ("norm bias", "gpt_neox", _norm("before_attention", bias=None)),
    ("no norm after", "gemma2", _one_layer(lambda layer: replace(layer, after_mlp=Norm()))),
    ("no head norm", "qwen3", _one_layer(lambda layer: replace(layer, query=Norm()))),
    ("swapped gate", "llama", _mlp(lambda up: _rows(up, _swapped))),
    ("swapped gate", "phi3", _mlp(lambda up: _rows(up, _swapped))),
    ("swapped gate of experts", "mixtral", _mlp(lambda up: _rows(up, _swapped))),
    ("other experts", "qwen3_moe", _one_layer(lambda layer: replace(layer, mlps=layer.mlps[::-1]), index=2)),
    ("experts not weighed anew", "mixtral", _one_layer(lambda layer: replace(layer, renormalize=False))),
    ("one expert less", "mixtral", _one_layer(lambda layer: replace(layer, num_chosen=1))),
    ("rotary pairs", "llama", _one_layer(lambda layer: replace(layer, qkv=_rows(layer.qkv, _interleaved)))),
    ("rotary scale", "qwen2", _turned(0.5)),
    ("rotary of another layer", "gemma3", lambda decoder: replace(decoder, layers=_same_tables(decoder))),
    ("window too long", "mistral", _call(window=25)),
    ("window too short", "gemma3", _call(window=23)),
    ("no window", "gemma2", _one_layer(lambda layer: replace(layer, call=replace(layer.call, window=None)), index=0)),
    ("a window", "llama", _call(window=200)),
    ("scale", "gemma3", _call(scaling=0.2501)),
    ("no cap of scores", "gemma2", _call(softcap=None)),
    ("another cap of scores", "gemma2", _call(softcap=5.1)),
    ("no bias", "qwen2", _one_layer(lambda layer: replace(layer, qkv=replace(layer.qkv, bias=None)))),
    ("another function", "gemma3", lambda decoder: replace(decoder, activation=Activation.GELU)),
    ("residuals in turn", "gpt_neox", lambda decoder: replace(decoder, parallel_residual=False)),
    ("layers in another order", "llama", lambda decoder: replace(decoder, layers=decoder.layers[::-1])),
    ("no cap of logits", "gemma2", lambda decoder: replace(decoder, final_softcap=0.0)),
    ("another last norm", "gemma3", lambda decoder: replace(decoder, final_norm=decoder.layers[0].before_attention)),
    ("shifted head", "qwen3", lambda decoder: replace(decoder, head=_rows(_head(decoder), lambda w: w.roll(1, 0)))),
    ("unscaled embedding", "gemma3", lambda decoder: replace(decoder, embedding_scale=1.0)),
]


def _same_tables(decoder: Decoder) -> tuple[DecoderLayer, ...]:
    first = decoder.layers[0]
    return tuple(replace(layer, cos=first.cos, sin=first.sin) for layer in decoder.layers)


def _head(decoder: Decoder) -> Linear:
    return decoder.head or decoder.embedding


@pytest.mark.parametrize("case", MISREADINGS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_what_was_read_wrong_is_found(case: tuple[str, str, Misreading]) -> None:
    """Whatever rounding the precision allows: bfloat16 here."""
    _, name, misread = case
    check, decoder = _read(name, NATIVE_FORMS[1])
    wrong = misread(decoder)
    with pytest.raises(UnsupportedModelError, match="as transformers does"):
        check.check_reading(wrong)
        check.check_packed(_packed(wrong, NATIVE_FORMS[1]), "bf16")


@pytest.mark.parametrize("form", NATIVE_FORMS, ids=form_id)
@pytest.mark.parametrize("part", ["qkv", "out", "down", "embedding"])
def test_what_was_packed_wrong_is_found(part: str, form: Form) -> None:
    """A part of the packed weights belongs elsewhere: only the second layer, or the embedding, is wrong."""
    check, decoder = _read("llama", form)
    made = _packed(decoder, form)
    check.check_packed(made, form.precision)
    if part == "embedding":
        made.model.embedding = made.model.head
    elif part == "down":
        made.mlps[1].down = made.mlps[0].down
    else:
        setattr(made.layers[1], part, getattr(made.layers[0], part))
    with pytest.raises(UnsupportedModelError, match="the embedding" if part == "embedding" else "layer 1"):
        check.check_packed(made, form.precision)


@pytest.mark.parametrize("form", NATIVE_FORMS, ids=form_id)
@pytest.mark.parametrize("name", (*ARCHITECTURES, *MIXTURES))
def test_what_is_right_passes(name: str, form: Form) -> None:
    """With norms and biases of all kinds."""
    check, decoder = _read(name, form)
    check.check_reading(decoder)
    check.check_packed(_packed(decoder, form), form.precision)


def test_channels_may_be_shorter_than_the_prompt() -> None:
    """Nine positions in all."""
    settings = LoadSettings(precision="int8", max_context=9, backend=Backend.NATIVE)
    wrap_model(fresh_module("gemma2", torch.bfloat16), settings, fingerprint="tiny")
