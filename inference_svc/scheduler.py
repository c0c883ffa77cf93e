"""The scheduler: which questions run in the next forward, and what its output means for them.

Invariants and semantics: pure and deterministic; it owns the waiting queue, the slots and the ledger's entries. A
question is admitted when a slot is free and its exact KV positions can be reserved, first come first served; it keeps
both until it ends, so nothing is ever preempted and a freed slot is refilled at the next step. A long prompt never
stops its neighbours: with ragged shapes prefill and decode share a forward, with fixed ones they alternate. Every
question added ends in exactly one ``ChannelResult``.

Not here: tensors, threads, streams. Time comes from the clock port.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from common.errors import InvariantError, KevError, PromptTooLongError
from common.ports import Clock
from common.types import ChannelEvent, FinishReason, IsolationLevel, Receipt, Verdict
from inference_svc.mask_summary import segment_digest
from inference_svc.plan import ForwardShapes, Segment, StepKind, StepOutput, StepPlan
from inference_svc.prefixes import PrefixEntry, PrefixTable
from inference_svc.sequence import Sequence, SequenceState
from inference_svc.slots import Extent, KVLedger

_Taken = TypeVar("_Taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What the scheduler must know."""

    node_id: str
    max_slots: int
    """Most questions in one forward."""
    shapes: ForwardShapes
    max_context: int
    """Positions of one channel, tokens."""
    reserve_context: bool = False
    """Reserve ``max_context`` positions per slot whatever the question needs (``kv_cache: unified``)."""
    keep_prefixes: bool = False
    """Keep unreferenced prefixes until their room is needed (``kv_cache: shared_readonly``)."""
    max_prefix_positions: int | None = None
    """Positions beyond which unreferenced prefixes go although there is room; None for no such limit."""
    fingerprint: str = ""
    unverified: frozenset[IsolationLevel] = frozenset(IsolationLevel)
    """Levels whose bits are not promised."""


