"""Proof that a model was read and packed right: each part of the native forward gives what transformers' part gives.

Invariants and semantics: two questions are asked apart. *Was it read right?* Each layer, and the end, is packed in
float32 for a moment and compared with transformers in float32 on the same weights and the same input: only the order of
sums may differ. What each layer sees in a long prompt (window, rotary tables) is compared number by number. *Was it
packed right?* The packed parts, in the precision they will run in, are compared on the same inputs; a part may differ
by what its format rounds, and rounding does not pile up from part to part. Then the whole runs once, so that the parts
are known to be in order. A model that fails is not run by the native kernels, and the part is named.

Not here: transformers' side (``layer_reference``), running a part alone (``native_stages``), isolation (``probe``),
which compares bits of one forward with itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common.errors import UnsupportedModelError
from inference_svc.attention import LayerCall
from inference_svc.decoder import Decoder
from inference_svc.forward import Forward
from inference_svc.kernels.library import Library
from inference_svc.kv_cache import KVCache
from inference_svc.layer_reference import LayerReference, LayerView, causal, layer_reference, small_window
from inference_svc.mask_summary import ForwardLog
from inference_svc.memory_plan import KVGeometry
from inference_svc.model_runner import ModelRunner
from inference_svc.native_model import NativeModel
from inference_svc.native_stages import Stages, wanted_rows
from inference_svc.plan import ForwardShapes
from inference_svc.probe import Bench, ProbeQuestion, probe_prompt, run_questions
from inference_svc.sampler import Sampler
from inference_svc.slots import KVLedger
from inference_svc.torch_forward import TorchForward

_SHAPES = ForwardShapes.of(1, prefill_rows=8, segment_tokens=8)
_READING_TOLERANCE = 1e-4
"""Largest relative difference of a row in float32. Measured on the demo model: at most 7e-6."""
_TINY_UPDATE = 1e-3
"""What a layer adds counts as at least so much of what it was given: a sum forgets what is much smaller."""
_EMBEDDING_TOLERANCES = {"fp32": 1e-6, "bf16": 2**-8, "int8": 0.05}
"""Largest relative difference of a row of embeddings; in bf16 transformers rounds what it multiplies."""
_PART_TOLERANCES = {"fp32": _READING_TOLERANCE, "bf16": 0.05, "int8": 0.2}
"""Median over the rows; a part packed wrong gives about 1. Measured on the demo model: bf16 0.0007 to 0.008, int8 0.004
to 0.052."""
_WHOLE_TOLERANCES = {"fp32": 1e-2, "bf16": 0.15, "int8": 0.6}
"""The same of the logits, when rounding of all layers has piled up. Measured: fp32 8e-6, bf16 0.02, int8 0.09."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a bench needs to know of a model."""

    geometry: KVGeometry
    kv_dtype: torch.dtype
    max_context: int
    vocab_size: int

    def bench(self, forward: Forward, cache: KVCache, shapes: ForwardShapes) -> Bench:
        """A small engine over a forward."""
        ledger = KVLedger(cache.num_positions)
        runner = ModelRunner(forward, ledger, Sampler(frozenset()), ForwardLog())
        return Bench(runner, cache, ledger, shapes, shapes.decode_rows, self.max_context, self.vocab_size)


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers' modules say."""

    calls: tuple[LayerCall, ...]
    """Each layer's attention call."""
    parts: LayerReference


def layer_calls(module: PreTrainedModel, size: ModelSize) -> tuple[LayerCall, ...]:
    """What each layer calls its attention with, by running one token through Kev's.

    Raises:
        KevError: the model cannot be isolated.
    """
    cache = KVCache(size.geometry, 64, size.kv_dtype, torch.device("cpu"))
    forward = TorchForward(module, cache, _SHAPES, torch.device("cpu"))
    question = ProbeQuestion(ids=probe_prompt(size.vocab_size, "call", 1), num_tokens=1)
    run_questions(size.bench(forward, cache, _SHAPES), [question])
    return tuple(forward.calls[layer] for layer in sorted(forward.calls))


