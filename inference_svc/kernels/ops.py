"""The linears as torch operators, so that compiled code can call them.

Invariants and semantics: ``kev::linear`` runs the native kernels over a packed weight, ``kev::int8_linear`` plain torch
over an int8 weight; each is one opaque step to a compiler, which therefore cannot reorder or fuse a sum. Rows are
handled one by one: any number of them, the same bits (``kernels.h``). Results have the dtype of ``x``; sums are float32
or int32 inside.

Not here: the mathematics of int8 (``quantized``), packing (``packed``).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from common.errors import InvariantError
from inference_svc.kernels import quantized
from inference_svc.kernels.layout import CWeight
from inference_svc.kernels.library import Library, Pool, kernels
from inference_svc.kernels.packed import PackedWeight


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., K]`` on the CPU.
        weight: ``[N, K]``, packed.
        bias: float32 ``[N]``.

    Raises:
        InvariantError: shapes that do not fit.
    """
    made: torch.Tensor = torch.ops.kev.linear(
        x, weight.data, weight.scale, weight.sums, bias, weight.num_outputs, int(weight.precision)
    )
    return made


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ (weight * scale).T + bias`` with int8 ``[N, K]`` and int8 rows of ``x`` ``[..., K]``."""
    made: torch.Tensor = torch.ops.kev.int8_linear(x, weight, scale, bias)
    return made


@torch.library.custom_op("kev::linear", mutates_args=(), device_types="cpu")
def _linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_outputs: int,
    precision: int,
) -> torch.Tensor:
    pool = _pool(torch.get_num_threads())
    calls = pool.library.calls
    if bias is not None and (bias.dtype is not torch.float32 or bias.shape != (num_outputs,)):
        raise InvariantError(f"a bias must be float32 [{num_outputs}], not {bias.dtype} {list(bias.shape)}")
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    count, width = rows.shape
    if data.numel() != calls.kev_packed_bytes(precision, num_outputs, width):
        raise InvariantError(f"rows of width {width} do not fit a packed weight of {data.numel()} bytes")
    bias = None if bias is None else bias.contiguous()
    weight = CWeight(
        n=num_outputs,
        k=width,
        data=data.data_ptr(),
        scale=_address(scale),
        sums=_address(sums),
        precision=precision,
    )
    made = torch.empty(count, num_outputs)
    scratch = torch.empty(calls.kev_linear_scratch_bytes(precision, count, width), dtype=torch.uint8)
    status = calls.kev_linear(
        pool.address,
        ctypes.byref(weight),
        rows.data_ptr(),
        count,
        width,
        _address(bias),
        made.data_ptr(),
        num_outputs,
        scratch.data_ptr(),
    )
    pool.library.check(status)
    return made.view(*x.shape[:-1], num_outputs).to(x.dtype)


@_linear.register_fake
def _(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_outputs: int,
    precision: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


@torch.library.custom_op("kev::int8_linear", mutates_args=())
def _int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    made = quantized.int8_linear(x.reshape(-1, x.shape[-1]), weight, scale, bias)
    return made.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


@_int8_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cache
def _pool(num_threads: int) -> Pool:
    """The threads of all calls that ask for so many; kept, since starting them costs more than a small linear."""
    library = kernels()
    if not isinstance(library, Library):
        raise InvariantError(f"kev::linear needs the native kernels, but {library}")
    return Pool(library, num_threads)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
