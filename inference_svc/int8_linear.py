"""int8 linears for models that torch runs: where Kev's own kernels cannot.

Invariants and semantics: each linear keeps int8 weights with one scale per output; each row of activations gets a
scale of its own, sums are exact integers. Nothing is scaled by what another row holds. The experts' routers and the
embedding stay as they were loaded. A linear is replaced one at a time, so that no second full copy of the weights
exists.

Not here: the arithmetic (``kernels.quantized``), the native form (``native_model``).
"""

from __future__ import annotations

import torch
from torch import nn

from inference_svc.kernels.ops import int8_linear
from inference_svc.kernels.quantized import quantize_rows


class Int8Linear(nn.Module):
    """``nn.Linear`` with int8 weights; inputs and outputs keep their dtype."""

    weight: torch.Tensor
    """int8 ``[N, K]``."""
    scale: torch.Tensor
    """float32 ``[N]``."""
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize_rows(linear.weight.detach().float())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to ``[..., N]``."""
        return int8_linear(x, self.weight, self.scale, self.bias)


def quantize_linears(module: nn.Module) -> None:
    """Replace every linear inside a module, the head included."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
