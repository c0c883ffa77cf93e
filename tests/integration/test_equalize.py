"""Equalization changes nothing but what int8 rounds away: exact scales, the same model, less error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from inference_svc.attention import Backend, cpu_attention, register
from inference_svc.calibration import calibrate
from inference_svc.decoder import read_decoder
from inference_svc.equalize import InputMoments, column_scales, equalized
from inference_svc.int8_linear import Int8Linear
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import Library, kernels
from inference_svc.kernels.quantized import quantize_rows
from inference_svc.kv_cache import KVCache
from inference_svc.native_check import ModelSize, layer_calls
from inference_svc.native_forward import NativeForward
from inference_svc.native_model import NativeModel
from inference_svc.plan import ForwardShapes
from inference_svc.probe import run_logits
from inference_svc.source_model import geometry_of
from tests.integration.crowd import prompt
from tests.integration.tiny_models import ARCHITECTURES, CONFIGS, MAX_CONTEXT, MIXTURES, VOCAB, fresh_module

SHAPES = ForwardShapes.of(4, prefill_rows=32, segment_tokens=16, ragged=True)
PROMPTS = [prompt(n, seed=n) for n in (3, 20, 41)]


def _logits(name: str, *, equalize: bool, precision: Precision = Precision.F32) -> list[torch.Tensor]:
    """First logits of the prompts, by the native kernels."""
    library = kernels()
    if not isinstance(library, Library):
        pytest.skip(library)
    register(Backend.CPU, cpu_attention)
    module = fresh_module(name, torch.float32)
    module.set_attn_implementation(Backend.CPU.attention_name)
    config = CONFIGS[name]()
    geometry = geometry_of(config, torch.float32)
    size = ModelSize(geometry=geometry, kv_dtype=torch.float32, max_context=MAX_CONTEXT, vocab_size=VOCAB)
    decoder = read_decoder(module, layer_calls(module, size), MAX_CONTEXT)
    if equalize:
        decoder = equalized(decoder, calibrate(module, max_context=MAX_CONTEXT))
    native = NativeModel.pack(decoder, precision, Precision.F32, library)
    cache = KVCache(geometry, 512, torch.float32, torch.device("cpu"))
    bench = size.bench(NativeForward(library, native, cache, SHAPES, 1), cache, SHAPES)
    return [steps[0].clone() for steps in run_logits(bench, PROMPTS)]


@pytest.mark.parametrize("name", (*ARCHITECTURES, *MIXTURES))
def test_the_scaled_model_is_the_same_model(name: str) -> None:
    """In fp32 a wrong pair of scales would show as a gap of the logits' own size; rounding gives 1e-5."""
    plain, scaled = _logits(name, equalize=False), _logits(name, equalize=True)
    for one, other in zip(plain, scaled, strict=True):
        assert not torch.equal(one, torch.zeros_like(one))
        torch.testing.assert_close(other, one, atol=1e-4 * float(one.abs().max()), rtol=0)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=40), st.integers(0, 1_000))
def test_scales_are_powers_of_two(moments: list[float], seed: int) -> None:
    """So that multiplying weights and dividing inputs loses no bit; their product stays near 1."""
    energies = torch.rand(len(moments), generator=torch.Generator().manual_seed(seed)).double() + 1e-3
    scales = column_scales(torch.tensor(moments, dtype=torch.float64), energies)
    mantissas, _ = torch.frexp(scales)
    assert torch.equal(mantissas, torch.full_like(scales, 0.5))
    assert float(scales.max()) <= 4096 and float(scales.min()) >= 1 / 4096


def test_a_column_without_inputs_or_weights_keeps_its_scale() -> None:
    """Nothing is divided by zero, infinity or NaN."""
    moments = torch.tensor([0.0, 1.0, float("inf"), float("nan"), 16.0**4], dtype=torch.float64)
    energies = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert column_scales(moments, energies).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert column_scales(torch.tensor([1.0, 2.0**16]).double(), torch.ones(2).double()).tolist() == [0.5, 2.0]


def test_outliers_of_an_input_cost_less() -> None:
    """One column 200 times larger than the others: equalized, the error of an int8 linear is a fraction."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 48, generator=generator)
    inputs[:, 5] *= 200
    linear = nn.Linear(48, 32, bias=False).requires_grad_(False)
    linear.weight.data = torch.randn(32, 48, generator=generator)
    linear.weight.data[:, 5] /= 50
    moments = InputMoments()
    with torch.inference_mode(), moments.watching(linear):
        expected = linear(inputs)
    seen = moments.of(linear)
    assert seen is not None
    scales = column_scales(seen, linear.weight.double().pow(2).sum(0))
    errors = [
        float((Int8Linear(linear, divisor)(inputs) - expected).pow(2).mean()) for divisor in (torch.ones(48), scales)
    ]
    assert errors[1] < errors[0] / 20


def test_int8_columns_are_scaled_before_they_are_rounded() -> None:
    """The weights of the two int8 paths are the same integers for the same scales."""
    linear = nn.Linear(16, 8, bias=False).requires_grad_(False)
    divisor = torch.exp2(torch.arange(16) % 5 - 2.0)
    integers, scale = quantize_rows(linear.weight.detach() * divisor)
    made = Int8Linear(linear, divisor)
    assert torch.equal(made.weight, integers) and torch.equal(made.scale, scale)
