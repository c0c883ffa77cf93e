"""int8 linears in plain torch: one scale per output of the weight, one per row of the activations.

Invariants and semantics: every step is the one of ``kernels.h``, so integers and results are the native kernels' bit
for bit. Rows of both sides are spread before they are rounded (``spread.h``), which leaves their products as they were.
Integers add up exactly in any order and a row's scale comes from that row alone, so a row's results do not depend on
its neighbours, whatever kernel torch picks. A row with NaN or infinity gives NaN, for itself alone.

Not here: packed weights (``packed``), the operators that compiled code sees (``ops``).
"""

from __future__ import annotations

import torch

LARGEST_WIDTH = 1 << 17
"""127 * 127 * width must fit int32."""

_BLOCK = 64
_STRIDES = (32, 16, 8, 4, 2, 1)
_SIZE = 8.0
"""How much longer a spread row is: the root of ``_BLOCK``."""
_LARGEST = 127.0
_SMALLEST_MAX = 2.0**-100
"""A row below it counts as zero: 127 / max must stay a finite float."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread and quantize each row by itself, rounding to nearest even.

    Args:
        x: ``[R, K]`` of any float dtype.

    Returns:
        int8 ``[R, K]`` within -127 and 127; float32 ``[R]`` with ``spread_rows(x) ~ q * scale * 8``, 0 for a row of
        zeros and NaN for a row that holds NaN or infinity (whose integers are 0).
    """
    x = spread_rows(x.float())
    # A tensor, not a number: torch divides by a number as it likes, by its reciprocal too.
    largest = torch.full((x.shape[0],), _LARGEST, device=x.device)
    magnitude = x.abs().amax(dim=1)
    finite = magnitude < torch.inf
    used = finite & (magnitude >= _SMALLEST_MAX)
    zero = torch.zeros_like(magnitude)
    scale = torch.where(used, magnitude / largest, torch.where(finite, zero, torch.nan))
    factor = torch.where(used, largest / magnitude, zero)
    integers = torch.where(used[:, None], x * factor[:, None], 0.0).round().to(torch.int8)
    return integers, scale / _SIZE


def spread_rows(x: torch.Tensor) -> torch.Tensor:
    """A Hadamard transform of every 64 numbers of ``[R, K]`` float32; it makes them 8 times larger, as does the end."""
    rows, width = x.shape
    whole = width // _BLOCK * _BLOCK
    turned = x[:, :whole].reshape(-1, _BLOCK).T.contiguous()  # so that there are long runs to add up
    num_blocks = turned.shape[1]
    for stride in _STRIDES:
        pairs = turned.view(_BLOCK // (2 * stride), 2, stride, num_blocks)
        turned = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=turned[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=turned[:, 1])
    spread = turned.view(_BLOCK, num_blocks).T.reshape(rows, whole)
    return spread if whole == width else torch.cat([spread, x[:, whole:] * _SIZE], 1)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ (weight * scale).T + bias`` over quantized rows, float32 ``[R, N]``.

    Args:
        x: ``[R, K]`` of any float dtype.
        weight: int8 ``[N, K]`` from ``quantize_rows``.
        scale: float32 ``[N]``, of the weight's rows.
        bias: ``[N]``.
    """
    rows, row_scale = quantize_rows(x)
    y = _products(rows, weight).float() * (row_scale[:, None] * scale[None, :])
    return y if bias is None else y + bias.float()


def _products(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact ``rows @ weight.T`` in int32."""
    if rows.device.type == "cpu" or (rows.shape[0] > 16 and rows.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0):
        return torch._int_mm(rows, weight.T)
    return (rows.double() @ weight.double().T).to(torch.int32)
