"""The words of an error: a bad value shown in short, a wrong name with the nearest right one.

Invariants and semantics: nothing here runs code of the value it describes (no ``__repr__``, ``__str__`` or
``__class__`` of foreign objects), nothing raises, and every sentence can be encoded as UTF-8.

Not here: what is right or wrong (``common.field_rules``, ``common.config``).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection
from typing import TypeGuard, TypeVar

_MAX_SHOWN_CHARS = 72
_MAX_GUESSED_CHARS = 64
_MAX_SHOWN_INTEGER = 10**24

_T = TypeVar("_T")
_type_name: Callable[[type], str] = type.__dict__["__name__"].__get__


def is_a(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether ``value`` is of ``kind`` by its real type; unlike ``isinstance`` it never asks ``value.__class__``."""
    return issubclass(type(value), kind)


def shown(value: object) -> str:
    """At most about 80 characters that let a caller recognise ``value``."""
    if value is None:
        return "null"
    if is_a(value, bool):
        return "true" if value else "false"
    if is_a(value, str):
        return _shown_text(str.__str__(value))
    if is_a(value, int):
        number = int.__int__(value)
        return str(number) if abs(number) < _MAX_SHOWN_INTEGER else "an integer of more than 24 digits"
    if is_a(value, float):
        return _shown_float(float.__float__(value))
    if is_a(value, list):
        return f"a list of length {list.__len__(value)}"
    if is_a(value, dict):
        return f"a mapping of length {dict.__len__(value)}"
    return f"a value of type {_type_name(type(value))[:_MAX_SHOWN_CHARS]}"


def named(name: str) -> str:
    """``name`` as part of a path: ``.name``, or quoted and clipped in brackets when it is no plain ASCII identifier."""
    is_plain = len(name) <= _MAX_GUESSED_CHARS and name.isascii() and name.isidentifier()
    return f".{name}" if is_plain else f"[{_shown_text(name)}]"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that ``name`` most resembles, or ``None``. Source: ``difflib`` (Ratcliff and Obershelp 1988)."""
    if len(name) > _MAX_GUESSED_CHARS:
        return None
    folded = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def alternatives(names: Collection[str]) -> str:
    """``names`` in one phrase: ``a, b or c``."""
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else last


def _shown_float(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    return repr(number)


def _shown_text(text: str) -> str:
    quoted = repr(text[:_MAX_SHOWN_CHARS])
    if len(text) <= _MAX_SHOWN_CHARS and len(quoted) <= _MAX_SHOWN_CHARS + 2:
        return quoted
    return f"{quoted[:_MAX_SHOWN_CHARS]}…"
