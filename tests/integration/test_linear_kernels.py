"""The native linears: near the exact sums, and the same bits wherever a row lies, beside whatever, on any threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import VARIANTS, Library, Pool, kernels
from inference_svc.kernels.packed import PackedWeight
from inference_svc.kernels.quantized import int8_linear, quantize_rows
from tests.integration.kernel_calls import variant

SIZES = (1, 15, 16, 17, 31, 64, 100)
ROW_COUNTS = (*range(1, 27), 48, 64, 97, 192, 300)
THREADS = (1, 2, 3)
EVERY_PRECISION = pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One variant, and pools of one, two and three threads."""

    library: Library
    pools: dict[int, Pool]

    def packed(self, weight: torch.Tensor, precision: Precision) -> PackedWeight:
        return PackedWeight.pack(weight, precision, self.library)

    def linear(
        self, weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None, threads: int = 1
    ) -> torch.Tensor:
        """The result for rows ``x``, which lie apart with NaN between them; nothing else may be written."""
        rows, (n, k) = x.shape[0], (weight.num_outputs, weight.width)
        apart = torch.full((rows, k + 3), torch.nan)
        apart[:, :k] = x
        made = torch.full((rows, n + 2), 7.0)
        scratch = self.scratch(weight, rows)
        status = self.library.calls.kev_linear(
            self.pools[threads].address,
            ctypes.byref(weight.described()),
            apart.data_ptr(),
            rows,
            k + 3,
            None if bias is None else bias.data_ptr(),
            made.data_ptr(),
            n + 2,
            scratch.data_ptr(),
        )
        self.library.check(status)
        assert (made[:, n:] == 7.0).all()
        return made[:, :n].clone()

    def argmax(
        self, weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None, softcap: float, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, value = torch.full((x.shape[0],), -1), torch.zeros(x.shape[0])
        scratch = self.scratch(weight, x.shape[0])
        status = self.library.calls.kev_linear_argmax(
            self.pools[threads].address,
            ctypes.byref(weight.described()),
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            None if bias is None else bias.data_ptr(),
            softcap,
            index.data_ptr(),
            value.data_ptr(),
            scratch.data_ptr(),
        )
        self.library.check(status)
        return index, value

    def scratch(self, weight: PackedWeight, rows: int) -> torch.Tensor:
        num_bytes = self.library.calls.kev_linear_scratch_bytes(weight.precision, rows, weight.width)
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN in every float format


@pytest.fixture(scope="module", params=VARIANTS)
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with variant(request.param):
        library = kernels()
        assert isinstance(library, Library)
        pools = {count: Pool(library, count) for count in THREADS}
        yield Kernels(library, pools)
        for pool in pools.values():
            pool.close()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN to NaN, and zeros of one sign."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(torch.int32)[~nan], b.view(torch.int32)[~nan])


# --- what is computed ---


@EVERY_PRECISION
def test_sums_are_near_the_exact_ones(native: Kernels, precision: Precision) -> None:
    """Within k + 2 roundings of float32 of the sum over the rounded factors; for odd shapes, with bias."""
    for n in SIZES:
        for k in SIZES:
            weight = native.packed(numbers(n, k, seed=n), precision)
            x, bias = numbers(5, k, seed=k), numbers(n, seed=3)
            if precision is Precision.I8:
                integers, scale = quantize_rows(x)
                used = spread_back(integers) * scale.double()[:, None]
            else:
                used = (x.bfloat16() if precision is Precision.BF16 else x).double()
            factors = weight.rows(0, n).double().T
            exact = used @ factors + bias
            size = used.abs() @ factors.abs() + bias.abs()
            error = (native.linear(weight, x, bias).double() - exact).abs()
            assert (error <= (k + 2) * 2.0**-24 * size).all(), (n, k)


def spread(x: Floats) -> Floats:
    """The definition of ``spread.h`` in numpy."""
    made = x * np.float32(8)
    for first in range(0, x.shape[1] // 64 * 64, 64):
        block = x[:, first : first + 64].copy()
        for stride in (32, 16, 8, 4, 2, 1):
            partner = block[:, np.arange(64) ^ stride]
            block = np.where(np.arange(64) & stride, partner - block, block + partner)
        made[:, first : first + 64] = block
    return made


def spread_back(integers: torch.Tensor) -> torch.Tensor:
    """What spread and quantized rows stand for, over their scales: float64, exact."""
    made = integers.double()
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    for first in range(0, made.shape[1] // 64 * 64, 64):
        made[:, first : first + 64] = made[:, first : first + 64] @ torch.tensor(signs, dtype=torch.float64) / 8
    return made


def reference_quantized(x: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """The definition of ``kernels.h`` in numpy, for rows of finite numbers."""
    x = spread(x)
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(largest > 0, np.float32(127) / largest, 0).astype(np.float32)
    return np.rint(x * factor).astype(np.int64), (largest / np.float32(127) / np.float32(8))[:, 0]


def test_int8_is_exact(native: Kernels) -> None:
    """Integers as in 64 bits, results as in three float32 steps: not one bit of difference."""
    for n, k in ((1, 1), (17, 31), (33, 64), (100, 1000), (48, 4160), (20, 8300)):
        w, x, bias = numbers(n, k, seed=n), numbers(9, k, seed=k) * 3, numbers(n, seed=3)
        w[0] = 0
        weights, weight_scale = reference_quantized(w.numpy())
        rows, row_scale = reference_quantized(x.numpy())
        integers = (rows @ weights.T).astype(np.float32)
        expected = integers * (row_scale[:, None] * weight_scale[None, :]) + bias.numpy()
        weight = native.packed(w, Precision.I8)
        assert weight.sums is not None
        assert np.array_equal(weight.sums.numpy(), weights.sum(axis=1))
        assert same_bits(native.linear(weight, x, bias), torch.from_numpy(expected))


def test_int8_rounds_halves_to_even(native: Kernels) -> None:
    """Rows whose largest number is 127 have the scale 1, so that halves are met exactly; short rows are not spread."""
    for halves in torch.arange(-127, 127.5, 0.5).split(62):
        halves = torch.cat([halves, torch.tensor([127.0])])
        weight = native.packed(torch.stack([halves, halves.flip(0)]), Precision.I8)
        assert torch.equal(weight.rows(0, 1)[0], halves.round())
        unit = native.packed(torch.eye(len(halves)), Precision.I8)
        assert unit.scale is not None
        assert torch.equal(native.linear(unit, halves[None])[0], (halves.round() * 127) * unit.scale)


def test_int8_sums_reach_the_ends_of_int32(native: Kernels) -> None:
    """The widest row, every product 127 * 127 or its negative: one number in each block becomes 64 equal ones."""
    k = 1 << 17
    w = torch.zeros(17, k)
    w[:, ::64] = 1
    w[1] *= -1
    made = native.linear(native.packed(w, Precision.I8), w[:1].expand(2, k).contiguous())
    expected = np.float32(127 * 127 * k) * (np.float32(1 / np.float32(127) / np.float32(8)) ** 2)
    assert made[0].tolist() == [expected, -expected, *[expected] * 15]
    with pytest.raises(InvariantError, match="cannot be packed"):
        PackedWeight.empty(16, k + 1, Precision.I8, native.library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY_PRECISION
def test_packed_rows_are_the_rounded_weights(native: Kernels, precision: Precision, dtype: torch.dtype) -> None:
    """What was packed comes back, rounded once."""
    w = numbers(37, 93).to(dtype)
    rows = native.packed(w, precision).rows(3, 37)
    if precision is Precision.I8:
        integers, scale = quantize_rows(w)
        assert torch.equal(rows, (spread_back(integers) * scale[:, None]).float()[3:])
    else:
        assert same_bits(rows, (w.bfloat16().float() if precision is Precision.BF16 else w.float())[3:])


@EVERY_PRECISION
def test_packing_in_pieces_and_from_strides_changes_no_byte(native: Kernels, precision: Precision) -> None:
    """A load that streams gives the weight that a load at once gives."""
    w = numbers(100, 35)
    at_once = native.packed(w, precision)
    pieces = PackedWeight.empty(100, 35, precision, native.library)
    wide = torch.full((100, 50), torch.nan)
    wide[:, :35] = w
    for first, last in ((64, 100), (0, 16), (16, 64)):
        pieces.fill(first, wide[first:last, :35], native.pools[3])
    by_columns = native.packed(w.T.contiguous().T, precision)
    for other in (pieces, by_columns):
        for part in ("data", "scale", "sums"):
            a, b = getattr(at_once, part), getattr(other, part)
            assert (a is None and b is None) or torch.equal(a, b)


def test_every_variant_packs_alike() -> None:
    """Packed bytes do not depend on the instruction set; a change of it must not need another load."""
    made = []
    for name in VARIANTS:
        with variant(name):
            library = kernels()
            assert isinstance(library, Library)
            made.append([PackedWeight.pack(numbers(33, 150), precision, library).data for precision in Precision])
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


def test_an_outlier_does_not_cost_its_neighbours(native: Kernels) -> None:
    """One column 100 times larger than the others: rounded where they stand, the others would lose 5 bits more."""
    w, x = numbers(64, 640), numbers(32, 640, seed=1)
    x[:, 77] *= 100
    w[:, 77] /= 100
    exact = x.double() @ w.double().T
    error = (native.linear(native.packed(w, Precision.I8), x).double() - exact).pow(2).mean().sqrt()
    assert error < 0.1 * exact.pow(2).mean().sqrt()


# --- isolation ---


@pytest.mark.parametrize("shape", [(40, 33), (16, 640), (700, 100)], ids=str)
@EVERY_PRECISION
def test_row_count_and_threads_change_no_bit(native: Kernels, precision: Precision, shape: tuple[int, int]) -> None:
    """Each of 1 to 300 rows equals itself alone, on one to three threads."""
    n, k = shape
    weight, x = native.packed(numbers(n, k), precision), numbers(max(ROW_COUNTS), k, seed=1)
    alone = torch.cat([native.linear(weight, row[None]) for row in x])
    for count in ROW_COUNTS:
        for threads in THREADS:
            first = (count * 7) % (len(x) - count + 1)
            assert same_bits(native.linear(weight, x[first : first + count], None, threads), alone[first:][:count])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_neighbours_change_no_bit(native: Kernels, data: st.DataObject) -> None:
    """A row's results are its own: any shape, any place, neighbours of NaN, infinity and the largest numbers."""
    precision = data.draw(st.sampled_from(list(Precision)))
    n, k, rows = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200)), data.draw(st.integers(1, 70))
    place, threads = data.draw(st.integers(0, rows - 1)), data.draw(st.sampled_from(THREADS))
    filler = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38, 1e-44, 0.0, -1.0]))
    weight = native.packed(numbers(n, k, seed=n), precision)
    target, bias = numbers(1, k, seed=k), numbers(n, seed=2)
    x = torch.full((rows, k), filler)
    x[place] = target
    made = native.linear(weight, x, bias, threads)
    assert same_bits(made[place], native.linear(weight, target, bias)[0])


