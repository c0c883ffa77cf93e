"""Removes from a question what carries no information, so that tokens are spent on the question itself.

Invariants and semantics: a pure function that only deletes: ``removed`` holds every deleted piece in order, so
``len(text) + sum(map(len, removed))`` is the length of the original. Applying it twice changes nothing more. A
question with content keeps content. ``off`` changes nothing.

- ``light``: full-width marks that repeat (``。。。。`` to ``。``); ``!``, ``?`` and dots from three and four on
  (``!!!!`` to ``!``, ``.....`` to ``...``), since ``!!``, ``??`` and ``..`` are operators; runs of blanks; blanks
  around the text and at line ends; empty lines beyond one. ``...`` and ``……`` stay.
- ``full``: also filler words and empty prefixes (``fillers``).

Code, quotes, URLs and the like are never touched (``protected``), nor are numbers, names, emoji, or ASCII marks that
do not follow a word.

Not here: validation (``common.request``), prompt rendering (``common.tokenization``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from common.types import NormalizeLevel
from router_svc.fillers import filler_spans
from router_svc.protected import BLANKS, CJK, Shield

_MAX_PASSES = 8

_MARKS = re.compile(r"[!?！？。，、；～]{2,}")
_DOTS = re.compile(r"\.{4,}")
_ELLIPSES = re.compile(r"…{3,}")
_BLANK_RUN = re.compile(rf"[{BLANKS}]+")
_EMPTY_LINES = re.compile(r"(\r?\n[ \t]*+\r?\n)((?:[ \t]*+\r?\n)+)")
_AFTER_WORD = re.compile(rf"(?:[^\W\d_][^\W\d_]|[{CJK}]|[)\]}}\"'”’」』])\Z")
_BEFORE_BORDER = re.compile(rf"\s|\Z|[{CJK}]|[)\]}}\"'”’」』]")
_HALF_WIDTH = {"！": "!", "？": "?"}
_MIN_ASCII_MARKS = 3

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalized:
    """A question after normalization."""

    text: str
    removed: tuple[str, ...] = ()
    """Pieces of the original that are gone, in order."""

    @property
    def num_removed_chars(self) -> int:
        """Characters that are gone."""
        return sum(map(len, self.removed))


def normalize(text: str, level: NormalizeLevel) -> Normalized:
    """Apply the rules of ``level`` until none applies any more.

    A text on which the rules do not come to rest within a few passes (nested fillers by the hundred) is no question a
    person wrote; it is left alone.
    """
    if level is NormalizeLevel.OFF:
        return Normalized(text=text)
    current, kept = text, [(0, len(text))]
    for _ in range(_MAX_PASSES):
        spans = _removable(current, level)
        if not spans:
            return Normalized(text=current, removed=tuple(_gaps(text, kept)))
        kept = _cut(kept, spans)
        current = "".join(text[start:end] for start, end in kept)
    return Normalized(text=text)


def _removable(text: str, level: NormalizeLevel) -> list[Span]:
    """What one pass deletes: ascending, disjoint, and never everything."""
    shield = Shield(text)
    found = [span for span in _light_spans(text) if not shield.covers(*span)]
    if level is NormalizeLevel.FULL:
        fillers = [span for span in filler_spans(text) if not shield.covers(*span)]
        if _has_content(text, fillers):
            found += fillers
    spans = _merged(found)
    return spans if sum(end - start for start, end in spans) < len(text) else []


def _light_spans(text: str) -> Iterator[Span]:
    for match in _MARKS.finditer(text):
        yield from _repeated_marks(text, match.start(), match.end())
    for match in _DOTS.finditer(text):
        if _stands_after_word(text, match.start(), match.end()):
            yield match.start() + 3, match.end()
    for match in _ELLIPSES.finditer(text):
        yield match.start() + 2, match.end()
    for match in _EMPTY_LINES.finditer(text):
        yield match.span(2)
    for match in _BLANK_RUN.finditer(text):
        yield from _needless_blanks(text, match.start(), match.end())
    yield from _outer_lines(text)


def _repeated_marks(text: str, start: int, end: int) -> Iterator[Span]:
    """Each kind of mark stays once, in order of first appearance."""
    marks = text[start:end]
    if marks.isascii() and not (end - start >= _MIN_ASCII_MARKS and _stands_after_word(text, start, end)):
        return
    seen: set[str] = set()
    for position, mark in enumerate(marks, start):
        kind = _HALF_WIDTH.get(mark, mark)
        if kind in seen:
            yield position, position + 1
        seen.add(kind)


def _stands_after_word(text: str, start: int, end: int) -> bool:
    """Whether ASCII marks end a clause: operators, factorials (``n!!``) and blanks to fill in do not."""
    return (
        _AFTER_WORD.search(text, max(0, start - 2), start) is not None and _BEFORE_BORDER.match(text, end) is not None
    )


def _needless_blanks(text: str, start: int, end: int) -> Iterator[Span]:
    line_starts = start == 0 or text[start - 1] == "\n"
    line_ends = end == len(text) or text[end] in "\r\n"
    if line_ends or start == 0:
        yield start, end
    elif not line_starts and end - start > 1 and not (text[start - 1].isdigit() and text[end].isdigit()):
        yield start + 1, end


def _outer_lines(text: str) -> Iterator[Span]:
    """Empty lines before and after the text; the first line keeps its indentation (it may be code)."""
    body = text.lstrip("\r\n")
    if body != text:
        yield 0, len(text) - len(body)
    body = text.rstrip("\r\n")
    if body != text:
        yield len(body), len(text)


def _has_content(text: str, removed: list[Span]) -> bool:
    return any(character.isalnum() for start, end in _complement(removed, len(text)) for character in text[start:end])


def _complement(spans: list[Span], length: int) -> Iterator[Span]:
    position = 0
    for start, end in spans:
        yield position, start
        position = end
    yield position, length


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _cut(kept: list[Span], spans: list[Span]) -> list[Span]:
    """Take ``spans``, counted in the text that ``kept`` leaves, out of ``kept``, counted in the original."""
    result: list[Span] = []
    offset, index = 0, 0
    for start, end in kept:
        here = start
        while index < len(spans) and spans[index][0] < offset + end - start:
            cut_start, cut_end = (start + max(0, position - offset) for position in spans[index])
            if here < cut_start:
                result.append((here, cut_start))
            here = min(cut_end, end)
            if cut_end > end:
                break
            index += 1
        if here < end:
            result.append((here, end))
        offset += end - start
    return result


def _gaps(text: str, kept: list[Span]) -> Iterator[str]:
    position = 0
    for start, end in [*kept, (len(text), len(text))]:
        if position < start:
            yield text[position:start]
        position = end
