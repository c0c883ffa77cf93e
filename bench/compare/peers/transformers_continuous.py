"""transformers continuous batching: what ``generate_batch`` runs on, with a limit of its own for each question."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.compare.wire import Answer, LoadOrder, RunOrder
from bench.compare.worker import Clock, joined, serve

_PAGE_TOKENS = 256
_WAIT_S = 600.0


class ContinuousPeer:
    """One model in bf16; a new batch manager for every order, so that no cached prefix outlives it."""

    def __init__(self, order: LoadOrder) -> None:
        torch.set_num_threads(order.num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            order.model_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._running = ExitStack()
        pages = -(-order.max_context // _PAGE_TOKENS)
        self._config = {
            "page_size": _PAGE_TOKENS,
            "num_blocks": (order.max_slots + 1) * (pages + 1),
            "max_batch_tokens": max(512, order.max_slots),
            "max_requests_per_batch": order.max_slots,
        }
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def prepare(self) -> None:
        """Start a new manager; making and ending one is not timed."""
        self._running.close()
        self._running = ExitStack()
        self._manager = self._running.enter_context(
            self._model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                continuous_batching_config=ContinuousBatchingConfig(**self._config),
            )
        )

    def run(self, order: RunOrder, clock: Clock) -> list[Answer]:
        """All questions queued at once."""
        for index, ask in enumerate(order.asks):
            self._manager.add_request(
                list(ask.ids),
                request_id=str(index),
                max_new_tokens=ask.max_tokens,
                eos_token_id=-1,
                record_timestamps=True,
            )
        answers: dict[str, Answer] = {}
        while len(answers) < len(order.asks):
            result = self._manager.get_result(timeout=_WAIT_S)
            if result is None or result.error is not None:
                raise RuntimeError(f"no answer: {None if result is None else result.error}")
            if result.is_finished():
                answers[result.request_id] = Answer(
                    output=joined(result.generated_tokens),
                    num_tokens=len(result.generated_tokens),
                    first_token_s=clock.of(result.timestamps[0]) if result.timestamps else None,
                    finished_s=clock.now(),
                )
        return [answers[str(index)] for index in range(len(order.asks))]


if __name__ == "__main__":
    serve(ContinuousPeer)
