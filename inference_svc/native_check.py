"""Proof that a model was read right: the native forward gives transformers' logits, within what rounding makes.

Invariants and semantics: the reference is taken before packing, with transformers' modules and Kev's attention on
torch; the native forward is compared with it at prompt lengths around segment borders and, for small windows, beyond
them. A model that fails is not run by the native kernels.

Not here: isolation (``probe``), which compares bits of one forward with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common.errors import UnsupportedModelError
from inference_svc.attention import LayerCall
from inference_svc.forward import Forward
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog
from inference_svc.memory_plan import KVGeometry
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes
from inference_svc.probe import Bench, probe_prompt, run_logits
from inference_svc.sampler import Sampler
from inference_svc.slots import KVLedger
from inference_svc.torch_forward import TorchForward

_LENGTHS = (1, 9, 33, 70)
_SHAPES = ForwardShapes.of(len(_LENGTHS), prefill_rows=64, segment_tokens=32)
_RAGGED_SHAPES = ForwardShapes.of(len(_LENGTHS), prefill_rows=64, segment_tokens=32, ragged=True)
TOLERANCES = {"fp32": 1e-3, "bf16": 0.15, "int8": 0.6}
"""Largest root mean square difference of centred logits, relative to their spread: a part read wrong gives about 1.
Measured on the demo model with random tokens, against transformers in fp32: transformers in bf16 0.03 to 0.055, these
kernels in bf16 0.012 to 0.018, in int8 0.21 to 0.36."""


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
        return Bench(runner, cache, ledger, shapes, len(_LENGTHS), self.max_context, self.vocab_size)

    def cache(self) -> KVCache:
        """An arena for the check's prompts."""
        return KVCache(self.geometry, 2 * sum(_LENGTHS) + 64, self.kv_dtype, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers' modules say."""

    calls: tuple[LayerCall, ...]
    """Each layer's attention call."""
    logits: tuple[torch.Tensor, ...]
    """First logits ``[V]`` of each prompt."""


def reference_of(module: PreTrainedModel, size: ModelSize) -> Reference:
    """Run the check's prompts through transformers' modules."""
    cache = size.cache()
    forward = TorchForward(module, cache, _SHAPES, torch.device("cpu"))
    logits = _first_logits(size.bench(forward, cache, _SHAPES), size)
    calls = tuple(forward.calls[layer] for layer in sorted(forward.calls))
    return Reference(calls, logits)


def check_against(
    reference: Reference, make_forward: Callable[[KVCache, ForwardShapes], Forward], size: ModelSize, precision: str
) -> None:
    """Compare the native forward with the reference.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    cache = size.cache()
    forward = make_forward(cache, _RAGGED_SHAPES)
    found = _first_logits(size.bench(forward, cache, _RAGGED_SHAPES), size)
    worst = max(_difference(a, b) for a, b in zip(found, reference.logits, strict=True))
    if not worst <= TOLERANCES[precision]:
        message = f"the native kernels give other logits than transformers (relative difference {worst:.3g}, at most"
        raise UnsupportedModelError(f"{message} {TOLERANCES[precision]:g} in {precision}); set core.backend: cpu")


def _first_logits(bench: Bench, size: ModelSize) -> tuple[torch.Tensor, ...]:
    room = size.max_context - 3
    prompts = [probe_prompt(bench.vocab_size, f"check {length}", min(length, room)) for length in _LENGTHS]
    return tuple(steps[0].float() for steps in run_logits(bench, prompts))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found - found.mean(), expected - expected.mean()  # a common shift means nothing to a softmax
    return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt().clamp_min(1e-6))
