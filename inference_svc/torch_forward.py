"""The forward through transformers and torch's kernels, with Kev's attention in every layer.

Invariants and semantics: the forward always has the row count of its kind; unused rows hold token 0 and see nothing.
Logits are computed for the last row of each question only, always for the same number of rows.

Not here: the attention (``attention``, ``flex``), compiled code (``compiled``), which rows there are (``scheduler``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from common.errors import UnsupportedModelError
from inference_svc.attention import ForwardContext, LayerCall
from inference_svc.compiled import CompiledModule
from inference_svc.forward import RowOutput, WantedRow
from inference_svc.kv_cache import KVCache
from inference_svc.plan import ForwardShapes, StepPlan


class TorchForward:
    """Runs a transformers model. Used by one thread."""

    def __init__(
        self,
        module: PreTrainedModel,
        cache: KVCache,
        shapes: ForwardShapes,
        device: torch.device,
        compiled: CompiledModule | None = None,
    ) -> None:
        """A forward over an arena.

        Args:
            module: the model.
            cache: the arena.
            shapes: row counts of the forwards.
            device: where the model is.
            compiled: runs instead of the module.
        """
        self._module = module
        self._compiled = compiled
        self._cache = cache
        self._shapes = shapes
        self._device = device
        self.calls: dict[int, LayerCall] = {}
        """What each layer called its attention with in the last forward."""

    @torch.inference_mode()
    def run(self, plan: StepPlan, wanted: Sequence[WantedRow]) -> list[RowOutput]:
        """Logits of every wanted row; they are computed for ``decode_rows`` rows whatever is wanted."""
        device = self._device
        padding = plan.num_rows - plan.num_used
        ids = [token for segment in plan.segments for token in segment.token_ids] + [0] * padding
        positions = [p for segment in plan.segments for p in range(segment.position, segment.end)] + [0] * padding
        last_rows = [row.segment.row + row.segment.num_rows - 1 for row in wanted]
        last_rows += [0] * (self._shapes.decode_rows - len(last_rows))
        context = ForwardContext.of(plan, self._shapes, self._cache, device)
        inputs = {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
            "use_cache": False,
            "logits_to_keep": torch.tensor(last_rows, device=device),
        }
        if self._compiled is None:
            output = self._module(**inputs, kev_context=context)
        else:
            output = self._compiled(context, **inputs)
        self.calls = context.calls
        if len(self.calls) != len(self._cache.keys):
            message = f"only {len(self.calls)} of {len(self._cache.keys)} layers used Kev's attention"
            raise UnsupportedModelError(f"{message}; this version of transformers or this model cannot be isolated")
        return list(output.logits[0, : len(wanted)])
