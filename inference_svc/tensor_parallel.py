"""A model spread over several processes: the leader, which schedules, and the others, which run the same forwards.

Invariants and semantics: each process holds a part of every matrix and of every position's KV heads, as transformers'
tensor parallel plan says. The leader is rank 0 of a ``torch.distributed`` group (gloo on CPUs, nccl on GPUs); it writes
each step plan into a pipe of every other process before it runs the plan itself, and they meet in the sums of the
layers. Only numbers are sent. The forward has fixed shapes, so every sum has the same shape and order in every step.
With two processes a sum of two is the same in either order; with more, the library's order may depend on the place of a
row, which the boot probe finds. Once a process has ended, or a forward has failed in one of them, they do not belong
together any more: every forward from then on raises ``EngineDeadError``, and who watches is told at once.

Not here: the other side (``tensor_parallel_follower``), the messages (``tensor_parallel_message``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.errors import EngineDeadError, ModelError, UnsupportedModelError
from inference_svc.forward import RowOutput, WantedRow
from inference_svc.kv_cache import KVCache
from inference_svc.plan import ForwardShapes, StepPlan
from inference_svc.tensor_parallel_message import Fill, Message, Open, Rows, Run, encode
from inference_svc.torch_forward import TorchForward

_LOG = logging.getLogger("kev.parts")

SUM_TIMEOUT_S = 120.0
"""Longest wait of a process for the others in one sum; then the forward has failed. An end is noticed at once."""
_END_TIMEOUT_S = 5.0
_FOLLOWER = "inference_svc.tensor_parallel_follower"
CAME_UP, LOADED = "kev part came up", "kev part loaded"
"""What a process says before it joins the group, and when it waits for messages."""


def join_group(rank: int, num_ranks: int, store: Path, device: str, timeout_s: float) -> None:
    """Meet the other processes; returns when all are there.

    Raises:
        RuntimeError: they did not come in time.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    on_gpu = device.startswith("cuda")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )


