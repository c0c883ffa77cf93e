"""The boot probe: does a question get the same bits alone and in company, on this machine, with this model?

Invariants and semantics: the probe runs the real scheduler, runner and kernels with the shapes in use. *Row
independence*: other rows' content never changes a question's logits. *Position independence*: neither does the
question's place among the rows. *Prefix independence*: nor does it matter whether a common prefix was computed by the
question itself or found. All must hold bit for bit, in prefill and decode; what fails is named.

Not here: what follows from a failure (``node``), the longer proof on demand (``verify``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from hashlib import sha256

import torch

from common.clock import SystemClock
from common.types import IsolationLevel, Prompt, SamplingParams, WorkItem
from inference_svc.answer import AnswerText, NoText
from inference_svc.kv_cache import KVCache
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes, Segment, StepPlan
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.sequence import Sequence
from inference_svc.slots import KVLedger

_NUM_TOKENS = 3
"""Tokens generated per probe question: one from prefill, the others from decode."""
_TARGET_TOKENS = 5
_PROBE_BUDGET_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Outcome of the probe."""

    row_independent: bool
    position_independent: bool
    prefix_independent: bool

    @property
    def passed(self) -> bool:
        """Bitwise isolation can be promised at every level."""
        return self.keeps_strict and self.prefix_independent

    @property
    def keeps_strict(self) -> bool:
        """It can at level strict, which shares no prefix."""
        return self.row_independent and self.position_independent

    @property
    def culprit(self) -> str:
        """What changes a question's bits; empty when nothing does."""
        if not self.row_independent:
            return "the content of other rows changes"
        if not self.position_independent:
            return "the place among the rows changes"
        return "" if self.prefix_independent else "a prefix that was found instead of computed changes"


@dataclass(frozen=True, slots=True)
class Bench:
    """The parts of a node that a probe run needs."""

    runner: ModelRunner
    cache: KVCache
    ledger: KVLedger
    shapes: ForwardShapes
    max_slots: int
    max_context: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """One question of a probe run."""

    ids: tuple[int, ...]
    num_shared: int = 0
    """Leading tokens that are stored once and shared with others that have the same."""
    boundaries: tuple[int, ...] = ()
    """Where prefill is cut besides the segments."""
    num_tokens: int = _NUM_TOKENS


@dataclass(slots=True)
class Recording:
    """What one question of a probe run gave."""

    token_ids: list[int]
    logits: list[torch.Tensor]
    """``[V]`` of every step."""

    def same_bits(self, other: Recording) -> bool:
        """Tokens and all logits are equal, bit for bit."""
        if self.token_ids != other.token_ids or len(self.logits) != len(other.logits):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.logits, other.logits, strict=True))


def recheck_isolation(bench: Bench) -> bool:
    """A short probe, for a machine on which the whole one has passed: one question alone and among its neighbours.

    Raises:
        KevError: the model cannot run the probe's questions at all, with the reason.
    """
    target, others = _probe_questions(bench)
    middle = len(others) // 2
    company = run_questions(bench, [*others[:middle], target, *others[middle:]])[middle]
    return run_questions(bench, [target])[0].same_bits(company)


def probe_isolation(bench: Bench) -> ProbeReport:
    """Run the probe.

    Raises:
        KevError: the model cannot run the probe's questions at all, with the reason.
    """
    target, others = _probe_questions(bench)
    alone = run_questions(bench, [target])[0]
    copies = run_questions(bench, [target] * bench.max_slots)
    middle = len(others) // 2
    company = run_questions(bench, [*others[:middle], target, *others[middle:]])[middle]
    num_shared = len(target.ids) - 1
    own = replace(target, boundaries=(num_shared,))
    found = replace(own, num_shared=num_shared)
    pair = run_questions(bench, [found, found]) if num_shared and bench.max_slots > 1 else []
    private = run_questions(bench, [own])[0]
    return ProbeReport(
        row_independent=alone.same_bits(company),
        position_independent=all(alone.same_bits(copy) for copy in copies),
        prefix_independent=all(private.same_bits(one) for one in pair),
    )


