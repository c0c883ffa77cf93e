"""A process that holds a part of a spread model: ``python -m inference_svc.tensor_parallel_follower <JSON>``.

Invariants and semantics: started by the leader (``tensor_parallel``) alone. It does what the messages on standard input
say, in their order, and ends with them. What goes wrong here ends it, which the leader sees.

Not here: anything that decides.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from inference_svc.attention import Backend
from inference_svc.forward import WantedRow
from inference_svc.kv_cache import KVCache
from inference_svc.model_loader import LoadedModel, LoadSettings, load_part
from inference_svc.plan import ForwardShapes
from inference_svc.tensor_parallel import CAME_UP, LOADED, join_group, spread_rows
from inference_svc.tensor_parallel_message import Open, Rows, Run, read
from inference_svc.torch_forward import TorchForward

_LOOK_INTERVAL_S = 1.0


class Part:
    """One rank's part of the model, and its arenas."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._forwards: dict[int, tuple[KVCache, TorchForward]] = {}

    def obey(self, message: Open | Run | Rows) -> None:
        """Do what the leader does at this moment."""
        match message:
            case Open(forward_id, num_positions, shapes):
                self._forwards[forward_id] = self._opened(num_positions, shapes)
            case Run():
                self._run(message)
            case Rows(first, last):
                spread_rows(self._model.embedding, first, last)

    def _opened(self, num_positions: int, shapes: ForwardShapes) -> tuple[KVCache, TorchForward]:
        model = self._model
        cache = KVCache(model.geometry, num_positions, model.dtype, model.device)
        return cache, model.torch_forward_over(cache, shapes)

    def _run(self, run: Run) -> None:
        cache, forward = self._forwards[run.forward_id]
        for fill in run.fills:
            cache.fill(fill.start, fill.end, float("nan") if fill.poisoned else 0.0)
        forward.run(run.plan, [WantedRow(run.plan.segments[index], greedy=False) for index in run.wanted])


def _end_with(leader_id: int) -> None:
    """End when the leader has ended, whatever this process waits for."""
    while os.getppid() == leader_id:
        time.sleep(_LOOK_INTERVAL_S)
    os._exit(1)


def main(told: str) -> None:
    """Come up, meet the others, load, and obey until the leader is gone."""
    given = json.loads(told)
    threading.Thread(target=_end_with, args=(given["leader_id"],), daemon=True).start()
    fields = given["settings"]
    settings = LoadSettings(**{**fields, "backend": Backend(fields["backend"])})
    print(CAME_UP, flush=True)
    join_group(given["rank"], given["num_ranks"], Path(given["store"]), settings.device, given["timeout_s"])
    part = Part(load_part(Path(given["model"]), settings))
    print(LOADED, flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads it any more
    while (message := read(sys.stdin.buffer)) is not None:
        part.obey(message)


if __name__ == "__main__":
    main(sys.argv[1])