class Scheduler:
    """Decides what each step does. Owned by the engine thread."""

    def __init__(
        self, settings: SchedulerSettings, ledger: KVLedger, clock: Clock, scrub: Callable[[Extent], None]
    ) -> None:
        """Build an empty scheduler.

        Args:
            settings: limits and shapes.
            ledger: books of the KV arena.
            clock: source of time.
            scrub: zeroes the memory of an extent before its positions are given away.
        """
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._scrub = scrub
        self._prefixes = PrefixTable(
            ledger,
            keep=settings.keep_prefixes,
            scrub=scrub,
            model=settings.fingerprint,
            max_positions=settings.max_prefix_positions,
        )
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(range(settings.max_slots))
        self._retired: list[int] = []
        self._outbox: list[ChannelEvent] = []
        self._ended: list[Sequence] = []
        self._step_index = 0
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self._last_kind = StepKind.DECODE

    @property
    def num_waiting(self) -> int:
        """Questions without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Questions with a slot."""
        return len(self._running)

    @property
    def num_prefixes(self) -> int:
        """Stored prefixes."""
        return len(self._prefixes)

    @property
    def num_steps(self) -> int:
        """Forwards planned so far."""
        return self._step_index

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._waiting or self._running or self._outbox)

    def add(self, sequence: Sequence) -> None:
        """Take a question. One that can never fit ends at once with an error outcome."""
        self._waiting.append(sequence)
        positions = self._positions_needed(sequence)
        if sequence.max_positions > self._settings.max_context:
            limit = self._settings.max_context
            self._end(sequence, FinishReason.ERROR, _too_long(sequence, limit, "core.max_context"))
        elif not self._ledger.can_ever_fit(positions):
            limit = self._ledger.num_positions
            self._end(sequence, FinishReason.ERROR, _too_long(sequence, limit, "core.kv_cache_bytes"))

    def cancel(self, request_id: str, question_index: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a question now; its slot and KV are free for the next step. False: it is not here (any more)."""
        for sequence in (*self._running, *self._waiting):
            if sequence.item.key == (request_id, question_index):
                self._end(sequence, reason)
                return True
        return False

    def schedule(self) -> StepPlan | None:
        """The next forward, or None when nothing can run."""
        self._expire()
        self._admit()
        kind = self._next_kind()
        if kind is None:
            return None
        segments = [] if kind is StepKind.PREFILL else self._decode_segments()
        if kind is not StepKind.DECODE:
            segments += self._prefill_segments(first_row=len(segments))
        self._last_kind = kind
        retired, self._retired = tuple(self._retired), []
        plan = StepPlan(
            step_index=self._step_index,
            kind=kind,
            num_rows=self._num_rows(kind, segments),
            segments=tuple(segments),
            retired=retired,
        )
        self._step_index += 1
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> list[ChannelEvent]:
        """Apply what a forward produced; returns the events to report, in order."""
        running = {sequence.sequence_id: sequence for sequence in self._running}
        now_s = self._clock.monotonic()
        for segment in plan.segments:
            sequence = running.get(segment.sequence_id)
            if sequence is None or sequence.state is not SequenceState.RUNNING:
                continue
            error = output.errors.get(segment.sequence_id)
            if error is not None:
                self._end(sequence, FinishReason.ERROR, error)
                continue
            sequence.advance(segment.num_rows, segment_digest(segment))
            if segment.sampling is not None:
                self._accept_token(sequence, output, now_s)
        return self.take_events()

    def fail_all(self, error: KevError) -> list[ChannelEvent]:
        """End every question with an error outcome (the engine cannot go on)."""
        for sequence in (*self._running, *self._waiting):
            self._end(sequence, FinishReason.ERROR, error)
        return self.take_events()

    def take_events(self) -> list[ChannelEvent]:
        """Events since the last call, in order."""
        events, self._outbox = self._outbox, []
        return events

    def take_ended(self) -> list[Sequence]:
        """Questions that ended by their own rules since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def next_deadline_s(self) -> float | None:
        """Monotonic time of the earliest deadline, or None."""
        deadlines = [sequence.deadline_s for sequence in (*self._waiting, *self._running)]
        return min(deadlines) if deadlines else None

    def check_integrity(self) -> None:
        """Verify that slots and KV books agree.

        Raises:
            InvariantError: they do not.
        """
        self._ledger.check_integrity()
        used = sorted([sequence.slot for sequence in self._running] + self._free_slots)
        if used != list(range(self._settings.max_slots)):
            raise InvariantError(f"slot books broken: {used}")

    def _expire(self) -> None:
        now_s = self._clock.monotonic()
        for sequence in [s for s in (*self._running, *self._waiting) if s.deadline_s <= now_s]:
            queued = sequence.state is SequenceState.WAITING
            self._end(sequence, FinishReason.TIMEOUT_QUEUED if queued else FinishReason.TIMEOUT_RUNNING)

    def _admit(self) -> None:
        in_flight = Counter(sequence.item.request_id for sequence in self._running)
        passed_over: list[Sequence] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting.popleft()
            if in_flight[sequence.item.request_id] >= sequence.item.max_parallel:
                passed_over.append(sequence)
                continue
            if not self._start(sequence):
                self._waiting.appendleft(sequence)
                break
            in_flight[sequence.item.request_id] += 1
        self._waiting.extendleft(reversed(passed_over))

    def _start(self, sequence: Sequence) -> bool:
        prefix: PrefixEntry | None = None
        if sequence.item.num_shared:
            shared_ids = sequence.item.prompt.ids[: sequence.item.num_shared]
            prefix = self._with_room(lambda: self._prefixes.acquire(sequence.item.tenant, shared_ids))
            if prefix is None:
                return False
        needed = self._positions_needed(sequence) - sequence.item.num_shared
        private = self._with_room(lambda: self._ledger.reserve(sequence.owner, needed))
        if private is None:
            if prefix is not None:
                self._prefixes.release(prefix, sequence.sequence_id)
            return False
        sequence.start(self._free_slots.pop(0), private, prefix)
        sequence.started_s, sequence.started_at = self._clock.monotonic(), self._clock.time()
        self._running.append(sequence)
        self._outbox.append(sequence.started_event(self._settings.node_id))
        return True

    def _with_room(self, take: Callable[[], _Taken | None]) -> _Taken | None:
        taken = take()
        while taken is None and self._prefixes.evict_one():
            taken = take()
        return taken

    def _positions_needed(self, sequence: Sequence) -> int:
        if self._settings.reserve_context:
            return self._settings.max_context
        return sequence.max_positions

    def _next_kind(self) -> StepKind | None:
        can_prefill = any(self._may_prefill(sequence) for sequence in self._running)
        can_decode = any(not sequence.prefilling for sequence in self._running)
        if can_prefill and can_decode and self._settings.shapes.ragged:
            return StepKind.MIXED
        if can_prefill and can_decode:
            return StepKind.DECODE if self._last_kind is StepKind.PREFILL else StepKind.PREFILL
        if can_prefill:
            return StepKind.PREFILL
        return StepKind.DECODE if can_decode else None

    def _num_rows(self, kind: StepKind, segments: list[Segment]) -> int:
        shapes = self._settings.shapes
        if shapes.ragged:
            return sum(segment.num_rows for segment in segments)
        return shapes.prefill_rows if kind is StepKind.PREFILL else shapes.decode_rows

    def _may_prefill(self, sequence: Sequence) -> bool:
        """Whether it has prompt tokens to compute now; the first to need an unfinished prefix becomes its builder."""
        if not sequence.prefilling:
            return False
        prefix = sequence.prefix
        if prefix is None or prefix.complete:
            return True
        if prefix.builder_id is None:
            prefix.builder_id = sequence.sequence_id
        return prefix.builder_id == sequence.sequence_id

    def _prefill_segments(self, first_row: int) -> list[Segment]:
        """Whole segments that fit the forward's rows, of which those before ``first_row`` are questions that decode.

        First come the questions that end their prompt here, in order of arrival and on at most half of the rows, so
        that a short one need not wait for long ones; then the oldest, as far as the rows go, and the next. So no
        question waits for ever, and a question's segments lie side by side, where they share what they read.
        """
        ready = [sequence for sequence in self._running if self._may_prefill(sequence)]
        segments: list[Segment] = []
        left = self._settings.shapes.prompt_rows(len(ready), first_row)
        short = left // 2
        later: list[Sequence] = []
        for sequence in ready:
            needed = self._prefill_limit(sequence) - sequence.num_computed
            if needed > short:
                later.append(sequence)
                continue
            segments += self._segments_of(sequence, first_row, needed)
            first_row, left, short = first_row + needed, left - needed, short - needed
        for sequence in later:
            taken = self._segments_of(sequence, first_row, left)
            segments += taken
            used = sum(segment.num_rows for segment in taken)
            first_row, left = first_row + used, left - used
        return segments

    def _segments_of(self, sequence: Sequence, row: int, room: int) -> list[Segment]:
        """The next whole segments of one question that fit into so many rows."""
        segments: list[Segment] = []
        position, limit = sequence.num_computed, self._prefill_limit(sequence)
        while position < limit:
            size = sequence.next_cut(position, self._settings.shapes.segment_tokens) - position
            if size > room:
                break
            segments.append(self._segment(sequence, position, size, row))
            position, row, room = position + size, row + size, room - size
        return segments

    def _prefill_limit(self, sequence: Sequence) -> int:
        """How far one forward may take it: a shared prefix must be complete before anyone reads past it."""
        if sequence.prefix is not None and not sequence.prefix.complete:
            return sequence.num_shared
        return sequence.num_prompt

    def _decode_segments(self) -> list[Segment]:
        ready = [sequence for sequence in self._running if not sequence.prefilling]
        return [self._segment(sequence, sequence.num_computed, 1, row) for row, sequence in enumerate(ready)]

    def _segment(self, sequence: Sequence, position: int, size: int, row: int) -> Segment:
        end = position + size
        if position < sequence.num_prompt:
            token_ids = sequence.item.prompt.ids[position:end]
        else:
            token_ids = (sequence.output_ids[position - sequence.num_prompt],)
        return Segment(
            sequence_id=sequence.sequence_id,
            slot=sequence.slot,
            row=row,
            position=position,
            token_ids=token_ids,
            kv=sequence.kv_view(),
            owner=sequence.owner,
            writes_prefix=position < sequence.num_shared,
            sampling=sequence.item.sampling if end == sequence.num_tokens else None,
            prompt_ids=sequence.item.prompt.ids,
            num_truncated=sequence.item.prompt.num_truncated,
        )

    def _accept_token(self, sequence: Sequence, output: StepOutput, now_s: float) -> None:
        text = sequence.append(output.tokens[sequence.sequence_id], now_s)
        reason = sequence.finish_reason
        if reason is not None:
            text += sequence.answer.finish()
        if text:
            self._outbox.append(sequence.delta_event(text))
        if reason is not None:
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, error: KevError | None = None) -> None:
        """Free what the question holds and put its outcome into the outbox."""
        tail = sequence.answer.finish() if reason not in (FinishReason.STOP, FinishReason.LENGTH) else ""
        if tail:
            self._outbox.append(sequence.delta_event(tail))
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish()
        self.num_prompt_tokens += sequence.num_prompt
        self.num_completion_tokens += len(sequence.output_ids)
        self._retired.append(sequence.sequence_id)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._ended.append(sequence)
        level = sequence.item.isolation
        receipt = Receipt(
            level=level,
            verdict=Verdict.UNVERIFIED if level in self._settings.unverified else Verdict.BITWISE,
            mask_digest=sequence.mask_digest.hex(),
            fingerprint=self._settings.fingerprint,
        )
        self._outbox.append(
            sequence.result(
                reason,
                node_id=self._settings.node_id,
                receipt=receipt,
                now_s=self._clock.monotonic(),
                finished_at=self._clock.time(),
                error=error,
            )
        )

    def _release(self, sequence: Sequence) -> None:
        if sequence.private is None:
            raise InvariantError(f"{sequence.owner} runs without a KV extent")
        self._scrub(sequence.private)
        self._ledger.release(sequence.private)
        if sequence.prefix is not None:
            self._prefixes.release(sequence.prefix, sequence.sequence_id)
        self._free_slots.append(sequence.slot)
        self._free_slots.sort()


def _too_long(sequence: Sequence, limit: int, setting: str) -> KevError:
    item = sequence.item
    needed = f"{sequence.num_prompt} prompt tokens + max_tokens {item.sampling.max_tokens}"
    message = (
        f"{needed} exceed {limit} positions ({setting}); shorten the question, lower max_tokens or raise {setting}"
    )
    return PromptTooLongError.of(f"queries[{item.question_index}]", message)