def _probe_questions(bench: Bench) -> tuple[ProbeQuestion, list[ProbeQuestion]]:
    """The question that is watched, and neighbours of other lengths."""
    room = bench.max_context - _NUM_TOKENS
    target = ProbeQuestion(ids=probe_prompt(bench.vocab_size, "target", min(_TARGET_TOKENS, room)))
    sizes = [bench.shapes.segment_tokens + 1, 1, 2, bench.shapes.segment_tokens, 3, 7, 1]
    others = [
        ProbeQuestion(ids=probe_prompt(bench.vocab_size, f"neighbour {i}", min(sizes[i % len(sizes)], room)))
        for i in range(max(0, bench.max_slots - 1))
    ]
    return target, others


def run_logits(bench: Bench, prompts: Ordered[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Greedy logits ``[V]`` of every step of every prompt, run together.

    Raises:
        KevError: whatever made one of them fail.
    """
    return [one.logits for one in run_questions(bench, [ProbeQuestion(ids=prompt) for prompt in prompts])]


def run_questions(
    bench: Bench,
    questions: Ordered[ProbeQuestion],
    before_forward: Callable[[StepPlan], None] | None = None,
    needed: set[int] | None = None,
) -> list[Recording]:
    """Run questions together, greedily, and record every step.

    Args:
        bench: the engine's parts.
        questions: all are there from the start.
        before_forward: called with each plan before it runs.
        needed: indexes of those that must not fail; None for all.

    Raises:
        KevError: whatever made one of them fail.
    """
    settings = SchedulerSettings(
        node_id="probe", max_slots=bench.max_slots, shapes=bench.shapes, max_context=bench.max_context
    )
    scheduler = Scheduler(settings, bench.ledger, SystemClock(), bench.cache.scrub)
    recordings = [Recording([], []) for _ in questions]

    def observe(segment: Segment, row: torch.Tensor, /) -> None:
        recordings[segment.sequence_id].logits.append(row.clone())

    bench.runner.observer = observe
    try:
        for index, question in enumerate(questions):
            scheduler.add(_sequence(index, question))
        while (plan := scheduler.schedule()) is not None:
            if before_forward is not None:
                before_forward(plan)
            output = bench.runner.execute(plan)
            for sequence_id, error in output.errors.items():
                if needed is None or sequence_id in needed:
                    raise error
            for sequence_id, token in output.tokens.items():
                recordings[sequence_id].token_ids.append(token.token_id)
            scheduler.update(plan, output)
    finally:
        for index in range(len(questions)):  # frees their KV when the run was cut short
            scheduler.cancel("probe", index)
        bench.runner.observer = None
        bench.runner.forget()
    return recordings


def probe_prompt(vocab_size: int, name: str, num_tokens: int) -> tuple[int, ...]:
    """Token ids drawn from a hash of the name: the same on every machine."""
    digests = (sha256(f"{name} {i}".encode()).digest() for i in range(num_tokens))
    return tuple(int.from_bytes(digest[:8], "little") % vocab_size for digest in digests)


def _sequence(sequence_id: int, question: ProbeQuestion) -> Sequence:
    sampling = SamplingParams(max_tokens=question.num_tokens, ignore_eos=True)
    item = WorkItem(
        request_id="probe",
        question_index=sequence_id,
        channel_id=0,
        prompt=Prompt(ids=question.ids, boundaries=question.boundaries),
        num_shared=question.num_shared,
        sampling=sampling,
        isolation=IsolationLevel.STRICT,
        max_parallel=1_000,
        time_budget_ms=_PROBE_BUDGET_MS,
    )
    return Sequence(
        sequence_id=sequence_id,
        item=item,
        attempt=1,
        published_s=SystemClock().monotonic(),
        answer=AnswerText(NoText(), sampling),
        eos_ids=frozenset(),
    )
