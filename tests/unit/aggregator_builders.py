"""Requests and node events with plain values, for the tests of the aggregator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from common.types import (
    AggregateMode,
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    ErrorInfo,
    FinishReason,
    IsolationLevel,
    QuestionRecord,
    RequestRecord,
    Route,
    Strategy,
    StreamEvent,
    StreamEventType,
)


def moment(now_s: float) -> Moment:
    """An instant; the two clocks are an hour apart so that they cannot be mixed up unseen."""
    return Moment(monotonic_s=now_s, unix_s=now_s + 3600)


def channel_of(question_index: int) -> int:
    """The channel on which the tests put a question."""
    return question_index + 10


def question(question_index: int, *, timeout_ms: int = 10_000, priority: int = 0, **changes: Any) -> QuestionRecord:
    """An expected question."""
    record = QuestionRecord(
        question_index=question_index,
        route=Route(channel_id=channel_of(question_index), strategy=Strategy.ROUND_ROBIN, hash_bucket=question_index),
        timeout_ms=timeout_ms,
        priority=priority,
        num_prompt_tokens=5,
    )
    return replace(record, **changes)


def request(questions: int | Iterable[QuestionRecord] = 1, request_id: str = "r", **changes: Any) -> RequestRecord:
    """A request to register."""
    record = RequestRecord(
        request_id=request_id,
        content_digest="digest",
        mode=AggregateMode.SLOT_MAP,
        isolation=IsolationLevel.STRICT,
        questions=tuple(map(question, range(questions)) if isinstance(questions, int) else questions),
    )
    return replace(record, **changes)


def started(question_index: int = 0, attempt: int = 1, **changes: Any) -> ChannelStarted:
    """A node gave the question a slot."""
    event = ChannelStarted(
        request_id="r",
        question_index=question_index,
        channel_id=channel_of(question_index),
        slot=3,
        attempt=attempt,
        node_id=f"node-{attempt}",
    )
    return replace(event, **changes)


def delta(text: str, seq: int = 0, question_index: int = 0, attempt: int = 1, **changes: Any) -> ChannelDelta:
    """New text."""
    event = ChannelDelta(
        request_id="r",
        question_index=question_index,
        channel_id=channel_of(question_index),
        attempt=attempt,
        seq=seq,
        text=text,
        num_tokens=seq + 1,
    )
    return replace(event, **changes)


def deltas(*texts: str, question_index: int = 0, attempt: int = 1) -> list[ChannelDelta]:
    """The text of an attempt in pieces."""
    return [delta(text, seq, question_index, attempt) for seq, text in enumerate(texts)]


def outcome(text: str = "answer", question_index: int = 0, attempt: int = 1, **changes: Any) -> ChannelResult:
    """What a node reports at the end."""
    result = ChannelResult(
        request_id="r",
        question_index=question_index,
        channel_id=channel_of(question_index),
        finish_reason=FinishReason.STOP,
        text=text,
        attempt=attempt,
        node_id=f"node-{attempt}",
    )
    return replace(result, **changes)


def read_text(events: Iterable[StreamEvent]) -> Mapping[int, str]:
    """What a reader of the stream holds per question, by the reading rule of ``aggregator_svc.collector``."""
    texts: dict[int, str] = {}
    for event in events:
        if event.question_index is None:
            continue
        if event.type is StreamEventType.DELTA:
            texts[event.question_index] = texts.get(event.question_index, "") + event.text
        elif event.type is StreamEventType.ATTEMPT_CHANGED:
            texts[event.question_index] = event.text
    return texts


def shape(events: Iterable[StreamEvent]) -> list[tuple[str, str]]:
    """Kind and text of each event."""
    return [(str(event.type), event.text) for event in events]


def expire(collector: Collector, now: Moment) -> tuple[ChannelResult, ...]:
    """Settle every question that is due, where nothing competes."""
    placeholders = collector.due(now, again_after_s=5.0)
    for placeholder in placeholders:
        assert collector.place(placeholder, now)
    return placeholders


def cancel(collector: Collector, now: Moment, error: ErrorInfo | None = None) -> tuple[ChannelResult, ...]:
    """Cancel every open question, where nothing competes."""
    placeholders = collector.cancelled(now, error)
    for placeholder in placeholders:
        assert collector.place(placeholder, now)
    return placeholders
