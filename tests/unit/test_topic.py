"""The words that tell the topic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_svc.topic import topic_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("怎么退款", " 退款"),
        ("请问一下，怎么才能退款呢？", " 退款"),
        ("什么是注意力机制", " 注意力机制"),
        ("帮我总结一下Transformer的注意力机制", " transformer 注意力机制"),
        ("How do I get a refund?", " refund"),
        ("How can I get refunds", " refund"),
        ("What is the status of my orders?", " status order"),
        ("Ｗｉ-Ｆｉ連不上", " wi fi 連"),
        ("port 8080", " port 8080"),
        ("Straße и метро", " straße и метро"),
    ],
)
def test_what_is_kept(text: str, words: str) -> None:
    """Questions about other things would meet because they are asked alike, or the same ones would not."""
    assert topic_words(text) == words


@pytest.mark.parametrize("text", ["", "?!", "how do I", "怎么办", "😀", "\ud83d"])
def test_a_text_without_a_topic_is_its_own(text: str) -> None:
    """A question of frame words only would have no bucket."""
    assert topic_words(text) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_case_and_outer_blanks_change_nothing(text: str) -> None:
    """``Refund`` and ``refund`` would be questions of different buckets."""
    words = topic_words(text)
    assert words == topic_words(text) and (words or not text)
    if words != text:
        assert topic_words(f"  {text}\n") == words
    assert topic_words(words) in (words, topic_words(words.lower()))


def test_a_long_text_costs_no_more_than_its_ends() -> None:
    """A document would be tokenized a second time to find its bucket."""
    text = "refund " + "x" * 100_000 + " address"
    words = topic_words(text)
    assert words.startswith(" refund ")
    assert words.endswith(" address")
    assert len(words) < 2200
