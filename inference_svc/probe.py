"""The boot probe: does a question get the same bits alone and in company, on this machine, with this model?

Invariants and semantics: the probe runs the real scheduler, runner and kernels with the shapes in use. *Row
independence*: other rows' content never changes a question's logits. *Position independence*: neither does the
question's place among the rows. Both must hold bit for bit, in prefill and decode; what fails is named.

Not here: what follows from a failure (``node``).
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from hashlib import sha256

import torch

from common.clock import SystemClock
from common.types import IsolationLevel, Prompt, SamplingParams, WorkItem
from inference_svc.answer import AnswerText
from inference_svc.kv_cache import KVCache
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes, Segment
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

    @property
    def passed(self) -> bool:
        """Bitwise isolation can be promised."""
        return self.row_independent and self.position_independent


class NoText:
    """A detokenizer for runs whose text nobody reads."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


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


def probe_isolation(bench: Bench) -> ProbeReport:
    """Run the probe.

    Raises:
        KevError: the model cannot run the probe's questions at all, with the reason.
    """
    room = bench.max_context - _NUM_TOKENS
    target = _prompt(bench, "target", min(_TARGET_TOKENS, room))
    sizes = [bench.shapes.segment_tokens + 1, 1, 2, bench.shapes.segment_tokens, 3, 7, 1]
    others = [
        _prompt(bench, f"neighbour {i}", min(sizes[i % len(sizes)], room)) for i in range(max(0, bench.max_slots - 1))
    ]
    alone = run_logits(bench, [target])[0]
    copies = run_logits(bench, [target] * bench.max_slots)
    middle = len(others) // 2
    company = run_logits(bench, [*others[:middle], target, *others[middle:]])[middle]
    return ProbeReport(
        row_independent=_same_bits(alone, company),
        position_independent=all(_same_bits(alone, copy) for copy in copies),
    )


def run_logits(bench: Bench, prompts: Ordered[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Greedy logits ``[V]`` of every step of every prompt, run together.

    Raises:
        KevError: whatever made one of them fail.
    """
    settings = SchedulerSettings(
        node_id="probe", max_slots=bench.max_slots, shapes=bench.shapes, max_context=bench.max_context
    )
    scheduler = Scheduler(settings, bench.ledger, SystemClock(), bench.cache.scrub)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def observe(segment: Segment, row: torch.Tensor, /) -> None:
        logits[segment.sequence_id].append(row.clone())

    bench.runner.observer = observe
    try:
        for index, prompt in enumerate(prompts):
            scheduler.add(_sequence(index, prompt))
        while (plan := scheduler.schedule()) is not None:
            output = bench.runner.execute(plan)
            for error in output.errors.values():
                raise error
            scheduler.update(plan, output)
    finally:
        bench.runner.observer = None
        bench.runner.forget()
    return logits


def _same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _prompt(bench: Bench, name: str, num_tokens: int) -> tuple[int, ...]:
    """Token ids drawn from a hash of the name: the same on every machine."""
    digests = (sha256(f"{name} {i}".encode()).digest() for i in range(num_tokens))
    return tuple(int.from_bytes(digest[:8], "little") % bench.vocab_size for digest in digests)


def _sequence(sequence_id: int, prompt: tuple[int, ...]) -> Sequence:
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
    item = WorkItem(
        request_id="probe",
        question_index=sequence_id,
        channel_id=0,
        prompt=Prompt(ids=prompt),
        num_shared=0,
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
