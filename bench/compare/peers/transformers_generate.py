"""transformers ``generate``: a left-padded batch, or one question after the other.

python -m bench.compare.peers.transformers_generate padded|serial
"""

from __future__ import annotations

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from bench.compare.wire import Answer, Ask, LoadOrder, RunOrder
from bench.compare.worker import Clock, joined, serve


class _FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers tells no types
    """Notes when the first token of a batch was there; stops nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seen_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        if self.seen_s is None:
            self.seen_s = self._clock.now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class GeneratePeer:
    """One model in bf16. A batch runs to the longest answer of its questions and returns them together."""

    def __init__(self, order: LoadOrder, batch_size: int) -> None:
        torch.set_num_threads(order.num_threads)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            order.model_dir, dtype=torch.bfloat16
        ).eval()
        self._batch_size = batch_size
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def prepare(self) -> None:
        """Nothing is kept between calls."""

    def run(self, order: RunOrder, clock: Clock) -> list[Answer]:
        """Batches in question order."""
        size = self._batch_size
        batches = [order.asks[first : first + size] for first in range(0, len(order.asks), size)]
        return [answer for batch in batches for answer in self._batch(batch, clock)]

    def _batch(self, asks: tuple[Ask, ...], clock: Clock) -> list[Answer]:
        width = max(len(ask.ids) for ask in asks)
        num_new = max(ask.max_tokens for ask in asks)
        ids = torch.tensor([[0] * (width - len(ask.ids)) + list(ask.ids) for ask in asks])
        mask = torch.tensor([[0] * (width - len(ask.ids)) + [1] * len(ask.ids) for ask in asks])
        first = _FirstToken(clock)
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([first]),
            )
        finished_s = clock.now()
        rows = [row[width : width + ask.max_tokens].tolist() for row, ask in zip(made, asks, strict=True)]
        return [
            Answer(output=joined(row), num_tokens=len(row), first_token_s=first.seen_s, finished_s=finished_s)
            for row in rows
        ]


if __name__ == "__main__":
    form = sys.argv[1]
    serve(lambda order: GeneratePeer(order, order.max_slots if form == "padded" else 1))
