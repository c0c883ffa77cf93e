"""Compares an answer shown in a document with the answer that Kev really gave.

Numbers, hashes and generated text differ from run to run; names, order and structure may not. An error is compared
word for word.
"""

from __future__ import annotations

import json
import re

_EXACT = frozenset({"reason", "message", "field", "state", "mode", "level", "verdict", "type"})
"""Text under these keys is the same in every run."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FIELD = re.compile(r"(\w+)=\S+")
_ANSWER_MARK = "    | "


def json_difference(shown: object, real: object, place: str = "$") -> str | None:
    """Where the structure of two JSON values differs, or None. A value that is null on either side fits any other."""
    if shown is None or real is None:
        return None
    if isinstance(shown, dict) and isinstance(real, dict):
        if list(shown) != list(real):
            return f"{place} has the keys {list(shown)}, really {list(real)}"
        found = (_member_difference(key, shown[key], real[key], f"{place}.{key}") for key in shown)
        return next((difference for difference in found if difference), None)
    if isinstance(shown, list) and isinstance(real, list):
        if len(shown) > len(real):
            return f"{place} shows {len(shown)} items, really {len(real)}"
        found = (json_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(shown, real, strict=False)))
        return next((difference for difference in found if difference), None)
    return None if _kind(shown) is _kind(real) else f"{place} shows {shown!r}, really {real!r}"


def _member_difference(key: str, shown: object, real: object, place: str) -> str | None:
    if key in _EXACT and isinstance(shown, str) and shown != real:
        return f"{place} shows {shown!r}, really {real!r}"
    return json_difference(shown, real, place)


def _kind(value: object) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def text_difference(shown: str, real: str) -> str | None:
    """The first line shown whose shape does not come next somewhere in the real output, or None."""
    remaining = iter(_line_shape(line) for line in real.splitlines())
    for line in shown.splitlines():
        shape = _line_shape(line)
        if not any(shape == other for other in remaining):
            return f"no line like {line!r} (shape {shape!r}) in the output"
    return None


def _line_shape(line: str) -> str:
    if line.startswith("data: "):
        return f"data: {_json_shape(json.loads(line.removeprefix('data: ')))}"
    if line.startswith(_ANSWER_MARK):
        return _ANSWER_MARK
    return _NUMBER.sub("0", _FIELD.sub(r"\1=", line))


def _json_shape(value: object) -> object:
    if isinstance(value, dict):
        exact = {key: item for key, item in value.items() if key in _EXACT and isinstance(item, str)}
        return {key: exact.get(key, _json_shape(item)) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_shape(item) for item in value]
    return ""
