"""Runs questions together through the real engine core and records every logit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from common.clock import ManualClock
from common.types import ChannelEvent, ChannelResult, IsolationLevel, Prompt, SamplingParams, WorkItem
from inference_svc.answer import AnswerText, NoText
from inference_svc.engine_core import EngineCore
from inference_svc.kernels.layout import Precision
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog
from inference_svc.model_loader import LoadedModel
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes, Segment, StepOutput, StepPlan
from inference_svc.sampler import Sampler
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.sequence import Sequence
from inference_svc.slots import KVLedger

EOS_ID = 2
POISON_ID = 1
"""Never in a prompt; its embedding turns NaN where the embeddings of neighbours are poisoned."""
SEGMENT = 16
PREFILL_ROWS = 32
"""Also where rows are ragged, so that most prompts take several forwards."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One question for the crowd."""

    ids: tuple[int, ...]
    max_tokens: int = 6
    boundaries: tuple[int, ...] = ()
    num_shared: int = 0
    sampling: SamplingParams | None = None
    time_budget_ms: int = 1_000_000
    tenant: str = ""
    max_parallel: int = 64


@dataclass(slots=True)
class Trace:
    """What happened to one question."""

    logits: list[torch.Tensor] = field(default_factory=list)
    result: ChannelResult | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its generated tokens."""
        assert self.result is not None
        return self.result.token_ids


@dataclass(slots=True)
class Crowd:
    """An engine core over a tiny model, driven step by step."""

    model: LoadedModel
    max_slots: int = 8
    num_positions: int = 2048
    keep_prefixes: bool = False
    shapes: ForwardShapes | None = None
    before_forward: Callable[[Crowd, StepPlan], None] | None = None
    clock: ManualClock = field(default_factory=ManualClock)
    traces: list[Trace] = field(init=False, default_factory=list)
    core: EngineCore = field(init=False)
    cache: KVCache = field(init=False)
    ledger: KVLedger = field(init=False)
    runner: ModelRunner = field(init=False)
    plans: list[StepPlan] = field(init=False, default_factory=list)
    events: list[ChannelEvent] = field(init=False, default_factory=list)
    poisoned_rows: torch.Tensor | None = field(init=False, default=None)
    poisoned_sequences: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        geometry = self.model.geometry
        shapes = self.shapes or replace(
            self.model.shapes(self.max_slots, PREFILL_ROWS, SEGMENT), prefill_rows=PREFILL_ROWS
        )
        self.ledger = KVLedger(self.num_positions, self.model.alignment_positions)
        self.cache = KVCache(geometry, self.num_positions, self.model.dtype, self.model.device)
        forward = self.model.forward_over(self.cache, shapes)
        self.runner = ModelRunner(forward, self.ledger, Sampler(frozenset({EOS_ID})), ForwardLog())
        self.runner.observer = self._observe
        settings = SchedulerSettings(
            node_id="test",
            max_slots=self.max_slots,
            shapes=shapes,
            max_context=self.model.max_context,
            keep_prefixes=self.keep_prefixes,
        )
        self.core = EngineCore(Scheduler(settings, self.ledger, self.clock, self.cache.scrub), self)

    def execute(self, plan: StepPlan) -> StepOutput:
        """The runner, with the test's hand on every plan."""
        self.plans.append(plan)
        if self.before_forward is not None:
            self.before_forward(self, plan)
        if self.model.module is None and self.poisoned_sequences:
            plan = self._with_poisoned_tokens(plan)
        return self.runner.execute(plan)

    def add(self, ask: Ask) -> int:
        """Add a question; returns its index."""
        index = len(self.traces)
        self.traces.append(Trace())
        sampling = ask.sampling or SamplingParams(max_tokens=ask.max_tokens)
        item = WorkItem(
            request_id="crowd",
            question_index=index,
            channel_id=index,
            prompt=Prompt(ids=ask.ids, boundaries=ask.boundaries),
            num_shared=ask.num_shared,
            sampling=sampling,
            isolation=IsolationLevel.STRICT,
            max_parallel=ask.max_parallel,
            time_budget_ms=ask.time_budget_ms,
            tenant=ask.tenant,
        )
        self.core.scheduler.add(
            Sequence(
                sequence_id=index,
                item=item,
                attempt=1,
                published_s=self.clock.monotonic(),
                answer=AnswerText(NoText(), sampling),
                eos_ids=frozenset({EOS_ID}),
            )
        )
        return index

    def step(self) -> None:
        """One step."""
        events = self.core.step()
        self.events += events
        for event in events:
            if isinstance(event, ChannelResult):
                self.traces[event.question_index].result = event
        self.core.scheduler.check_integrity()

    def cancel(self, index: int) -> None:
        """Cancel a question between two steps."""
        assert self.core.scheduler.cancel("crowd", index)

    def _with_poisoned_tokens(self, plan: StepPlan) -> StepPlan:
        """The plan with every token of the poisoned questions replaced by the one whose embedding is NaN."""
        segments = tuple(
            replace(segment, token_ids=(POISON_ID,) * segment.num_rows)
            if segment.sequence_id in self.poisoned_sequences
            else segment
            for segment in plan.segments
        )
        return replace(plan, segments=segments)

    def own_positions(self, index: int) -> torch.Tensor:
        """``[P]`` bool: arena positions that the question holds now."""
        own = torch.zeros(self.ledger.num_positions, dtype=torch.bool)
        for extent in self.ledger.held(f"sequence:{index}"):
            own[extent.start : extent.end] = True
        return own

    @contextmanager
    def poisoned_embeddings(self) -> Iterator[None]:
        """While inside, rows marked in ``poisoned_rows`` enter the model as NaN."""

        def poison(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            if self.poisoned_rows is None:
                return output
            return output.masked_fill(self.poisoned_rows[None, :, None], float("nan"))

        if self.model.module is None:  # native: poisoned questions get a token whose embedding is NaN
            with self._nan_embedding():
                yield
            return
        handle = self.model.module.get_input_embeddings().register_forward_hook(poison)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _nan_embedding(self) -> Iterator[None]:
        """While inside, the packed embedding of ``POISON_ID`` is NaN; not where the head shares its memory."""
        native = self.model.native
        assert native is not None
        if native.tied:
            yield
            return
        weight = native.model.embedding
        held = {tensor.data_ptr(): tensor for tensor in native.tensors}
        if weight.scale:
            row = held[weight.scale][POISON_ID : POISON_ID + 1]
        else:
            kind, pair = (torch.float32, 1) if weight.precision == Precision.F32 else (torch.bfloat16, 2)
            panels = held[weight.data].view(kind).view(-1, -(-weight.k // pair), 16, pair)
            row = panels[POISON_ID // 16, :, POISON_ID % 16]
        kept = row.clone()
        row.fill_(float("nan"))
        try:
            yield
        finally:
            row.copy_(kept)

    def finish(self, max_steps: int = 2000) -> list[Trace]:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.traces
            self.step()
        raise AssertionError("the engine did not come to an end")

    def _observe(self, segment: Segment, row: torch.Tensor) -> None:
        self.traces[segment.sequence_id].logits.append(row.clone())


def run_together(model: LoadedModel, asks: Ordered[Ask], **settings: int) -> list[Trace]:
    """All questions together."""
    crowd = Crowd(model, **settings)  # type: ignore[arg-type]
    for ask in asks:
        crowd.add(ask)
    return crowd.finish()


def run_alone(model: LoadedModel, ask: Ask, **settings: int) -> Trace:
    """One question in a fresh engine."""
    return run_together(model, [ask], **settings)[0]


def same_bits(one: Trace, other: Trace) -> bool:
    """Tokens and all logits are equal, bit for bit."""
    if one.token_ids != other.token_ids or len(one.logits) != len(other.logits):
        return False
    return all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Random token ids without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 160, (num_tokens,), generator=generator).tolist())


def without_sharing(ask: Ask) -> Ask:
    """The same question at level strict."""
    return replace(ask, num_shared=0)
