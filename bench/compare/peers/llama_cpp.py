"""llama.cpp's server through xllamacpp, on the GGUF file as it is.

The bindings tell text, not ids, so answers are compared as text.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TypedDict

import xllamacpp

from bench.compare.wire import Answer, Ask, LoadOrder, RunOrder
from bench.compare.worker import Clock, NotOfferedError, serve


class _Usage(TypedDict):
    completion_tokens: int
    prompt_tokens: int


class _Choice(TypedDict):
    text: str


class _Piece(TypedDict, total=False):
    choices: list[_Choice]
    usage: _Usage


class LlamaCppPeer:
    """One server with as many slots as questions at a time."""

    def __init__(self, order: LoadOrder) -> None:
        if not order.gguf:
            raise NotOfferedError("llama.cpp reads GGUF, and there is none of this model")
        params = xllamacpp.CommonParams()
        params.model.path = order.gguf
        params.n_parallel = order.max_slots
        params.n_ctx = order.max_slots * order.max_context
        params.cpuparams.n_threads = order.num_threads
        params.cpuparams_batch.n_threads = order.num_threads
        params.cache_ram_mib = 0
        self._num_slots = order.max_slots
        self._server = xllamacpp.Server(params)
        self.versions = {"xllamacpp": version("xllamacpp"), "cpu": _features(xllamacpp.get_system_info())}

    def prepare(self) -> None:
        """Put another prompt into every slot, so that no prefix of the last order is found there."""
        for slot in range(self._num_slots):
            order = {"prompt": [4, 5], "n_predict": 1, "temperature": 0, "cache_prompt": False, "id_slot": slot}
            self._server.handle_completions(order)

    def run(self, order: RunOrder, clock: Clock) -> list[Answer]:
        """All questions at once; the server queues what has no slot."""
        with ThreadPoolExecutor(len(order.asks)) as pool:
            return list(pool.map(lambda ask: self._ask(ask, order.reuse_prefix, clock), order.asks))

    def _ask(self, ask: Ask, reuse_prefix: bool, clock: Clock) -> Answer:
        texts: list[str] = []
        times: list[float] = []
        usage: list[_Usage] = []

        def piece(piece: _Piece) -> bool:
            times.append(clock.now())
            texts.extend(choice["text"] for choice in piece["choices"])
            if "usage" in piece:
                usage.append(piece["usage"])
            return False

        self._server.handle_completions(
            {
                "prompt": list(ask.ids),
                "n_predict": ask.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": reuse_prefix,
                "stream": True,
            },
            piece,
        )
        if not usage or usage[-1]["prompt_tokens"] != len(ask.ids):
            raise RuntimeError(f"unequal work: {usage} for a prompt of {len(ask.ids)} tokens")
        return Answer(
            output="".join(texts),
            num_tokens=usage[-1]["completion_tokens"],
            first_token_s=times[0],
            finished_s=times[-1],
        )


def _features(system_info: str) -> str:
    """Instruction sets that the build uses."""
    parts = [part.strip() for part in system_info.replace("CPU :", "|").split("|")]
    return " ".join(part.removesuffix(" = 1") for part in parts if part.endswith(" = 1"))


if __name__ == "__main__":
    serve(LlamaCppPeer)
