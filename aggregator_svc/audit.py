"""Builds the public ``Result`` with its audit fields out of what router, node and aggregator know.

Invariants and semantics: pure. ``elapsed_ms`` is measured by the aggregator's own monotonic clock from acceptance to
outcome, whoever produced the outcome. Stamps and token counts come from the node where it ran, else from the
registration. A receipt that no node has signed says ``unverified``.

Not here: where results are kept, which outcome wins (``collector``).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import ChannelResult, Diversion, QuestionRecord, Receipt, RequestRecord, Result, Route, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One instant on both clocks."""

    monotonic_s: float
    """For durations and deadlines."""
    unix_s: float
    """For audit stamps, UTC."""


def build_result(
    record: RequestRecord,
    question: QuestionRecord,
    outcome: ChannelResult,
    *,
    text: str,
    num_streamed_tokens: int,
    accepted: Moment,
    now: Moment,
) -> Result:
    """The audited result of one question.

    Args:
        record: the request it belongs to.
        question: its registration, with the route.
        outcome: what the node reported, or the collector's placeholder.
        text: the final text (a placeholder keeps what was streamed).
        num_streamed_tokens: tokens reported by deltas; counts where the outcome carries no token ids.
        accepted: when the request was registered.
        now: when the outcome came.
    """
    route = question.route
    moved_from = route.channel_id if route.channel_id != outcome.channel_id else None
    return Result(
        request_id=record.request_id,
        question_index=question.question_index,
        channel_id=outcome.channel_id,
        slot=outcome.slot,
        text=text,
        finish_reason=outcome.finish_reason,
        tokens=len(outcome.token_ids) or num_streamed_tokens,
        prompt_tokens=outcome.num_prompt_tokens or question.num_prompt_tokens,
        elapsed_ms=max(0, round((now.monotonic_s - accepted.monotonic_s) * 1000)),
        queued_ms=round(outcome.queued_ms),
        first_token_ms=None if outcome.first_token_ms is None else round(outcome.first_token_ms),
        started_at=outcome.started_at,
        finished_at=outcome.finished_at or now.unix_s,
        hash_bucket=route.hash_bucket,
        strategy=route.strategy,
        attempt=outcome.attempt,
        node_id=outcome.node_id,
        isolation=outcome.receipt or Receipt(level=record.isolation, verdict=Verdict.UNVERIFIED),
        error=outcome.error,
        logprobs=outcome.logprobs,
        token_ids=outcome.token_ids,
        num_truncated=outcome.num_truncated or question.num_truncated,
        num_cached_tokens=outcome.num_cached_tokens,
        diverted_from=moved_from if route.diverted_from is None else route.diverted_from,
        diverted_why=_why_diverted(route, has_moved=moved_from is not None),
        removed=route.removed,
        priority=question.priority,
    )


def _why_diverted(route: Route, *, has_moved: bool) -> Diversion | None:
    """Why the question is not on the channel first picked; it found its place later than it was registered if moved."""
    if route.diverted_from is not None:
        return route.diverted_why
    return Diversion.WAITED if has_moved else None
