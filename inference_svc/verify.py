"""The proof on demand: solo against crowd, places, prefixes and poison, on the loaded model.

Invariants and semantics: every check runs the real scheduler, runner and kernels of the node, over a small KV arena of
its own, and compares tokens and all logits bit for bit with the question alone. What differs is counted and measured;
nothing is repaired. A check that could not run counts as failed.

Not here: what a node promises at its start (``probe``), how the report is printed (``kev.verify``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from common.errors import KevError
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog
from inference_svc.model_loader import LoadedModel
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes, StepPlan
from inference_svc.probe import Bench, ProbeQuestion, Recording, probe_prompt, run_questions
from inference_svc.sampler import Sampler
from inference_svc.slots import KVLedger

_NUM_TOKENS = 8
_SPARE_POSITIONS = 256
_POISON_STRIDE = 4
"""Every so many questions are poisoned around: each takes a run of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Outcome of one check."""

    name: str
    meaning: str
    num_questions: int
    num_logit_rows: int
    """Rows of logits that were compared."""
    num_changed: int
    """Questions of which a bit differed."""
    max_difference: float
    """Largest difference of any logit; infinite where tokens or NaN differ."""
    error: str = ""
    """Why it could not run; empty when it did."""

    @property
    def passed(self) -> bool:
        """It ran and nothing differed."""
        return not self.error and not self.num_changed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One way to run the questions in company."""

    name: str
    meaning: str
    run: Callable[[Bench, Sequence[ProbeQuestion]], Sequence[Recording]]
    stride: int = 1
    """Every so many questions are compared."""


def verify_isolation(
    model: LoadedModel, shapes: ForwardShapes, max_slots: int, progress: Callable[[str], None]
) -> list[Check]:
    """Run all checks.

    Args:
        model: the loaded model.
        shapes: of the engine.
        max_slots: slots of the engine.
        progress: told the name of each check before it runs.
    """
    questions = _questions(model, shapes, max_slots)
    bench = _bench(model, shapes, max_slots, questions)
    progress("alone")
    alone = [run_questions(bench, [question])[0] for question in questions]
    checks: list[Check] = []
    for case in _CASES:
        progress(case.name)
        try:
            crowd = case.run(bench, questions)
        except KevError as error:
            checks.append(_compared(case, [], [], str(error)))
            continue
        checks.append(_compared(case, alone[:: case.stride], crowd, ""))
    return checks


def _together(bench: Bench, questions: Sequence[ProbeQuestion]) -> list[Recording]:
    return run_questions(bench, questions)


def _backwards(bench: Bench, questions: Sequence[ProbeQuestion]) -> list[Recording]:
    return run_questions(bench, questions[::-1])[::-1]


def _shared(bench: Bench, questions: Sequence[ProbeQuestion]) -> list[Recording]:
    """All questions with their common prefix stored once: the first computes it, the others find it."""
    num_shared = questions[0].boundaries[0]
    return run_questions(bench, [replace(question, num_shared=num_shared) for question in questions])


def _poisoned(bench: Bench, questions: Sequence[ProbeQuestion]) -> list[Recording]:
    """Some questions once more in company, with NaN in every KV position that it does not hold itself."""
    recordings: list[Recording] = []
    for target in range(0, len(questions), _POISON_STRIDE):

        def poison(_plan: StepPlan, owner: str = f"sequence:{target}") -> None:
            first = 0
            for extent in sorted(bench.ledger.held(owner)):
                bench.cache.fill(first, extent.start, float("nan"))
                first = extent.end
            bench.cache.fill(first, bench.cache.num_positions, float("nan"))

        try:
            recordings.append(run_questions(bench, questions, poison, needed={target})[target])
        finally:
            bench.cache.fill(0, bench.cache.num_positions, 0.0)
    return recordings


_CASES = (
    _Case(name="crowd", meaning="all questions together against each one alone", run=_together),
    _Case(name="places", meaning="the same in the opposite order", run=_backwards),
    _Case(name="prefix", meaning="the common prefix stored once instead of once per channel", run=_shared),
    _Case(name="poison", meaning="NaN in all KV of everybody else", stride=_POISON_STRIDE, run=_poisoned),
)


def _compared(case: _Case, alone: Sequence[Recording], crowd: Sequence[Recording], error: str) -> Check:
    pairs = list(zip(alone, crowd, strict=True))
    return Check(
        name=case.name,
        meaning=case.meaning,
        num_questions=len(pairs),
        num_logit_rows=sum(len(one.logits) for one, _ in pairs),
        num_changed=sum(not one.same_bits(other) for one, other in pairs),
        max_difference=max((_difference(one, other) for one, other in pairs), default=0.0),
        error=error,
    )


def _difference(one: Recording, other: Recording) -> float:
    if len(one.logits) != len(other.logits):
        return float("inf")
    found = 0.0
    for a, b in zip(one.logits, other.logits, strict=True):
        if not torch.equal(a, b):
            gap = float((a.float() - b.float()).abs().max())
            found = max(found, gap if gap == gap else float("inf"))
    return found


def _questions(model: LoadedModel, shapes: ForwardShapes, max_slots: int) -> list[ProbeQuestion]:
    """As many as there are slots and three more, around every border, with a common prefix."""
    segment = shapes.segment_tokens
    room = model.max_context - _NUM_TOKENS
    prefix = probe_prompt(model.vocab_size, "common", max(1, min(segment // 2 + 1, room // 2)))
    sizes = (1, 2, segment - 1, segment, segment + 1, 7, 2 * segment + 5, 3)
    questions: list[ProbeQuestion] = []
    for index in range(max_slots + 3):
        size = max(1, min(sizes[index % len(sizes)], room - len(prefix)))
        ids = prefix + probe_prompt(model.vocab_size, f"verify {index}", size)
        questions.append(ProbeQuestion(ids=ids, boundaries=(len(prefix),), num_tokens=_NUM_TOKENS))
    return questions


def _bench(model: LoadedModel, shapes: ForwardShapes, max_slots: int, questions: Sequence[ProbeQuestion]) -> Bench:
    """An engine over an arena that just holds the questions."""
    align = model.alignment_positions
    needed = sum(len(question.ids) + question.num_tokens + align for question in questions) + _SPARE_POSITIONS
    num_positions = -(-needed // align) * align
    cache = KVCache(model.geometry, num_positions, model.dtype, model.device)
    ledger = KVLedger(num_positions, align)
    runner = ModelRunner(model.forward_over(cache, shapes), ledger, Sampler(frozenset()), ForwardLog())
    return Bench(runner, cache, ledger, shapes, max_slots, model.max_context, model.vocab_size)
