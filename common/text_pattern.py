"""A pattern that an operator writes to recognise texts: plain text, ``*`` for anything, ``^`` for the start.

Invariants and semantics: a pattern matches anywhere in a text unless it begins with ``^``; ``*`` stands for any run of
characters, also none; case does not count. Only the first ``MAX_TEXT_CHARS`` characters of a text are looked at, and
matching takes time in proportion to them, whatever the pattern: there is no backtracking, because the leftmost place
of each part leaves the most room for the next. What looks like a regular expression is refused instead of never
matching.

Not here: which class a pattern stands for (``router_svc.strategies.prebucket``).
"""

from __future__ import annotations

import re

from common.wording import shown

MAX_PATTERN_CHARS = 128
MAX_TEXT_CHARS = 4096

_REGEX_SIGNS = re.compile(r"\\|\.[*+?]|\[[^\]]*\]|\(\?|\)[*+?]|(?<=\w)\|(?=\w)|\$\Z|\{\d*,?\d*\}")


class TextPattern:
    """One pattern; equal patterns are written equally."""

    __slots__ = ("_at_start", "_parts", "source")

    def __init__(self, source: str) -> None:
        """Read a pattern.

        Raises:
            ValueError: it is empty, too long, matches everything, or looks like a regular expression; says so.
        """
        if not 1 <= len(source) <= MAX_PATTERN_CHARS:
            raise ValueError(f"a pattern has 1 to {MAX_PATTERN_CHARS} characters, got {shown(source)}")
        found = _REGEX_SIGNS.search(source)
        if found is not None:
            raise ValueError(
                f"{shown(source)} looks like a regular expression ({shown(found.group())}), which is not read here; "
                "write plain text, * for anything between, and ^ in front for the start of the question"
            )
        self.source = source
        self._at_start = source.startswith("^")
        body = source[1:] if self._at_start else source
        self._at_start = self._at_start and not body.startswith("*")
        self._parts = tuple(part for part in body.lower().split("*") if part)
        if not self._parts:
            raise ValueError(f"{shown(source)} matches every question; write some text beside * and ^")

    def matches(self, folded: str) -> bool:
        """Whether a text has the pattern.

        Args:
            folded: from ``fold``.
        """
        position = 0
        for index, part in enumerate(self._parts):
            if index == 0 and self._at_start:
                if not folded.startswith(part):
                    return False
                position = len(part)
                continue
            place = folded.find(part, position)
            if place < 0:
                return False
            position = place + len(part)
        return True


def fold(text: str) -> str:
    """A text as ``TextPattern.matches`` wants it; once for all patterns."""
    return text[:MAX_TEXT_CHARS].lower()
