"""The parts of a question that normalization never touches.

Invariants and semantics: code (fenced, inline, indented, lines and words that look like it), quotes of every kind,
quoted lines, tables, URLs, e-mail addresses and paths are protected, with the blanks next to a code word. What looks
open at the end of the text (a fence, a quote) is protected to the end. When in doubt a part is protected: leaving a
blank too many costs nothing, changing code does. Every scan is linear in the length of the text.

Not here: numbers, names and emoji; the rules of ``normalize`` and ``fillers`` never match inside them.
"""

from __future__ import annotations

import re

CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Letters of Chinese and Japanese, for character classes."""

BLANKS = " \\t\u00a0\u3000"
"""Blanks inside a line, for character classes."""

# What prose does not use inside a word: calls, operators, options, paths, URLs, addresses.
_CODE_CHARACTERS = re.compile(r"[#$%&()*+/<=>@\[\\\]^_`{|}]|::|--|~~|^-[A-Za-z]|[A-Za-z]\.[A-Za-z]|\w!=")
_ASCII_WORD = re.compile(r"[!-~]+")
_BLANK = frozenset(" \t\u00a0\u3000")

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})(.*)$", re.MULTILINE)
_BACKTICKS = re.compile(r"`+")
_INDENTED = re.compile(r"(?: {4}|\t)")
_CODE_LINE = re.compile(
    r"""
      \s*(?:>|\#!|\#include\b|//|/\*|\$\ |>>>|\.\.\.\ |@\w+\s*$|--\s|</?\w)  # quote, shell, comment, tag
    | .*[;{}]\s*$                                                            # end of a statement or block
    | \s*(?:def|class|if|elif|else|for|while|try|except|with|async|import|from|return|function|func|fn|let|const|var
         |public|private|protected|static|void|using|namespace|package|struct|enum|interface|lambda|print|echo)\b
         .*[()\[\]{}=<>:]
    | \s*(?:import|from|using|package|return|raise|throw|goto)\s+[A-Za-z_][\w.]*\s*$
    | \s*[A-Za-z_][\w.\[\]]*\s*(?:[-+*/%&|^:]?=|<-)                           # assignment
    | (?!.*[CJK]).*[\w)\]"']\s*(?:[-+*/%&|^:=!<>]?=|->|=>|&&|\|\||<<|>>|::)\s*[\w(\["'{-]  # operator between values
    | .*[;)}\]]\s*(?:\#|//|/\*)                                               # comment after a statement
    | .*\|.*\|                                                               # table
    | .*\t                                                                   # tab separated
    | \s+[-*+]\ +\S                                                         # item of an indented list
    | \s*(?i:select|insert|update|delete|create|alter|drop)\s+\S.*\s(?i:from|into|set|table|where|values)\b
    """.replace("CJK", CJK),
    re.VERBOSE,
)
_CALL = re.compile(r"[\w)\]][(\[{]")
_WIDE_GAP = re.compile(r"\S {3,}\S")
_QUOTE_MARKS = re.compile(r"[“”„‘’「」『』《》〈〉«»‹›]")
_CLOSERS = {"“": "”", "„": "“”", "‘": "’", "「": "」", "『": "』", "《": "》", "〈": "〉", "«": "»", "‹": "›"}
_DOUBLE_QUOTE = re.compile(r'"')
_SINGLE_OPENER = re.compile(r"(?<![0-9A-Za-z'])'(?=\S)")
_SINGLE_CLOSER = re.compile(r"(?<=\S)'(?![0-9A-Za-z'])")
_PARAGRAPH_END = re.compile(r"\n[ \t\r]*\n")


class Shield:
    """Marks the protected characters of one text."""

    __slots__ = ("_marks", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._marks = bytearray(len(text))
        self._protect_fences()
        self._protect_backticks()
        self._protect_lines()
        self._protect_paired_quotes()
        self._protect_plain_quotes()
        self._protect_code_words()

    def covers(self, start: int, end: int) -> bool:
        """Whether any character of ``[start, end)`` is protected."""
        return self._marks.find(1, start, end) >= 0

    def _protect(self, start: int, end: int) -> None:
        if start < end:
            self._marks[start:end] = b"\x01" * (end - start)

    def _protect_fences(self) -> None:
        opened: tuple[int, str] | None = None
        for match in _FENCE.finditer(self._text):
            fence, rest = match.groups()
            if opened is None:
                if "`" not in rest:
                    opened = match.start(), fence
            elif fence.startswith(opened[1]) and not rest.strip():
                self._protect(opened[0], match.end())
                opened = None
        if opened is not None:
            self._protect(opened[0], len(self._text))

    def _protect_backticks(self) -> None:
        runs = [match.span() for match in _BACKTICKS.finditer(self._text) if not self.covers(*match.span())]
        next_of_length: dict[int, list[int]] = {}
        for position in range(len(runs) - 1, -1, -1):
            start, end = runs[position]
            next_of_length.setdefault(end - start, []).append(position)
        position = 0
        while position < len(runs):
            start, end = runs[position]
            later = next_of_length[end - start]
            while later and later[-1] <= position:
                later.pop()
            if later:
                position = later[-1]
                self._protect(start, runs[position][1])
            else:
                line_end = self._text.find("\n", end) if end - start < 3 else -1
                self._protect(start, len(self._text) if line_end < 0 else line_end)
            position += 1

    def _protect_lines(self) -> None:
        lines = self._text.split("\n")
        several = sum(1 for line in lines if line and not line.isspace()) > 1
        first_code: int | None = None
        start, previous_start, gap_before = 0, 0, False
        for line in lines:
            end = start + len(line)
            gap = _WIDE_GAP.search(line) is not None
            if not line or line.isspace():
                first_code = None
            elif _CODE_LINE.match(line) or (several and _INDENTED.match(line)):
                # Lines between two lines of code in one paragraph are code too.
                first_code = start if first_code is None else first_code
                self._protect(first_code, end)
            elif call := _CALL.search(line):
                # From the bracket on: "f( a,  b )" has blanks between its words.
                self._protect(start + call.start(), start + max(map(line.rfind, ")]}"), default=-1) + 1)
            if gap and gap_before:
                self._protect(previous_start, end)
            previous_start, gap_before = start, gap
            start = end + 1

    def _protect_paired_quotes(self) -> None:
        opened: list[tuple[int, str]] = []
        for match in _QUOTE_MARKS.finditer(self._text):
            start, mark = match.start(), match.group()
            if self._marks[start]:
                continue
            apostrophe = mark == "’" and self._text[start + 1 : start + 2].isalpha()
            if opened and mark in opened[-1][1] and not apostrophe:
                outer, _ = opened.pop()
                if not opened:
                    self._protect(outer, match.end())
            elif mark in _CLOSERS:
                opened.append((start, _CLOSERS[mark]))
        if opened:
            self._protect(opened[0][0], len(self._text))

    def _protect_plain_quotes(self) -> None:
        start = 0
        for end in [match.start() for match in _PARAGRAPH_END.finditer(self._text)] + [len(self._text)]:
            self._protect_double_quotes(start, end)
            start = end
        start = 0
        for line in self._text.split("\n"):
            self._protect_single_quotes(start, start + len(line))
            start += len(line) + 1

    def _protect_double_quotes(self, start: int, end: int) -> None:
        opened: int | None = None
        for match in _DOUBLE_QUOTE.finditer(self._text, start, end):
            mark = match.start()
            if self._marks[mark]:
                continue
            if opened is not None:
                self._protect(opened, mark + 1)
                opened = None
            elif mark == 0 or not (self._text[mark - 1].isascii() and self._text[mark - 1].isalnum()):
                # After a digit or letter it is an inch mark or a typing slip, not an opening quote.
                opened = mark
        if opened is not None:
            self._protect(opened, end)

    def _protect_single_quotes(self, start: int, end: int) -> None:
        opener = _SINGLE_OPENER.search(self._text, start, end)
        if opener is None:
            return
        closers = [match.end() for match in _SINGLE_CLOSER.finditer(self._text, opener.end(), end)]
        if closers:
            self._protect(opener.start(), closers[-1])

    def _protect_code_words(self) -> None:
        for match in _ASCII_WORD.finditer(self._text):
            if not _CODE_CHARACTERS.search(match.group()):
                continue
            # Blanks beside a code word belong to the code ("x  =  1"), unless they begin or end the line.
            start, end = match.span()
            before, after = start, end
            while before and self._text[before - 1] in _BLANK:
                before -= 1
            while after < len(self._text) and self._text[after] in _BLANK:
                after += 1
            inside_left = before and self._text[before - 1] != "\n"
            inside_right = after < len(self._text) and self._text[after] not in "\r\n"
            self._protect(before if inside_left else start, after if inside_right else end)
