"""Stop strings against a plain search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.stopping import StopMatcher


def stream(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            return shown + matcher.flush(), True
    return shown + matcher.flush(), False


def cut(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """The definition: the first character that completes a stop string, cut before the longest one ending there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


letters = st.text(alphabet="ab ", max_size=12)
stop_sets = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(stops=stop_sets, pieces=st.lists(letters, max_size=6))
def test_streamed_text_is_the_cut_of_the_whole_text(stops: tuple[str, ...], pieces: list[str]) -> None:
    """A stream and a plain call would give different texts, depending on token borders."""
    assert stream(stops, pieces) == cut(stops, "".join(pieces))


@settings(max_examples=100, deadline=None)
@given(stops=stop_sets, pieces=st.lists(letters, max_size=6))
def test_only_what_may_become_a_stop_is_held_back(stops: tuple[str, ...], pieces: list[str]) -> None:
    """Half a stop string would be shown, or text kept back that nothing can turn into a match."""
    matcher = StopMatcher(stops)
    shown, seen = "", ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown, seen = shown + text, seen + piece
        if matched:
            return
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert shown == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("own fox",), ["A B ", "o", "wn f", "ox", " C"], ("A B ", True)),
        (("own fox",), ["A B ", "own"], ("A B own", False)),
        (("ab", "abc"), ["x", "a", "b", "c"], ("x", True)),
        (("abc", "bcd"), ["xabx", "abcd"], ("xabx", True)),
        (("bb",), ["ab", "bb"], ("a", True)),
        (("aab",), ["aaa", "ab!"], ("aa", True)),
        (("停止。",), ["好的停", "止", "。再见"], ("好的", True)),
        (("\nQuestion:",), ["Paris.\n", "Quest", "ions?"], ("Paris.\nQuestions?", False)),
        ((), ["anything", ""], ("anything", False)),
    ],
)
def test_stops_across_token_borders(stops: tuple[str, ...], pieces: list[str], expected: tuple[str, bool]) -> None:
    """Looking at the newest token alone misses the stop, or shows half of it; a dangling beginning must not be lost."""
    assert stream(stops, pieces) == expected


def test_nothing_is_shown_after_a_match() -> None:
    """Text after the stop would reach the caller."""
    matcher = StopMatcher(("!",))
    assert matcher.push("a!b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_long_stop_strings_cost_no_more_per_character() -> None:
    """A periodic text against a long stop string must not be searched again for each token."""
    matcher = StopMatcher(("a" * 20_000 + "b",))
    shown = "".join(matcher.push("a" * 50)[0] for _ in range(1_000))
    assert shown == "a" * 30_000
    assert matcher.push("b")[1]
