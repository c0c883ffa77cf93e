"""What a single field of a request may hold: one small rule per kind of value.

Invariants and semantics: a rule takes any Python object and returns the plain value, or raises ``WrongValue`` with
everything that is wrong; it runs no code of foreign objects. Types are strict: ``true`` is no integer, ``3.0`` is
none either; an integer is a number. NaN, infinities and numbers out of range are refused alike.

Not here: which field has which rule (``common.request``).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from common.wording import alternatives, is_a, shown

Rule = Callable[[object], object]

_E = TypeVar("_E", bound=StrEnum)

_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_INVISIBLE_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Fillers that Unicode counts as letters or symbols, though they show nothing."""


class WrongValue(Exception):
    """A value breaks its rule.

    Attributes:
        flaws: (place inside the value such as ``[3]``, or empty; sentence) for everything that is wrong.
    """

    def __init__(self, flaws: list[tuple[str, str]]) -> None:
        super().__init__(flaws)
        self.flaws = flaws


def integer(low: int, high: int) -> Rule:
    """An integer from ``low`` to ``high``."""

    def check(value: object) -> int:
        if is_a(value, int) and not is_a(value, bool):
            number = int.__int__(value)
            if low <= number <= high:
                return number
        raise _wrong(f"must be an integer from {low} to {high}", value)

    return check


def number(low: float, high: float, *, above_low: bool = False) -> Rule:
    """A finite number from ``low`` (or above it, with ``above_low``) to ``high``."""
    limits = f"above {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"

    def check(value: object) -> float:
        plain: int | float | None = None
        if is_a(value, float):
            plain = float.__float__(value)
        elif is_a(value, int) and not is_a(value, bool):
            plain = int.__int__(value)
        if plain is not None and low <= plain <= high and not (above_low and plain == low):
            return float(plain) + 0.0  # + 0.0 turns -0.0 into 0.0
        raise _wrong(f"must be a finite number {limits}", value)

    return check


def flag(value: object) -> bool:
    """True or false."""
    if not is_a(value, bool):
        raise _wrong("must be true or false", value)
    return value


def one_of(kind: type[_E]) -> Rule:
    """A member of ``kind``, or its text."""
    members = {member.value: member for member in kind}

    def check(value: object) -> _E:
        if is_a(value, str) and (member := members.get(str.__str__(value))):
            return member
        raise _wrong(f"must be one of {alternatives(members)}", value)

    return check


def name(max_chars: int, *, may_be_empty: bool = False) -> Rule:
    """An identifier of ASCII letters, digits and ``. _ : -``."""
    fewest = 0 if may_be_empty else 1

    def check(value: object) -> str:
        if is_a(value, str):
            text = str.__str__(value)
            if fewest <= len(text) <= max_chars and _NAME_CHARS.issuperset(text):
                return text
        raise _wrong(f"must be {fewest} to {max_chars} of the characters A-Z a-z 0-9 . _ : -", value)

    return check


def label(max_chars: int) -> Rule:
    """Printable text of one line; may be empty."""

    def check(value: object) -> str:
        if is_a(value, str):
            text = str.__str__(value)
            if len(text) <= max_chars and text.isprintable():
                return text
        raise _wrong(f"must be text of at most {max_chars} printable characters", value)

    return check


def content(max_bytes: int, *, may_be_blank: bool = False) -> Rule:
    """Text for the model: of limited size, whole Unicode characters, no NUL, and something to see in it."""

    def check(value: object) -> str:
        if not is_a(value, str):
            raise _wrong("must be text", value)
        text = str.__str__(value)
        if len(text) > max_bytes:  # a character has at least one byte
            raise WrongValue([("", f"must be at most {max_bytes} bytes of UTF-8, got {len(text)} characters")])
        num_bytes = len(_encoded(text))
        if num_bytes > max_bytes:
            raise WrongValue([("", f"must be at most {max_bytes} bytes of UTF-8, got {num_bytes}")])
        if not may_be_blank and _is_blank(text):
            raise _wrong("must not be blank", text)
        return text

    return check


def stop_string(max_chars: int) -> Rule:
    """A string that ends an answer; blanks count."""

    def check(value: object) -> str:
        if not is_a(value, str) or not 1 <= str.__len__(value) <= max_chars:
            raise _wrong(f"must be text of 1 to {max_chars} characters", value)
        text = str.__str__(value)
        _encoded(text)
        return text

    return check


def list_of(rule: Rule, max_items: int, *, or_one: bool = False) -> Rule:
    """A list or tuple of values that follow ``rule``; with ``or_one`` also a single text instead of a list."""

    def check(value: object) -> tuple[object, ...]:
        if or_one and is_a(value, str):
            return (rule(value),)
        items = plain_items(value)
        if items is None or len(items) > max_items:
            raise _wrong(f"must be a list of at most {max_items} items", value)
        found: list[object] = []
        flaws: list[tuple[str, str]] = []
        for index, item in enumerate(items):
            try:
                found.append(rule(item))
            except WrongValue as error:
                flaws += [(f"[{index}]{place}", message) for place, message in error.flaws]
        if flaws:
            raise WrongValue(flaws)
        return tuple(found)

    return check


def plain_items(value: object) -> tuple[object, ...] | None:
    """The items of a list or tuple, read without its own methods; ``None`` for anything else."""
    if is_a(value, list):
        return tuple(list.__getitem__(value, slice(None)))
    if is_a(value, tuple):
        return tuple(tuple.__getitem__(value, slice(None)))
    return None


def _encoded(text: str) -> bytes:
    if (place := text.find("\0")) >= 0:
        raise WrongValue([("", f"must not contain the character NUL, found at character {place}")])
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        message = f"must be whole Unicode characters, got half a surrogate pair at character {error.start}"
        raise WrongValue([("", message)]) from None


def _is_blank(text: str) -> bool:
    return not text.strip() or all(
        char in _INVISIBLE_LETTERS or unicodedata.category(char) in _INVISIBLE_CATEGORIES for char in set(text)
    )


def _wrong(right: str, value: object) -> WrongValue:
    return WrongValue([("", f"{right}, got {shown(value)}")])