class Ranks:
    """The other processes of a spread model, as the leader knows them."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        self._processes = tuple(processes)
        self._failure: EngineDeadError | None = None
        self._watchers: list[Callable[[EngineDeadError], None]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._end = weakref.finalize(self, _end_processes, self._processes, folder)

    @classmethod
    def start(
        cls, model: Path, settings: Mapping[str, object], num_ranks: int, sum_timeout_s: float = SUM_TIMEOUT_S
    ) -> Ranks:
        """Start the other processes and meet them.

        Args:
            model: directory of the model.
            settings: fields of ``model_loader.LoadSettings``.
            num_ranks: processes, this one included.
            sum_timeout_s: longest wait in one sum.

        Raises:
            ModelError: a process did not come up, or this one leads another model already.
        """
        if dist.is_initialized():
            raise ModelError("this process holds a part of a spread model already; close its engine first")
        folder = Path(tempfile.mkdtemp(prefix="kev-parts-"))
        told = {
            "leader_id": os.getpid(),
            "model": str(model),
            "num_ranks": num_ranks,
            "store": str(folder / "store"),
            "settings": dict(settings),
        }
        others = [_started({**told, "rank": rank, "timeout_s": sum_timeout_s}) for rank in range(1, num_ranks)]
        ranks = cls(others, folder)
        try:
            for process in ranks._processes:
                _await_line(process, CAME_UP)
            join_group(0, num_ranks, folder / "store", str(settings["device"]), sum_timeout_s)
        except (RuntimeError, OSError) as error:
            ranks.close()
            raise ModelError(f"the processes for the parts of the model did not come together: {error}") from error
        except BaseException:
            ranks.close()
            raise
        return ranks

    def await_loaded(self) -> None:
        """Wait until every process has its part, and look after them from now on.

        Raises:
            ModelError: one has ended.
        """
        for process in self._processes:
            _await_line(process, LOADED)
        self._watch()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the other processes, for an operator."""
        return tuple(process.pid for process in self._processes)

    def watch(self, on_failure: Callable[[EngineDeadError], None]) -> None:
        """Be told, from any thread, when the parts do not belong together any more."""
        with self._lock:
            self._watchers.append(on_failure)
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def tell(self, message: Message) -> None:
        """Send a message to every other process.

        Raises:
            EngineDeadError: they do not belong together any more.
        """
        if self._failure is not None:
            raise self._failure
        frame = encode(message)
        for process in self._processes:
            try:
                if process.stdin is not None:
                    process.stdin.write(frame)
                    process.stdin.flush()
            except OSError as error:
                raise self.fail(f"a part of the model cannot be reached ({error})") from error

    def fail(self, why: str) -> EngineDeadError:
        """The parts do not belong together any more; returns the error of every later call."""
        with self._lock:
            if self._failure is None:
                way_out = "the model is spread over processes that need each other; restart Kev"
                self._failure = EngineDeadError(f"{why}; {way_out}")
                _LOG.error("%s", self._failure)
            watchers, self._watchers = self._watchers, []
            failure = self._failure
        for on_failure in watchers:
            on_failure(failure)
        return failure

    def embedding_rows(self, weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows ``[first, last)`` of the embedding, float32 on the CPU."""
        self.tell(Rows(first, last))
        return spread_rows(weight, first, last)

    def close(self) -> None:
        """End the other processes and leave the group. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._end()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _watch(self) -> None:
        for process in self._processes:
            threading.Thread(target=self._await_end, args=(process,), name="kev-part-watch", daemon=True).start()

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self.fail(f"process {process.pid} with a part of the model has ended with code {code}")


class TensorParallelForward:
    """The forward of a spread model; the leader's own part is run by the thread that calls."""

    _ids = count(1)

    def __init__(self, ranks: Ranks, own: TorchForward, cache: KVCache, shapes: ForwardShapes) -> None:
        """Lay out the same arena everywhere.

        Raises:
            EngineDeadError: the parts do not belong together any more.
        """
        self._ranks = ranks
        self._own = own
        self._id = next(self._ids)
        self._fills: list[Fill] = []
        cache.on_fill = self._fill_later
        ranks.tell(Open(self._id, cache.num_positions, shapes))

    def run(self, plan: StepPlan, wanted: Sequence[WantedRow]) -> list[RowOutput]:
        """Logits of every wanted row.

        Raises:
            EngineDeadError: the forward has failed in one of the processes.
        """
        indexes = {id(segment): index for index, segment in enumerate(plan.segments)}
        fills, self._fills = tuple(self._fills), []
        rows = tuple(indexes[id(row.segment)] for row in wanted)
        self._ranks.tell(Run(self._id, fills, plan, rows))
        try:
            return self._own.run(plan, wanted)
        except UnsupportedModelError:  # of the model itself: every process has refused it
            self._ranks.fail("the model cannot be isolated")
            raise
        except Exception as error:
            _LOG.warning("forward %d: %s", plan.step_index, error)
            raise self._ranks.fail("a forward over the parts of the model has failed") from error

    def _fill_later(self, start: int, end: int, value: float) -> None:
        self._fills.append(Fill(start, end, poisoned=math.isnan(value)))


def spread_rows(weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows ``[first, last)`` of a matrix that may be spread by rows; every process must call it.

    Raises:
        UnsupportedModelError: it is spread in another way.
    """
    if not isinstance(weight, DTensor):
        return weight[first:last].float().cpu()
    [placement] = weight.placements
    local = weight.to_local()
    if isinstance(placement, Replicate):
        return local[first:last].float().cpu()
    if not isinstance(placement, Shard) or placement.dim != 0:
        raise UnsupportedModelError(f"the embedding is spread by {placement}, and only rows are known here")
    size = -(-weight.shape[0] // dist.get_world_size())
    offset = size * dist.get_rank()
    rows = torch.zeros(last - first, weight.shape[1], device=local.device)
    low, high = max(first, offset), min(last, offset + local.shape[0])
    if low < high:
        rows[low - first : high - first] = local[low - offset : high - offset].float()
    dist.all_reduce(rows)  # each row has one term that is not zero
    return rows.cpu()


def _started(told: Mapping[str, object]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "LOCAL_RANK": str(told["rank"])}
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", _FOLLOWER, json.dumps(told)]
    # A session of its own: an interrupt from the terminal is the leader's to see, which then drains.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


def _await_line(process: subprocess.Popen[bytes], expected: str) -> None:
    """Wait until a process says a line; it may take as long as it lives."""
    line = b"" if process.stdout is None else process.stdout.readline()
    if line.decode(errors="replace").strip() != expected:
        raise ModelError("a process for a part of the model has ended; its own message is on standard error")


def _end_processes(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Close their pipes, at which they end, and end those that do not; where they met is removed."""
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
    for process in processes:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)