@EVERY_PRECISION
def test_strange_rows_keep_to_themselves(native: Kernels, precision: Precision) -> None:
    """NaN and infinity give NaN or infinity in their own row only; rows of zeros and of tiny numbers give the bias."""
    n, k = 50, 70
    weight, bias, x = native.packed(numbers(n, k), precision), numbers(n, seed=2), numbers(9, k, seed=1)
    plain = native.linear(weight, x, bias)
    x[1, 3], x[3, 69], x[5, 0] = torch.nan, torch.inf, -torch.inf
    x[6], x[7] = 0.0, 1e-44
    made = native.linear(weight, x, bias)
    assert not made[[1, 3, 5]].isfinite().any()
    assert precision is not Precision.I8 or made[[1, 3, 5]].isnan().all()
    assert same_bits(made[[0, 2, 4, 8]], plain[[0, 2, 4, 8]])
    assert torch.equal(made[6], bias)
    torch.testing.assert_close(made[7], bias, atol=1e-40, rtol=0)


@EVERY_PRECISION
def test_the_callers_float_settings_change_no_bit(native: Kernels, precision: Precision) -> None:
    """A caller that flushes subnormal numbers gets the bits of the pool's threads, which do not."""
    x, weight = numbers(40, 64) * 1e-38, native.packed(numbers(300, 64, seed=1) * 1e-2, precision)
    before = native.linear(weight, x, None, 3)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers")
    try:
        assert all(same_bits(native.linear(weight, x, None, threads), before) for threads in THREADS)
    finally:
        torch.set_flush_denormal(False)


