"""Kev itself: the embedded engine, every level."""

from __future__ import annotations

from importlib.metadata import version

import kev
from bench.compare.wire import Answer, LoadOrder, RunOrder
from bench.compare.worker import Clock, NotOfferedError, joined, serve
from common.errors import ConfigError
from common.types import Question

_HOUR_MS = 3_600_000


class KevPeer:
    """One engine."""

    def __init__(self, order: LoadOrder) -> None:
        core = {
            "model_path": order.model_dir,
            "precision": order.precision,
            "prompt_template": "{question}",
            "max_context": order.max_context,
            "num_threads": order.num_threads,
        }
        router = {
            "strategy": "round_robin",
            "normalize": "off",
            "max_parallel_queries": order.max_slots,
            "channel_pool_size": 2 * order.max_slots,
            "channel_queue_size": 64,
        }
        try:
            self._engine = kev.Engine.from_config({"kev": {"core": core, "router": router}}, progress=print)
        except ConfigError as error:
            raise NotOfferedError(str(error)) from error
        self.versions = {name: version(name) for name in ("kev", "torch", "transformers")}

    def prepare(self) -> None:
        """A shared prefix lives no longer than its questions."""

    def run(self, order: RunOrder, clock: Clock) -> list[Answer]:
        """All questions in one request."""
        questions = [Question(ask.text, max_tokens=ask.max_tokens) for ask in order.asks]
        results = self._engine.ask(
            questions,
            isolation=order.level,
            system_prompt=order.system_prompt,
            ignore_eos=True,
            stop=[],
            timeout_ms=_HOUR_MS,
        )
        for ask, result in zip(order.asks, results, strict=True):
            if result.error is not None:
                raise RuntimeError(f"question {result.question_index}: {result.error.message}")
            if result.prompt_tokens != len(ask.ids):
                raise RuntimeError(f"unequal work: a prompt of {result.prompt_tokens} tokens, not {len(ask.ids)}")
        return [
            Answer(
                output=joined(result.token_ids),
                num_tokens=result.tokens,
                first_token_s=None if result.first_token_ms is None else result.first_token_ms / 1000,
                finished_s=result.elapsed_ms / 1000,
            )
            for result in results
        ]


if __name__ == "__main__":
    serve(KevPeer)
