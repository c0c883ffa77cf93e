"""Runs a step plan: one isolated forward over packed rows, then one token per question that wants one.

Invariants and semantics: before the forward the ledger confirms every read and write; a question that fails there, or
whose logits are not finite, fails alone. Running out of memory fails the questions of that forward, not the engine; a
device that is lost ends it.

Not here: the decision what to run (``scheduler``), the forward itself (``torch_forward``, ``native_forward``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from common.errors import EngineDeadError, InvariantError, KevError, OutOfMemoryError
from inference_svc.forward import BestToken, Forward, RowOutput, WantedRow
from inference_svc.mask_summary import ForwardLog, check_segment, overlapping, segment_digest
from inference_svc.plan import Segment, StepOutput, StepPlan
from inference_svc.sampled import SampledToken
from inference_svc.sampler import Sampler, SamplerState
from inference_svc.slots import KVLedger


class LogitsObserver(Protocol):
    """Sees the logits of every sampled row; for probes and tests."""

    def __call__(self, segment: Segment, logits: torch.Tensor, /) -> None:
        """Look at one question's logits ``[V]``; the tensor is only valid during the call."""
        ...


class ModelRunner:
    """Owns the samplers' state. Used by one thread."""

    def __init__(self, forward: Forward, ledger: KVLedger, sampler: Sampler, forward_log: ForwardLog) -> None:
        self._forward = forward
        self._ledger = ledger
        self._sampler = sampler
        self._log = forward_log
        self._states: dict[int, SamplerState] = {}
        self.observer: LogitsObserver | None = None

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one forward; see ``engine_core.Runner``."""
        for sequence_id in plan.retired:
            self._states.pop(sequence_id, None)
        errors = self._refused(plan)
        sound = [segment for segment in plan.segments if segment.sequence_id not in errors]
        if not sound:
            return StepOutput(errors=errors)
        plan = _repacked(plan, sound) if errors else plan
        self._log.write(plan)
        wanted = [self._wanted(segment) for segment in plan.segments if segment.sampling is not None]
        try:
            outputs = self._forward.run(plan, wanted)
        except (MemoryError, RuntimeError) as error:
            if _is_device_lost(error):
                raise EngineDeadError(
                    f"the device of this engine cannot be used any more: {_first_line(error)}"
                ) from error
            if not _is_out_of_memory(error):
                raise
            return StepOutput(errors=errors | _out_of_memory(plan.segments))
        tokens = self._sample(wanted, outputs, errors)
        return StepOutput(tokens=tokens, errors=errors)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""
        self._states.pop(sequence_id, None)

    def forget(self) -> None:
        """Drop the samplers' state of all sequences."""
        self._states.clear()

    def _wanted(self, segment: Segment) -> WantedRow:
        return WantedRow(segment, self.observer is None and self._sampler.is_greedy(self._state(segment)))

    def _sample(
        self, wanted: list[WantedRow], outputs: list[RowOutput], errors: dict[int, KevError]
    ) -> dict[int, SampledToken]:
        tokens: dict[int, SampledToken] = {}
        for row, output in zip(wanted, outputs, strict=True):
            segment = row.segment
            try:
                tokens[segment.sequence_id] = self._chosen(segment, output)
            except KevError as error:
                errors[segment.sequence_id] = error
        return tokens

    def _chosen(self, segment: Segment, output: RowOutput) -> SampledToken:
        state = self._state(segment)
        if isinstance(output, BestToken):
            return self._sampler.take(output.token_id, output.value, state)
        if self.observer is not None:
            self.observer(segment, output)
        return self._sampler.sample(output, state)

    def _state(self, segment: Segment) -> SamplerState:
        state = self._states.get(segment.sequence_id)
        if state is None:
            if segment.sampling is None:
                raise InvariantError(f"sequence {segment.sequence_id} is sampled without sampling params")
            state = self._states[segment.sequence_id] = self._sampler.state(segment.sampling, segment.prompt_ids)
        return state

    def _refused(self, plan: StepPlan) -> dict[int, KevError]:
        errors: dict[int, KevError] = {}
        for segment in plan.segments:
            try:
                check_segment(segment, self._ledger)
                segment_digest(segment)
            except InvariantError as error:
                errors[segment.sequence_id] = error
        for sequence_id, other in overlapping(plan).items():
            errors[sequence_id] = InvariantError(f"KV of sequence {sequence_id} overlaps with sequence {other}")
        return errors


def _repacked(plan: StepPlan, segments: Iterable[Segment]) -> StepPlan:
    """The plan with the given segments only, moved up to the first rows."""
    moved: list[Segment] = []
    row = 0
    for segment in segments:
        moved.append(replace(segment, row=row))
        row += segment.num_rows
    return replace(plan, segments=tuple(moved))


def _is_out_of_memory(error: Exception) -> bool:
    """Torch's CPU allocator reports a failed allocation as a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _is_device_lost(error: Exception) -> bool:
    """An error of the CUDA runtime stays: every later call of the process to that device fails."""
    lost = getattr(torch, "AcceleratorError", None)  # since torch 2.8; before, a RuntimeError that begins so
    return not _is_out_of_memory(error) and (
        (lost is not None and isinstance(error, lost)) or str(error).startswith("CUDA error")
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _out_of_memory(segments: Iterable[Segment]) -> dict[int, KevError]:
    error = OutOfMemoryError("the forward ran out of memory; send fewer or shorter questions at a time, or try again")
    return {segment.sequence_id: error for segment in segments}