def reference_of(module: PreTrainedModel, size: ModelSize) -> Reference:
    """Run the parts of transformers' module.

    Raises:
        KevError: the model cannot be isolated, or its parts cannot be told apart.
    """
    calls = layer_calls(module, size)
    return Reference(calls, layer_reference(module, calls, size.max_context))


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCheck:
    """Compares one model with its reference."""

    reference: Reference
    size: ModelSize
    library: Library
    num_threads: int

    def check_reading(self, decoder: Decoder) -> None:
        """Compare what was read of the model, before its weights are released.

        Raises:
            UnsupportedModelError: a part was read wrong.
        """
        hidden, rows = self.reference.parts.hidden, self._rows
        for index, layer in enumerate(decoder.layers):
            _check_view(index, layer.call.window, (layer.cos, layer.sin), self.reference.parts.views[index])
            window = small_window(layer.call)
            found = self._stages.layer_in_fp32(decoder, index, window, hidden[index])
            gap = float(_update_gaps(found, hidden[index][rows], hidden[index + 1][rows]).max())
            _require(gap, _READING_TOLERANCE, f"layer {index}", "fp32")
        tokens = self.reference.parts.tokens
        logits = self._stages.end_in_fp32(decoder, tokens, hidden[-1])
        gap = float(_gaps(logits, self.reference.parts.logits[rows]).max())
        _require(gap, _READING_TOLERANCE, "the last norm and head", "fp32")

    def check_packed(self, native: NativeModel, precision: str) -> None:
        """Compare the packed parts, and the whole.

        Raises:
            UnsupportedModelError: they differ by more than rounding.
        """
        parts, rows, stages = self.reference.parts, self._rows, self._stages
        found = stages.embedding(native, parts.ids)
        gap = float(_gaps(found, parts.hidden[0][rows]).max())
        _require(gap, _EMBEDDING_TOLERANCES[precision], "the embedding", precision)
        windows = [small_window(call) for call in self.reference.calls]
        for index, window in enumerate(windows):
            before, after = parts.hidden[index], parts.hidden[index + 1]
            found = stages.layer(native, index, window, before, self.size.kv_dtype)
            # The middle row: where experts nearly tie, rounding may choose another one for a row.
            gap = float(_update_gaps(found, before[rows], after[rows]).median())
            _require(gap, _PART_TOLERANCES[precision], f"layer {index}", precision)
        expected = parts.logits[rows]
        found = stages.end(native, parts.hidden[-1])[:, parts.tokens]
        _require(
            float(_gaps(found, expected).median()), _PART_TOLERANCES[precision], "the last norm and head", precision
        )
        found = stages.whole(native, windows, parts.ids, self.size.kv_dtype)[:, parts.tokens]
        _require(float(_gaps(found, expected).median()), _WHOLE_TOLERANCES[precision], "the whole model", precision)

    @property
    def _rows(self) -> list[int]:
        return wanted_rows(len(self.reference.parts.ids))

    @property
    def _stages(self) -> Stages:
        return Stages(self.library, self.size.geometry, self.num_threads)


def _check_view(index: int, window: int | None, tables: tuple[torch.Tensor, torch.Tensor], expected: LayerView) -> None:
    """A layer's window and rotary tables are the model's own.

    Raises:
        UnsupportedModelError: they are not.
    """
    num_seen = expected.visible.shape[0]
    if not torch.equal(causal(num_seen, window), expected.visible):
        raise _wrong(f"layer {index} sees other positions (window {window})")
    for table, made in zip(tables, (expected.cos, expected.sin), strict=True):
        if not torch.equal(table[:num_seen], made[:, : table.shape[1]]):
            raise _wrong(f"layer {index} turns its positions by other angles")


def _update_gaps(found: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """``[R]``: differences of what a layer adds to rows ``[R, hidden]``, relative to what it adds."""
    scale = (after - before).norm(dim=-1) + _TINY_UPDATE * after.norm(dim=-1)
    gaps: torch.Tensor = (found - after).norm(dim=-1) / scale.clamp_min(torch.finfo(torch.float32).tiny)
    return gaps


def _gaps(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``[R]``: differences of rows relative to their spread; a common shift means nothing to a softmax."""
    found, expected = found - found.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    gaps: torch.Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return gaps


def _require(gap: float, tolerance: float, part: str, precision: str) -> None:
    if not gap <= tolerance:
        raise _wrong(
            f"{part} gives other numbers (relative difference {gap:.3g}, at most {tolerance:g} in {precision})"
        )


def _wrong(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the native kernels would not run this model as transformers does: {what}; set core.backend: cpu"
    )
