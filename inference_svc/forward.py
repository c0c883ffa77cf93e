"""The forward: what turns a step plan's rows into the logits, or the best tokens, of the rows that want one.

Invariants and semantics: an implementation writes keys and values of every row into the arena and reads no position
that is not the row's own question's. A row whose best token is all that is wanted may come without its logits; the
token is then the one that a search over the logits would have found.

Not here: the choice of a token (``sampler``), which rows there are (``scheduler``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from inference_svc.plan import Segment, StepPlan


@dataclass(frozen=True, slots=True)
class BestToken:
    """The token with the largest logit, the lowest one if several tie."""

    token_id: int
    value: float
    """Its logit; NaN when the row holds one."""


RowOutput = BestToken | torch.Tensor
"""What one wanted row gives: its best token, or all logits ``[V]``, valid until the next forward."""


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A row whose next token is wanted: the last one of its segment."""

    segment: Segment
    greedy: bool
    """The best token is enough."""


class Forward(Protocol):
    """One isolated forward over packed rows."""

    def run(self, plan: StepPlan, wanted: Sequence[WantedRow]) -> list[RowOutput]:
        """Run it; the outputs are in the order of ``wanted``.

        Raises:
            MemoryError: memory is short; nothing is broken.
            UnsupportedModelError: the model does something that cannot be isolated.
        """
        ...
