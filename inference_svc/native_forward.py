"""The forward by Kev's own kernels: one call per step, rows as many as there are.

Invariants and semantics: the kernels handle each row by itself, so bits do not depend on company, place, row count or
threads (``kernels/kernels.h``). The call releases the GIL. Nothing here is shared between forwards but the working
memory, which every step overwrites.

Not here: the description of the model (``native_model``), which rows there are (``scheduler``).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from common.errors import InvariantError
from inference_svc.forward import BestToken, RowOutput, WantedRow
from inference_svc.kernels.layout import CSegment, CStep, Work
from inference_svc.kernels.library import Library, Pool
from inference_svc.kv_cache import KVCache
from inference_svc.native_model import NativeModel
from inference_svc.plan import ForwardShapes, Segment, StepPlan

_DOES_NOT_FIT = 1


class NativeForward:
    """Owns the threads and the working memory of one engine. Used by one thread at a time."""

    def __init__(
        self, library: Library, model: NativeModel, cache: KVCache, shapes: ForwardShapes, num_threads: int
    ) -> None:
        """Reserve threads and working memory.

        Raises:
            MemoryError: there is not enough memory for the forwards of these shapes.
        """
        self._calls = library.calls
        self._model = model.placed_over(cache)
        self._cache = cache
        self._vocabulary = model.model.vocabulary
        self._max_wanted = shapes.decode_rows
        pool = Pool(library, num_threads)
        executor = self._calls.kev_executor_create(
            ctypes.byref(self._model.description), pool.address, shapes.max_rows, self._max_wanted
        )
        if not executor:
            raise MemoryError(f"no memory for forwards of {shapes.max_rows} rows; lower core.prefill_rows")
        self._executor = executor
        self.num_bytes: int = self._calls.kev_executor_bytes(executor)
        """Working memory."""
        weakref.finalize(self, _destroy, executor, pool)
        rows = shapes.max_rows
        self._ids, self._positions, self._places = (np.zeros(rows, np.int64) for _ in range(3))
        self._wanted, self._best = (np.zeros(self._max_wanted, np.int64) for _ in range(2))
        self._best_value = np.zeros(self._max_wanted, np.float32)
        self._segments = (CSegment * rows)()
        self._logits: torch.Tensor | None = None
        self._step = CStep(
            ids=self._ids.ctypes.data,
            positions=self._positions.ctypes.data,
            places=self._places.ctypes.data,
            segments=self._segments,
            wanted=self._wanted.ctypes.data,
            best=self._best.ctypes.data,
            best_value=self._best_value.ctypes.data,
        )

    def run(self, plan: StepPlan, wanted: Sequence[WantedRow]) -> list[RowOutput]:
        """Best tokens of the greedy rows, logits ``[V]`` of the others."""
        if plan.num_used > len(self._ids) or len(wanted) > self._max_wanted:
            raise InvariantError(f"a forward of {plan.num_used} rows, {len(wanted)} wanted, exceeds the working memory")
        for index, segment in enumerate(plan.segments):
            self._place(index, segment)
        order = sorted(range(len(wanted)), key=lambda index: not wanted[index].greedy)
        num_greedy = sum(row.greedy for row in wanted)
        for slot, index in enumerate(order):
            segment = wanted[index].segment
            self._wanted[slot] = segment.row + segment.num_rows - 1
        logits = self._logits_for(len(wanted) - num_greedy)
        step = self._step
        step.num_rows, step.num_segments = plan.num_used, len(plan.segments)
        step.num_wanted, step.num_greedy = len(wanted), num_greedy
        step.logits = 0 if logits is None else logits.data_ptr()
        state = self._calls.kev_executor_run(self._executor, ctypes.byref(step))
        if state == _DOES_NOT_FIT:
            raise InvariantError("the native forward was given a row, token or position that does not exist")
        if state:
            raise MemoryError("the native forward ran out of memory")
        return self._outputs(order, num_greedy, logits)

    def work_ms(self) -> dict[Work, float]:
        """Milliseconds of threads that all forwards so far spent on each kind of work."""
        spent = (ctypes.c_int64 * len(Work))()
        if self._calls.kev_executor_times(self._executor, spent, len(Work)):
            raise InvariantError("the native kernels count other kinds of work than these")
        return {work: spent[work] / 1e6 for work in Work}

    def _place(self, index: int, segment: Segment) -> None:
        rows = slice(segment.row, segment.row + segment.num_rows)
        self._ids[rows] = segment.token_ids
        self._positions[rows] = np.arange(segment.position, segment.end)
        kv, number = segment.kv, segment.row
        for start, end in kv.ranges(segment.position, segment.end):
            self._places[number : number + end - start] = np.arange(start, end)
            number += end - start
        entry = self._segments[index]
        entry.row, entry.num_rows, entry.position = segment.row, segment.num_rows, segment.position
        entry.prefix_start = 0 if kv.prefix is None else kv.prefix.start
        entry.num_prefix = 0 if kv.prefix is None else kv.num_prefix
        entry.private_start = kv.private.start

    def _logits_for(self, num_rows: int) -> torch.Tensor | None:
        if num_rows and self._logits is None:
            self._logits = torch.zeros(self._max_wanted, self._vocabulary)
        return self._logits if num_rows else None

    def _outputs(self, order: list[int], num_greedy: int, logits: torch.Tensor | None) -> list[RowOutput]:
        outputs: dict[int, RowOutput] = {}
        for slot, index in enumerate(order):
            if slot < num_greedy:
                outputs[index] = BestToken(int(self._best[slot]), float(self._best_value[slot]))
            elif logits is not None:
                outputs[index] = logits[slot - num_greedy]
        return [outputs[index] for index in range(len(order))]


def _destroy(executor: int, pool: Pool) -> None:
    pool.library.calls.kev_executor_destroy(executor)
    pool.close()
