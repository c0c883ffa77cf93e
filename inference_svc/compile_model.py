"""Makes compiled code of a loaded model, and tries it before it is used.

Invariants and semantics: both shapes of forward are compiled and run, and their logits compared with those of the
module as it is. What goes wrong (no compiler, a construct that cannot be traced, other logits) leaves the model as it
was, with one line in the log: compiled code is a matter of speed. Its bits are its own, and so is its fingerprint.

Not here: the graphs (``compiled``), isolation (``probe`` runs after this, over the compiled code).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from hashlib import sha256

import torch

from common.errors import ModelError
from inference_svc import flex
from inference_svc.attention import Backend
from inference_svc.compiled import ATTENTION_NAME, CompiledModule
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog
from inference_svc.model_loader import BODIES, LoadedModel
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes
from inference_svc.probe import Bench, probe_prompt, run_logits
from inference_svc.sampler import Sampler
from inference_svc.slots import KVLedger

_LOG = logging.getLogger("kev.model")

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Largest root mean square difference of logits, relative to their spread (``native_check`` has what was measured)."""


def compiled(model: LoadedModel, shapes: ForwardShapes) -> LoadedModel:
    """The model with compiled code, or as it was.

    Args:
        model: one that torch runs, whole.
        shapes: of the engine that will use it.
    """
    module = model.module
    if module is None or model.ranks is not None:
        what = "Kev's own kernels" if module is None else "a model that is spread over processes"
        _LOG.warning("core.compile has no effect on %s", what)
        return model
    plain = _Trial(model, shapes)
    expected = plain.logits()
    prepare = None
    if model.backend is Backend.FLEX:
        windows = {call.window for call in plain.forward.calls.values()}
        prepare = partial(flex.prepare, windows=windows, device=model.device)
    code = CompiledModule(module, BODIES[model.backend], model.device, prepare)
    try:
        module.set_attn_implementation(ATTENTION_NAME)
        made = replace(model, compiled=code, fingerprint=sha256(f"{model.fingerprint} compiled".encode()).hexdigest())
        _compare(_Trial(made, shapes).logits(), expected, _TOLERANCE[model.dtype])
    except Exception as error:
        module.set_attn_implementation(model.backend.attention_name)
        _LOG.warning("core.compile: the forward runs uncompiled: %s", _reason(error))
        return model
    code.seal()
    _LOG.info("the forward is compiled (%d graphs)", code.num_graphs)
    return made


class _Trial:
    """Two questions over a small arena: prefill in several segments, and decode."""

    def __init__(self, model: LoadedModel, shapes: ForwardShapes) -> None:
        room = model.max_context - 3
        lengths = (min(3, room), min(shapes.segment_tokens + 2, room))
        align = model.alignment_positions
        positions = sum(-(-(length + 4) // align) * align for length in lengths) + align
        cache = KVCache(model.geometry, positions, model.dtype, model.device)
        ledger = KVLedger(positions, align)
        self.forward = model.torch_forward_over(cache, shapes)
        runner = ModelRunner(self.forward, ledger, Sampler(frozenset()), ForwardLog())
        self._bench = Bench(runner, cache, ledger, shapes, len(lengths), model.max_context, model.vocab_size)
        self._prompts = [probe_prompt(model.vocab_size, f"compiled {length}", length) for length in lengths]

    def logits(self) -> list[torch.Tensor]:
        """``[V]`` of the first steps of both."""
        return [row.float().cpu() for steps in run_logits(self._bench, self._prompts) for row in steps[:2]]


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for row, wanted in zip(found, expected, strict=True):
        gap = float((row - wanted).pow(2).mean().sqrt() / wanted.std().clamp_min(1e-6))
        if not gap <= tolerance:
            raise ModelError(f"compiled code gives other logits (relative difference {gap:.3g}, at most {tolerance:g})")


def _reason(error: Exception) -> str:
    """One line; the compiler wraps what went wrong."""
    cause = getattr(error, "inner_exception", error)
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
