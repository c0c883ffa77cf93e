"""vLLM on CPU, bf16, prefix caching on, its cache emptied before every order."""

from __future__ import annotations

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.compare.wire import Answer, LoadOrder, RunOrder
from bench.compare.worker import Clock, joined, serve


class VllmPeer:
    """One engine, fed and stepped as ``LLM.generate`` does, with every step's tokens seen."""

    def __init__(self, order: LoadOrder) -> None:
        self._llm = LLM(
            order.model_dir,
            dtype="bfloat16",
            max_model_len=order.max_context,
            max_num_seqs=order.max_slots,
            enable_prefix_caching=True,
        )
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}

    def prepare(self) -> None:
        """Empty the prefix cache."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")

    def run(self, order: RunOrder, clock: Clock) -> list[Answer]:
        """All questions queued at once."""
        engine = self._llm.llm_engine
        for index, ask in enumerate(order.asks):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=ask.max_tokens,
                min_tokens=ask.max_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(index), {"prompt_token_ids": list(ask.ids)}, params)
        made: list[list[int]] = [[] for _ in order.asks]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id)
                made[index] += output.outputs[0].token_ids
                if made[index]:
                    first.setdefault(index, clock.now())
                if output.finished:
                    last[index] = clock.now()
        return [
            Answer(output=joined(ids), num_tokens=len(ids), first_token_s=first[index], finished_s=last[index])
            for index, ids in enumerate(made)
        ]


if __name__ == "__main__":
    serve(VllmPeer)
