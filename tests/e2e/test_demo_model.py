"""The real demo model: Gemma-3-270M in bf16, through the public engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kev
from common.types import FinishReason, Verdict

pytestmark = [pytest.mark.demo, pytest.mark.timeout(300)]

QUESTIONS = (
    "What is the capital of France?",
    "How do I get a refund for an order that arrived damaged?",
    "Name the three primary colors.",
    "写出一个Python快速排序示例",
    "Explain what a KV cache is in a transformer model.",
    "Who wrote the play Romeo and Juliet, and in which century was it written?",
    "解释一下注意力机制",
    "注意力机制有什么缺点",
)
OPTIONS = {"max_tokens": 24, "strategy": "round_robin", "timeout_ms": 240_000}


@pytest.fixture(scope="module")
def engine() -> Iterator[kev.Engine]:
    with kev.Engine.from_config({"kev": {"core": {"model_path": "demo", "max_context": 1024}}}) as opened:
        yield opened


def test_eight_together_equal_eight_alone(engine: kev.Engine) -> None:
    """Token for token, receipts included: the answers of a crowd are the answers of eight separate calls."""
    together = engine.ask(list(QUESTIONS), isolation="strict", **OPTIONS)
    alone = [engine.ask([question], isolation="strict", **OPTIONS)[0] for question in QUESTIONS]
    for one, other in zip(alone, together, strict=True):
        assert one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert one.token_ids == other.token_ids and one.text == other.text
        assert one.isolation == other.isolation
        assert other.isolation.verdict is Verdict.BITWISE
    assert len({result.channel_id for result in together}) == len(QUESTIONS)
    assert len({result.slot for result in together}) == len(QUESTIONS)


def test_the_levels_give_equal_answers_and_share_the_prefix(engine: kev.Engine) -> None:
    """A system prompt stored once for all (shared) or per channel (strict): the same tokens."""
    options = {**OPTIONS, "system_prompt": "You are a careful technical assistant. " * 8}
    strict = engine.ask(list(QUESTIONS[:4]), isolation="strict", **options)
    shared = engine.ask(list(QUESTIONS[:4]), isolation="shared", **options)
    assert [result.token_ids for result in strict] == [result.token_ids for result in shared]
    assert [result.num_cached_tokens for result in strict] == [0] * 4
    assert sum(result.num_cached_tokens > 0 for result in shared) == 3
    assert engine.stats().node.kv_bytes_used == 0


def test_strategies_change_no_answer(engine: kev.Engine) -> None:
    """Where a question runs says nothing about what is answered."""
    answers = {
        strategy: [r.token_ids for r in engine.ask(list(QUESTIONS[:4]), **{**OPTIONS, "strategy": strategy})]
        for strategy in ("semantic_hash", "round_robin", "length_aware", "consistent_hash")
    }
    assert len({str(tokens) for tokens in answers.values()}) == 1
