"""Runs a step plan: one isolated forward over packed rows, then one token per question that wants one.

Invariants and semantics: the forward always has the row count of its kind; unused rows hold token 0 and see nothing.
Logits are computed for the last row of each question only, always for the same number of rows. Before the forward the
ledger confirms every read and write; a question that fails there, or whose logits are not finite, fails alone. Running
out of memory fails the questions of that forward, not the engine.

Not here: the decision what to run (``scheduler``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from common.errors import InvariantError, KevError, OutOfMemoryError, UnsupportedModelError
from inference_svc.attention import ForwardContext
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog, check_segment, overlapping, segment_digest
from inference_svc.model_loader import LoadedModel
from inference_svc.plan import ForwardShapes, Segment, StepOutput, StepPlan
from inference_svc.sampled import SampledToken
from inference_svc.sampler import Sampler, SamplerState
from inference_svc.slots import KVLedger


class LogitsObserver(Protocol):
    """Sees the logits of every sampled row; for probes and tests."""

    def __call__(self, segment: Segment, logits: torch.Tensor, /) -> None:
        """Look at one question's logits ``[V]``; the tensor is only valid during the call."""
        ...


class ModelRunner:
    """Owns the model, the KV tensors and the samplers' state. Used by one thread."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        ledger: KVLedger,
        shapes: ForwardShapes,
        sampler: Sampler,
        forward_log: ForwardLog,
    ) -> None:
        self._model = model
        self._cache = cache
        self._ledger = ledger
        self._shapes = shapes
        self._sampler = sampler
        self._log = forward_log
        self._states: dict[int, SamplerState] = {}
        self.observer: LogitsObserver | None = None

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one forward."""
        for sequence_id in plan.retired:
            self._states.pop(sequence_id, None)
        errors = self._refused(plan)
        sound = [segment for segment in plan.segments if segment.sequence_id not in errors]
        if not sound:
            return StepOutput(errors=errors)
        plan = _repacked(plan, sound) if errors else plan
        self._log.write(plan)
        wanted = [segment for segment in plan.segments if segment.sampling is not None]
        try:
            logits = self._forward(plan, wanted)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return StepOutput(errors=errors | _out_of_memory(plan.segments))
        tokens = self._sample(wanted, logits, errors)
        return StepOutput(tokens=tokens, errors=errors)

    def forget(self) -> None:
        """Drop the samplers' state of all sequences."""
        self._states.clear()

    @torch.inference_mode()
    def _forward(self, plan: StepPlan, wanted: list[Segment]) -> torch.Tensor:
        """Logits ``[decode_rows, V]``; row i belongs to ``wanted[i]``, the rest is padding."""
        device = self._model.device
        padding = plan.num_rows - plan.num_used
        ids = [token for segment in plan.segments for token in segment.token_ids] + [0] * padding
        positions = [p for segment in plan.segments for p in range(segment.position, segment.end)] + [0] * padding
        last_rows = [segment.row + segment.num_rows - 1 for segment in wanted]
        last_rows += [0] * (self._shapes.decode_rows - len(last_rows))
        context = ForwardContext.of(plan, self._shapes, self._cache, device)
        output = self._model.module(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, device=device),
            kev_context=context,
        )
        if len(context.layers_seen) != len(self._cache.keys):
            message = f"only {len(context.layers_seen)} of {len(self._cache.keys)} layers used Kev's attention"
            raise UnsupportedModelError(f"{message}; this version of transformers or this model cannot be isolated")
        logits: torch.Tensor = output.logits[0]
        return logits

    def _sample(
        self, wanted: list[Segment], logits: torch.Tensor, errors: dict[int, KevError]
    ) -> dict[int, SampledToken]:
        tokens: dict[int, SampledToken] = {}
        for row, segment in enumerate(wanted):
            if self.observer is not None:
                self.observer(segment, logits[row])
            try:
                tokens[segment.sequence_id] = self._sampler.sample(logits[row], self._state(segment))
            except KevError as error:
                errors[segment.sequence_id] = error
        return tokens

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


def _out_of_memory(segments: Iterable[Segment]) -> dict[int, KevError]:
    error = OutOfMemoryError("the forward ran out of memory; send fewer or shorter questions at a time, or try again")
    return {segment.sequence_id: error for segment in segments}
