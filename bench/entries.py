"""Sizes of what a question leaves in the store, in its envelope: real messages, encoded as they travel.

Invariants and semantics: token counts are those of ``Inputs``; ids, digests and trace are as long as real ones.

Not here: how many of each there are, and what the store adds (``store_use``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.inputs import Inputs
from common.codec import seal
from common.types import (
    AggregateMode,
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    FinishReason,
    IsolationLevel,
    Prompt,
    QuestionRecord,
    Receipt,
    RequestRecord,
    Route,
    SamplingParams,
    Strategy,
    Verdict,
    WorkItem,
)

_DIGEST = "d" * 64
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_REQUEST_ID = "5f0c8c8e-2f3d-4f0e-9d5e-0a8c5a0e7b11"
_LARGE_TOKEN_ID = 30_000
_WORD_CHARS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBytes:
    """Sizes of what one question leaves in the store, in its envelope."""

    work: int
    started: int
    delta: int
    result: int
    record: int
    """Of the whole request."""

    @classmethod
    def encoded(cls, inputs: Inputs) -> EntryBytes:
        """Sizes of real messages with these token counts."""
        text = " word" * math.ceil(inputs.tokens_per_delta)
        return cls(
            work=len(seal(_work_item(inputs.prompt_tokens), _TRACE)),
            started=len(seal(_started(), _TRACE)),
            delta=len(seal(_delta(text), _TRACE)),
            result=len(seal(_result(inputs.prompt_tokens, inputs.answer_tokens), _TRACE)),
            record=len(seal(_record(inputs.questions_per_request, inputs.prompt_tokens))),
        )


def _token_ids(num_tokens: int) -> tuple[int, ...]:
    return tuple((7919 * place) % _LARGE_TOKEN_ID for place in range(num_tokens))


def _work_item(prompt_tokens: int) -> WorkItem:
    return WorkItem(
        request_id=_REQUEST_ID,
        question_index=3,
        channel_id=11,
        prompt=Prompt(ids=_token_ids(prompt_tokens)),
        num_shared=0,
        sampling=SamplingParams(),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=9_900,
        tenant="tenant",
        fingerprint=_DIGEST,
    )


def _started() -> ChannelStarted:
    return ChannelStarted(request_id=_REQUEST_ID, question_index=3, channel_id=11, slot=3, attempt=1, node_id="node-12")


def _delta(text: str) -> ChannelDelta:
    return ChannelDelta(
        request_id=_REQUEST_ID, question_index=3, channel_id=11, attempt=1, seq=40, text=text, num_tokens=41
    )


def _result(prompt_tokens: int, answer_tokens: int) -> ChannelResult:
    receipt = Receipt(level=IsolationLevel.STRICT, verdict=Verdict.BITWISE, mask_digest=_DIGEST, fingerprint=_DIGEST)
    return ChannelResult(
        request_id=_REQUEST_ID,
        question_index=3,
        channel_id=11,
        finish_reason=FinishReason.STOP,
        slot=3,
        text=" word" * answer_tokens,
        token_ids=_token_ids(answer_tokens),
        num_prompt_tokens=prompt_tokens,
        queued_ms=12.25,
        first_token_ms=31.5,
        started_at=1_795_000_000.25,
        finished_at=1_795_000_000.5,
        node_id="node-12",
        receipt=receipt,
    )


def _record(num_questions: int, prompt_tokens: int) -> RequestRecord:
    questions = tuple(
        QuestionRecord(
            question_index=index,
            route=Route(
                channel_id=11,
                strategy=Strategy.SEMANTIC_HASH,
                hash_bucket=41,
                normalized_text="x" * (_WORD_CHARS * prompt_tokens),
            ),
            timeout_ms=10_000,
            num_prompt_tokens=prompt_tokens,
        )
        for index in range(num_questions)
    )
    return RequestRecord(
        request_id=_REQUEST_ID,
        content_digest=_DIGEST,
        mode=AggregateMode.SLOT_MAP,
        isolation=IsolationLevel.STRICT,
        questions=questions,
        tenant="tenant",
    )
