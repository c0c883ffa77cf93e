"""int8 linears for models that torch runs: where Kev's own kernels cannot.

Invariants and semantics: each linear keeps int8 weights with one scale per output; each row of activations gets a
scale of its own, sums are exact integers. Nothing is scaled by what another row holds. Inputs are divided by powers of
two that the columns of the weights are multiplied with (``equalize``). The experts' routers and the
embedding stay as they were loaded. A linear is replaced one at a time, so that no second full copy of the weights
exists.

Not here: the arithmetic (``kernels.quantized``), the native form (``native_model``).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from inference_svc.calibration import Prompts, calibrate
from inference_svc.equalize import column_energies, column_scales
from inference_svc.kernels.ops import int8_linear
from inference_svc.kernels.quantized import quantize_rows


class Int8Linear(nn.Module):
    """``nn.Linear`` with int8 weights; inputs and outputs keep their dtype."""

    weight: torch.Tensor
    """int8 ``[N, K]``."""
    scale: torch.Tensor
    """float32 ``[N]``."""
    bias: torch.Tensor | None
    divisor: torch.Tensor
    """``[K]`` powers of two that the inputs are divided by, in their dtype; the weights' columns carry them."""

    def __init__(self, linear: nn.Linear, divisor: torch.Tensor) -> None:
        super().__init__()
        source = linear.weight.detach()
        weight, scale = quantize_rows(source.float() * divisor.to(source.device))
        self.register_buffer("divisor", divisor.to(source.device, source.dtype))
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to ``[..., N]``."""
        return int8_linear(x / self.divisor, self.weight, self.scale, self.bias)


def quantize_linears(module: PreTrainedModel, prompts: Prompts = ()) -> None:
    """Replace every linear inside a model, the head included, its columns equalized."""
    moments = calibrate(module, prompts)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                seen = moments.of(child)
                even = torch.ones(child.in_features)
                divisor = even if seen is None else column_scales(seen, column_energies([child.weight]))
                setattr(parent, name, Int8Linear(child, divisor))
