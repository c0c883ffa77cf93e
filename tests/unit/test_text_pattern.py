"""Patterns of an operator: what they match, what is refused, and that they never take long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text_pattern import MAX_TEXT_CHARS, TextPattern, fold


def matches(pattern: str, text: str) -> bool:
    return TextPattern(pattern).matches(fold(text))


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("退款", "请问怎么退款？", True),
        ("怎么*退款", "怎么才能申请退款", True),
        ("怎么*退款", "退款怎么办", False),
        ("^refund", "Refund please", True),
        ("^refund", "a refund please", False),
        ("^*refund", "a refund please", True),
        ("a*b*c", "xaxbxcx", True),
        ("a*b*c", "xaxcxbx", False),
        ("aa*aa", "aaa", False),
        ("aa*aa", "aaaa", True),
        ("C++", "how is c++ compiled?", True),
        ("what?", "What? No.", True),
        ("1.2", "1x2", False),
        ("*a*", "a", True),
        ("a", "", False),
        ("tail", "x" * MAX_TEXT_CHARS + "tail", False),
    ],
)
def test_what_a_pattern_matches(pattern: str, text: str, found: bool) -> None:
    """Questions would be of the wrong class."""
    assert matches(pattern, text) is found


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab*^", min_size=1, max_size=8), st.text(alphabet="ab", max_size=12))
def test_a_pattern_means_what_the_regular_expression_would(pattern: str, text: str) -> None:
    """A place that the leftmost search skips would be a match nobody sees."""
    try:
        compiled = TextPattern(pattern)
    except ValueError:
        return
    body = pattern.removeprefix("^")
    expression = ".*".join(map(re.escape, body.split("*")))
    assert compiled.matches(text) is (re.search(f"^{expression}" if body != pattern else expression, text) is not None)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("", "1 to 128 characters"),
        ("x" * 129, "1 to 128 characters"),
        ("*", "matches every question"),
        ("^", "matches every question"),
        ("^**", "matches every question"),
        ("a.*b", "looks like a regular expression ('.*')"),
        (r"\d+ yuan", "looks like a regular expression"),
        ("[0-9]", "looks like a regular expression"),
        ("(?i)refund", "looks like a regular expression"),
        ("(a+)+", "looks like a regular expression"),
        ("refund|money", "looks like a regular expression"),
        ("refund$", "looks like a regular expression"),
        ("a{3,}", "looks like a regular expression"),
    ],
)
def test_what_no_pattern_is_is_refused_in_words(pattern: str, told: str) -> None:
    """A regular expression would be read as text and silently never match."""
    with pytest.raises(ValueError, match=re.escape(told)):
        TextPattern(pattern)


def test_no_pattern_blows_up() -> None:
    """A pattern that backtracks would stop the router (this one takes a backtracking engine ages)."""
    assert not matches("a*" * 60 + "b", "a" * 100_000)
