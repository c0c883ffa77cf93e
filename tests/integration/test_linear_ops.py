"""The linears as torch operators: what a compiler may assume of them, and that compiled code gives the same bits."""

from __future__ import annotations

import pytest
import torch

from common.errors import InvariantError
from inference_svc.kernels import ops
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import Library, kernels
from inference_svc.kernels.packed import PackedWeight
from inference_svc.kernels.quantized import int8_linear, quantize_rows


@pytest.fixture(scope="module")
def library() -> Library:
    found = kernels()
    if not isinstance(found, Library):
        pytest.skip(found)
    return found


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
def test_linear_is_an_operator(library: Library, precision: Precision) -> None:
    """Schema, fake tensors and tracing agree with what runs."""
    weight = PackedWeight.pack(numbers(20, 12), precision, library)
    parts = (weight.data, weight.scale, weight.sums, numbers(20, seed=1), 20, int(precision))
    for x in (numbers(5, 12), numbers(2, 3, 12).bfloat16()):
        torch.library.opcheck(torch.ops.kev.linear.default, (x, *parts))


def test_int8_linear_is_an_operator() -> None:
    """Schema, fake tensors and tracing agree with what runs."""
    weight, scale = quantize_rows(numbers(20, 12))
    for x in (numbers(5, 12), numbers(2, 3, 12).bfloat16()):
        torch.library.opcheck(torch.ops.kev.int8_linear.default, (x, weight, scale, numbers(20, seed=1)))


def test_both_operators_agree_in_int8(library: Library) -> None:
    """Any leading dimensions and dtype; the result has the dtype of the rows."""
    w, bias, x = numbers(40, 24), numbers(40, seed=1), numbers(2, 3, 24, seed=2).bfloat16()
    integers, scale = quantize_rows(w)
    native = ops.linear(x, PackedWeight.pack(w, Precision.I8, library), bias)
    plain = ops.int8_linear(x, integers, scale, bias)
    assert native.dtype is torch.bfloat16
    assert native.shape == (2, 3, 40)
    assert torch.equal(native, plain)
    rows = int8_linear(x.view(6, 24), integers, scale, bias)
    assert torch.equal(plain.view(6, 40), rows.bfloat16())


def test_a_whole_graph_calls_them(library: Library) -> None:
    """No graph break, for any number of rows, and the bits of the uncompiled function."""
    weight = PackedWeight.pack(numbers(16, 12), Precision.BF16, library)
    integers, scale = quantize_rows(numbers(8, 16))

    def block(x: torch.Tensor) -> torch.Tensor:
        return ops.int8_linear(torch.relu(ops.linear(x, weight)), integers, scale)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 3, 17):
        x = numbers(rows, 12, seed=rows)
        assert torch.equal(compiled(x), block(x))


def test_what_does_not_fit_is_refused(library: Library) -> None:
    """A wrong shape must not reach the native code."""
    weight = PackedWeight.pack(numbers(20, 12), Precision.F32, library)
    with pytest.raises(InvariantError, match="rows of width 40 do not fit"):
        ops.linear(numbers(2, 40), weight)
    with pytest.raises(InvariantError, match="a bias must be float32"):
        ops.linear(numbers(2, 12), weight, numbers(21))
