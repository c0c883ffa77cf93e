"""The native functions of each row alone: near the exact ones, and the same bits wherever a row lies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inference_svc.kernels.layout import Activation, Precision
from inference_svc.kernels.library import VARIANTS
from tests.integration.kernel_calls import Floats, variant

WIDTHS = (1, 3, 4, 7, 8, 9, 15, 16, 17, 63, 64, 65, 80, 640, 641)
ROWS = 5
EPS = 1e-6

Doubles = npt.NDArray[np.float64]


@pytest.fixture(scope="module", params=VARIANTS)
def calls(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    with variant(request.param) as found:
        yield found


def numbers(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def address(x: npt.NDArray[np.generic]) -> int:
    return x.ctypes.data


def ulps(found: Floats, exact: Doubles) -> Doubles:
    """Distances in units of the last place of the exact value as a float."""
    nearest = exact.astype(np.float32)
    spacing = np.spacing(np.maximum(np.abs(nearest), np.finfo(np.float32).tiny)).astype(np.float64)
    return np.abs(found.astype(np.float64) - exact) / spacing


def sweep() -> Floats:
    """Numbers of every size a float has, both signs, and densely those that matter."""
    sizes = np.logspace(-38, 38, 4001, dtype=np.float64).astype(np.float32)
    dense = np.linspace(-20, 20, 40001, dtype=np.float32)
    return np.concatenate([sizes, -sizes, dense, np.float32([0.0, -0.0, 87.5, -87.5, 88.9, -103.0, -104.5])])


def in_rows(width: int, run: Callable[[int, int, int, int, int, int], int], x: Floats) -> Floats:
    """What `run(x, ldx, out, ldo, first, last)` makes of rows `x` between others; nothing else may be written."""
    ldx, ldo = width + 3, width + 2
    source = np.full((ROWS + 2, ldx), np.nan, np.float32)
    source[1:-1, :width] = x
    out = np.full((ROWS + 2, ldo), 7.0, np.float32)
    assert run(address(source), ldx, address(out), ldo, 1, ROWS + 1) == 0
    assert (out[0] == 7.0).all()
    assert (out[-1] == 7.0).all()
    assert (out[:, width:] == 7.0).all()
    for row in range(1, ROWS + 1):  # each row alone, in place, at an address of its own
        place = np.full(width + row, 7.0, np.float32)
        place[row:] = x[row - 1]
        at = place[row:]
        assert run(address(at), width, address(at), width, 0, 1) == 0
        assert at.tobytes() == out[row, :width].tobytes()
        assert (place[:row] == 7.0).all()
    return out[1:-1, :width]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_near_the_exact_one(calls: ctypes.CDLL, width: int) -> None:
    x, weight = numbers(ROWS, width), numbers(width, seed=1)
    for offset in (0.0, 1.0):
        out = in_rows(
            width,
            lambda x, ldx, out, ldo, first, last, offset=offset: calls.kev_rms_norm(
                x, ldx, address(weight), offset, EPS, width, out, ldo, first, last
            ),
            x,
        )
        wide = x.astype(np.float64)
        exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * (weight.astype(np.float64) + offset)
        np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_is_near_the_exact_one(calls: ctypes.CDLL, width: int) -> None:
    x, weight, bias = numbers(ROWS, width) + np.float32(3.0), numbers(width, seed=1), numbers(width, seed=2)
    for used in (bias, None):
        out = in_rows(
            width,
            lambda x, ldx, out, ldo, first, last, used=used: calls.kev_layer_norm(
                x, ldx, address(weight), None if used is None else address(used), EPS, width, out, ldo, first, last
            ),
            x,
        )
        wide = x.astype(np.float64)
        centred = wide - wide.mean(axis=1, keepdims=True)
        exact = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPS) * weight
        np.testing.assert_allclose(out, exact + (0 if used is None else bias), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("half", [0, 1, 4, 7, 8, 16, 17, 40])
def test_rotation_equals_the_formula_bit_for_bit(calls: ctypes.CDLL, half: int) -> None:
    num_heads, head_size, num_positions = 3, 2 * half + 5, 11
    cos, sin = numbers(num_positions, half, seed=1), numbers(num_positions, half, seed=2)
    positions = np.array([9, 0, 3, 10, 3, 1, 2])
    x = numbers(ROWS + 2, num_heads, head_size)
    out = x.copy()
    ld = num_heads * head_size
    tables = (address(cos), address(sin), address(positions))
    assert calls.kev_rotate(address(out), ld, num_heads, head_size, half, *tables, 1, ROWS + 1) == 0
    expected = x.copy()
    c, s = cos[positions][1:-1, None], sin[positions][1:-1, None]
    left, right = x[1:-1, :, :half], x[1:-1, :, half : 2 * half]
    expected[1:-1, :, :half] = left * c - right * s
    expected[1:-1, :, half : 2 * half] = right * c + left * s
    assert out.tobytes() == expected.tobytes()


def exact_activation(kind: Activation, x: Floats) -> Doubles:
    wide = torch.from_numpy(x).double()
    match kind:
        case Activation.SILU:
            y = torch.nn.functional.silu(wide)
        case Activation.GELU_TANH:
            u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
            y = wide * torch.sigmoid(2 * u)  # (1 + tanh(u)) / 2, without the cancellation
        case Activation.GELU:
            y = torch.nn.functional.gelu(wide)
        case Activation.RELU:
            y = wide.clamp(min=0)
    return y.numpy()


@pytest.mark.parametrize("kind", Activation)
def test_activations_are_near_the_exact_ones(calls: ctypes.CDLL, kind: Activation) -> None:
    """In the left tails of GELU, where a rounded argument is most of the error, what counts is the error against x."""
    x = sweep()
    out = np.empty_like(x)
    assert calls.kev_activate(kind, address(x), x.size, None, 0, x.size, address(out), x.size, 0, 1) == 0
    exact = exact_activation(kind, x)
    error = ulps(out, exact)
    tail = x < (-1.0 if kind in (Activation.GELU, Activation.GELU_TANH) else -85.0)
    assert error[~tail].max() < 5
    assert (np.abs(out.astype(np.float64) - exact)[tail] <= np.abs(x[tail]) * 1.2e-7).all()


def test_activations_at_the_borders(calls: ctypes.CDLL) -> None:
    x = np.float32([np.nan, np.inf, 0.0, -0.0, -1e30])
    for kind in Activation:
        out = np.empty_like(x)
        assert calls.kev_activate(kind, address(x), 5, None, 0, 5, address(out), 5, 0, 1) == 0
        assert np.isnan(out[0])
        assert out[1] == np.inf
        assert (out[2:] == 0.0).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activation_is_the_activation_times_up(calls: ctypes.CDLL, width: int) -> None:
    x, up = numbers(ROWS, width), numbers(1, width, seed=1)
    for kind in Activation:

        def run(x: int, ldx: int, out: int, ldo: int, first: int, last: int, kind: Activation = kind) -> int:
            return int(calls.kev_activate(kind, x, ldx, None, 0, width, out, ldo, first, last))

        plain = in_rows(width, run, x)
        gated = np.empty((1, width), np.float32)
        gate = x[2:3].copy()
        assert (
            calls.kev_activate(kind, address(gate), width, address(up), width, width, address(gated), width, 0, 1) == 0
        )
        assert gated.tobytes() == (plain[2:3] * up).tobytes()


def test_softcap_is_near_the_exact_one(calls: ctypes.CDLL) -> None:
    x = sweep()
    out = x.copy()
    assert calls.kev_soften(address(out), out.size, 1.0) == 0
    assert ulps(out, np.tanh(x.astype(np.float64))).max() < 3
    for cap in (30.0, 50.0):
        x = x[(np.abs(x) > 1e-35) | (x == 0)]  # below, x / cap is subnormal
        out = x.copy()
        assert calls.kev_soften(address(out), out.size, cap) == 0
        assert ulps(out, cap * np.tanh(x.astype(np.float64) / cap)).max() < 5
    ends = np.float32([np.nan, np.inf, -np.inf])
    assert calls.kev_soften(address(ends), 3, 2.0) == 0
    np.testing.assert_array_equal(ends, np.float32([np.nan, 2.0, -2.0]))


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_those_of_single_numbers(calls: ctypes.CDLL, width: int) -> None:
    x, out = numbers(ROWS, width), numbers(ROWS, width, seed=1)
    expected = out.copy()
    expected[1:4] += x[1:4]
    assert calls.kev_add(address(x), width, width, address(out), width, 1, 4) == 0
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("kind", [Precision.F32, Precision.BF16])
def test_storing_and_loading_write_what_was_asked_for(calls: ctypes.CDLL, kind: Precision, count: int) -> None:
    x = numbers(count + 1)
    stored = np.full(count + 4, 7, np.uint32 if kind is Precision.F32 else np.uint16)
    assert calls.kev_store(address(x), count, kind, address(stored)) == 0
    assert (stored[count:] == 7).all()
    dtype = torch.float32 if kind is Precision.F32 else torch.bfloat16
    expected = torch.from_numpy(x[:count]).to(dtype)
    assert stored[:count].tobytes() == bytes(expected.view(torch.uint8).numpy())
    loaded = np.full(count + 4, 7.0, np.float32)
    assert calls.kev_load(address(stored), count, kind, address(loaded)) == 0
    assert (loaded[count:] == 7.0).all()
    assert loaded[:count].tobytes() == expected.float().numpy().tobytes()


def test_every_bfloat16_is_loaded_and_every_border_rounded(calls: ctypes.CDLL) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    loaded = np.empty(every.size, np.float32)
    assert calls.kev_load(address(every), every.size, Precision.BF16, address(loaded)) == 0
    assert (loaded.view(np.uint32) == every.astype(np.uint32) << 16).all()
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (every.astype(np.uint32) << 16 | low).view(np.float32)
        stored = np.empty(every.size, np.uint16)
        assert calls.kev_store(address(x), x.size, Precision.BF16, address(stored)) == 0
        expected = torch.from_numpy(x).bfloat16()
        nan = np.isnan(x)
        assert (stored[~nan] == expected.view(torch.int16).numpy().view(np.uint16)[~nan]).all()
        assert np.isnan((stored[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_a_call_that_makes_no_sense_is_refused(calls: ctypes.CDLL) -> None:
    x = np.zeros(8, np.float32)
    at = address(x)
    assert calls.kev_rms_norm(at, 3, at, 0.0, EPS, 4, at, 4, 0, 1) != 0
    assert calls.kev_layer_norm(at, 4, None, None, EPS, 4, at, 4, 0, 1) != 0
    assert calls.kev_rotate(at, 4, 1, 4, 3, at, at, at, 0, 1) != 0
    assert calls.kev_activate(9, at, 4, None, 0, 4, at, 4, 0, 1) != 0
    assert calls.kev_add(at, 4, -1, at, 4, 0, 1) != 0
    assert calls.kev_soften(None, 4, 1.0) != 0
    assert calls.kev_store(at, 4, Precision.I8, at) != 0
    assert calls.kev_load(at, 4, Precision.I8, at) != 0
    assert not x.any()
