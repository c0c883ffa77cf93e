"""int8 linears in plain torch: one scale per output of the weight, one per row of the activations.

Invariants and semantics: every step is the one of ``kernels.h``, so integers and results are the native kernels' bit
for bit. Integers add up exactly in any order and a row's scale comes from that row alone, so a row's results do not
depend on its neighbours, whatever kernel torch picks. A row with NaN or infinity gives NaN, for itself alone.

Not here: packed weights (``packed``), the operators that compiled code sees (``ops``).
"""

from __future__ import annotations

import torch

LARGEST_WIDTH = 1 << 17
"""127 * 127 * width must fit int32."""

_LARGEST = 127.0
_SMALLEST_MAX = 2.0**-100
"""A row below it counts as zero: 127 / max must stay a finite float."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by itself, rounding to nearest even.

    Args:
        x: ``[R, K]`` of any float dtype.

    Returns:
        int8 ``[R, K]`` within -127 and 127; float32 ``[R]`` with ``x ~ q * scale``, 0 for a row of zeros and NaN for a
        row that holds NaN or infinity (whose integers are 0).
    """
    x = x.float()
    # A tensor, not a number: torch divides by a number as it likes, by its reciprocal too.
    largest = torch.full((x.shape[0],), _LARGEST, device=x.device)
    magnitude = x.abs().amax(dim=1)
    finite = magnitude < torch.inf
    used = finite & (magnitude >= _SMALLEST_MAX)
    zero = torch.zeros_like(magnitude)
    scale = torch.where(used, magnitude / largest, torch.where(finite, zero, torch.nan))
    factor = torch.where(used, largest / magnitude, zero)
    integers = torch.where(used[:, None], x * factor[:, None], 0.0).round().to(torch.int8)
    return integers, scale


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