# --- the largest output ---


def searched(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: the first NaN, else the first of the largest."""
    index = torch.tensor([int(row.isnan().float().argmax() if row.isnan().any() else row.argmax()) for row in y])
    return index, y[torch.arange(len(y)), index]


@pytest.mark.parametrize("n", [1, 15, 64, 65, 1000, 20_000])
@pytest.mark.parametrize("softcap", [0.0, 1.5, 30.0])
@EVERY_PRECISION
def test_argmax_is_linear_and_a_search(native: Kernels, precision: Precision, softcap: float, n: int) -> None:
    """Also with NaN rows, with a cap that makes ties, and with every output minus infinity."""
    weight, x, bias = native.packed(numbers(n, 24), precision), numbers(31, 24, seed=1), numbers(n, seed=2)
    x[4, 5], x[9] = torch.nan, 0.0
    y = native.linear(weight, x, bias)
    if softcap:
        native.library.calls.kev_soften(y.data_ptr(), y.numel(), softcap)
    for threads in THREADS:
        index, value = native.argmax(weight, x, bias, softcap, threads)
        expected_index, expected_value = searched(y)
        assert torch.equal(index, expected_index)
        assert same_bits(value, expected_value)
    index, value = native.argmax(weight, x[:3], torch.full((n,), -torch.inf), 0.0, 2)
    assert index.tolist() == [0, 0, 0]
    assert value.tolist() == [-torch.inf] * 3


def test_ties_go_to_the_lowest_index(native: Kernels) -> None:
    """Equal outputs far apart, in different chunks, and a NaN behind a larger number."""
    w = torch.zeros(20_000, 8)
    w[[700, 5_000, 19_999]] = 1.0
    weight = native.packed(w, Precision.F32)
    for threads in THREADS:
        index, _ = native.argmax(weight, torch.ones(2, 8), None, 0.0, threads)
        assert index.tolist() == [700, 700]
    bias = torch.zeros(20_000)
    bias[[18_000, 9_000]] = torch.nan
    index, value = native.argmax(weight, torch.ones(1, 8), bias, 0.0, 3)
    assert index.tolist() == [9_000]
    assert value.isnan().all()


# --- the fall-back ---


def test_torch_gives_the_native_bits_in_int8(native: Kernels) -> None:
    """A machine without the kernels answers with the same numbers in int8."""
    for n, k, rows in ((1, 1, 1), (17, 31, 5), (64, 640, 8), (100, 1000, 40), (33, 8300, 3)):
        w, x, bias = numbers(n, k, seed=n), numbers(rows, k, seed=k) * 5, numbers(n, seed=3)
        w[n // 2], x[rows // 2] = 0.0, 1e-35
        if rows > 2:
            x[1, k // 2], x[2, 0] = torch.nan, torch.inf
        integers, scale = quantize_rows(w)
        weight = native.packed(w, Precision.I8)
        assert weight.scale is not None
        assert same_bits(weight.scale, scale)
        assert same_bits(int8_linear(x, integers, scale, bias), native.linear(weight, x, bias))


# --- what is refused ---


def test_impossible_calls_are_refused_and_do_nothing(native: Kernels) -> None:
    """Each wrong argument has its own status, and the outputs stay untouched."""
    calls, weight = native.library.calls, native.packed(numbers(20, 10), Precision.I8)
    x, y, scratch = torch.zeros(4, 10), torch.full((4, 20), 7.0), native.scratch(weight, 4)
    good = [None, weight.described(), x.data_ptr(), 4, 10, None, y.data_ptr(), 20, scratch.data_ptr()]

    def status(place: int, value: object) -> str:
        changed = [*good]
        changed[place] = value
        changed[1] = ctypes.byref(changed[1]) if changed[1] is not None else None  # type: ignore[arg-type]
        return str(calls.kev_status_text(calls.kev_linear(*changed)).decode())

    def described(**fields: int | None) -> object:
        made = weight.described()
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    assert "missing" in status(1, None)
    assert "missing" in status(2, None)
    assert "missing" in status(6, None)
    assert "missing" in status(8, None)
    assert "missing" in status(1, described(data=None))
    assert "missing" in status(1, described(sums=None))
    assert "precision" in status(1, described(precision=3))
    assert "dimension" in status(1, described(n=-1))
    assert "dimension" in status(1, described(k=(1 << 17) + 1))
    assert "dimension" in status(3, -1)
    assert "longer" in status(4, 9)
    assert "longer" in status(7, 19)
    assert "64" in status(8, scratch.data_ptr() + 4)
    assert "64" in status(1, described(data=weight.data.data_ptr() + 16))
    assert (y == 7.0).all()
    assert status(3, 0) == "done"
    assert (y == 7.0).all()
    assert calls.kev_packed_bytes(7, 1, 1) == -1
    assert calls.kev_packed_bytes(Precision.BF16, 1 << 30, 1 << 30) == -1
    assert calls.kev_isa_select(b"sse2") != 0
    assert not calls.kev_pool_create(0)
    for first, rows in ((1, 16), (0, 3), (16, 5), (32, 1)):
        with pytest.raises(InvariantError, match="rows outside"):
            PackedWeight.empty(20, 10, Precision.BF16, native.library).fill(first, numbers(rows, 10))
    with pytest.raises(InvariantError, match="width 10"):
        weight.fill(0, numbers(16, 11))
    with pytest.raises(InvariantError, match="rows outside"):
        weight.rows(0, 21)
