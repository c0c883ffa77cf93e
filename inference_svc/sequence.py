"""A sequence: one question inside the engine.

Invariants and semantics: there is no prefill phase and no decode phase; ``num_computed`` catches up with
``num_tokens``, one segment at a time, and the cuts between segments depend on the question alone. The state moves
WAITING -> RUNNING -> FINISHED or WAITING -> FINISHED, never back.

Not here: which sequence runs when (``scheduler``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from common.errors import InvariantError, KevError
from common.types import ChannelDelta, ChannelResult, ChannelStarted, FinishReason, Receipt, TokenLogprob, WorkItem
from inference_svc.answer import AnswerText
from inference_svc.plan import KVView
from inference_svc.prefixes import PrefixEntry
from inference_svc.sampled import SampledToken
from inference_svc.slots import Extent


class SequenceState(StrEnum):
    """Lifecycle of a sequence."""

    WAITING = "waiting"
    """Known to the engine, no slot yet."""
    RUNNING = "running"
    """Holds a slot and a KV extent."""
    FINISHED = "finished"
    """Has its outcome; holds nothing."""


_ALLOWED = {
    SequenceState.WAITING: {SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.RUNNING: {SequenceState.FINISHED},
    SequenceState.FINISHED: set[SequenceState](),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one question. Owned by the engine thread."""

    sequence_id: int
    item: WorkItem
    attempt: int
    published_s: float
    """Monotonic time at which the work item was published."""
    answer: AnswerText
    eos_ids: frozenset[int]
    state: SequenceState = SequenceState.WAITING
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    chosen_logits: list[float] = field(default_factory=list, repr=False)
    """The model's own logit of each generated token."""
    slot: int = field(default=-1, init=False)
    """Set by ``start``."""
    private: Extent | None = field(default=None, init=False)
    """Set by ``start``."""
    prefix: PrefixEntry | None = field(default=None, init=False)
    """Set by ``start`` when leading tokens are stored once."""
    num_reused: int = field(default=0, init=False)
    """Prompt tokens this sequence did not compute itself."""
    started_s: float | None = field(default=None, init=False)
    started_at: float | None = field(default=None, init=False)
    first_token_s: float | None = field(default=None, init=False)
    mask_digest: bytes = field(default=b"", init=False)
    _num_own_computed: int = field(default=0, init=False)
    _num_deltas: int = field(default=0, init=False)

    @property
    def owner(self) -> str:
        """Name in the KV ledger."""
        return f"sequence:{self.sequence_id}"

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.item.prompt.ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.item.prompt.ids) + len(self.output_ids)

    @property
    def num_shared(self) -> int:
        """Leading tokens that live in the prefix entry."""
        return len(self.prefix.ids) if self.prefix is not None else 0

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the cache."""
        if self.prefix is None:
            return self._num_own_computed
        return max(self._num_own_computed, self.prefix.num_computed)

    @property
    def prefilling(self) -> bool:
        """Prompt tokens are still to be computed."""
        return self.num_computed < self.num_prompt

    @property
    def deadline_s(self) -> float:
        """Monotonic time at which its budget is spent."""
        return self.published_s + self.item.time_budget_ms / 1000

    @property
    def max_positions(self) -> int:
        """Positions it may come to need in all."""
        return self.num_prompt + self.item.sampling.max_tokens

    def next_cut(self, position: int, segment_tokens: int) -> int:
        """Where the segment that starts at ``position`` ends.

        Prefill is cut at the prompt's boundaries and, from each boundary, at multiples of ``segment_tokens``.
        """
        part_start, part_end = 0, self.num_prompt
        for boundary in self.item.prompt.boundaries:
            if boundary <= position:
                part_start = boundary
            else:
                part_end = boundary
                break
        return min(part_end, part_start + ((position - part_start) // segment_tokens + 1) * segment_tokens)

    def kv_view(self) -> KVView:
        """Where its positions live.

        Raises:
            InvariantError: it holds no extent.
        """
        if self.private is None:
            raise InvariantError(f"{self.owner} has no KV extent")
        if self.prefix is None:
            return KVView(private=self.private)
        return KVView(private=self.private, prefix=self.prefix.extent, num_prefix=self.num_shared)

    def start(self, slot: int, private: Extent, prefix: PrefixEntry | None) -> None:
        """Give it a slot and KV."""
        self._move(SequenceState.RUNNING)
        self.slot, self.private, self.prefix = slot, private, prefix
        self.num_reused = 0 if prefix is None else len(prefix.ids)

    def advance(self, num_rows: int, digest: bytes) -> None:
        """Record that a segment of its tokens was computed; ``digest`` says what the rows could see."""
        position = self.num_computed
        self._num_own_computed = position + num_rows
        if self.prefix is not None and position < self.num_shared:
            self.num_reused -= num_rows
            self.prefix.num_computed = self._num_own_computed
            self.prefix.mask_digest = sha256(self.prefix.mask_digest + digest).digest()
            return
        if not self.mask_digest and self.prefix is not None:
            self.mask_digest = self.prefix.mask_digest
        self.mask_digest = sha256(self.mask_digest + digest).digest()

    def append(self, sampled: SampledToken, now_s: float) -> str:
        """Add a generated token; returns the new text."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.output_ids.append(sampled.token_id)
        self.chosen_logits.append(sampled.logit)
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
        return "" if self._is_end_token(sampled.token_id) else self.answer.push(sampled.token_id)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ends by its own rules after the last token, or None."""
        if not self.output_ids:
            return None
        if self.answer.stopped or self._is_end_token(self.output_ids[-1]):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output_ids) >= self.item.sampling.max_tokens else None

    def finish(self) -> None:
        """Mark it finished."""
        self._move(SequenceState.FINISHED)

    def started_event(self, node_id: str) -> ChannelStarted:
        """The event that says a slot was given."""
        item = self.item
        return ChannelStarted(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            slot=self.slot,
            attempt=self.attempt,
            node_id=node_id,
        )

    def delta_event(self, text: str) -> ChannelDelta:
        """The event that carries new text."""
        item = self.item
        seq, self._num_deltas = self._num_deltas, self._num_deltas + 1
        return ChannelDelta(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            attempt=self.attempt,
            seq=seq,
            text=text,
            num_tokens=len(self.output_ids),
        )

    def result(
        self,
        reason: FinishReason,
        *,
        node_id: str,
        receipt: Receipt,
        now_s: float,
        finished_at: float,
        error: KevError | None = None,
    ) -> ChannelResult:
        """The terminal outcome."""
        item = self.item
        started_s = self.started_s if self.started_s is not None else now_s
        first_s = self.first_token_s
        return ChannelResult(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            finish_reason=reason,
            slot=self.slot,
            text=self.answer.text,
            token_ids=tuple(self.output_ids),
            num_prompt_tokens=self.num_prompt,
            num_truncated=item.prompt.num_truncated,
            num_cached_tokens=self.num_reused,
            queued_ms=(started_s - self.published_s) * 1000,
            first_token_ms=None if first_s is None else (first_s - self.published_s) * 1000,
            started_at=self.started_at,
            finished_at=finished_at,
            attempt=self.attempt,
            node_id=node_id,
            receipt=receipt,
            error=None if error is None else error.info,
            logprobs=tuple(self.logprobs) if item.sampling.logprobs is not None else None,
        )

    def _is_end_token(self, token_id: int) -> bool:
        sampling = self.item.sampling
        if len(self.output_ids) < sampling.min_tokens:
            return False
        return token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in self.eos_ids)

    def _move(self, state: SequenceState) -> None:
        if state not in _ALLOWED[self.state]:
            raise InvariantError(f"{self.owner} cannot go from {self.state} to {state}")
        self.state = state
