"""The configuration in words: one row per field, the allowed values, and validation errors as sentences.

Invariants and semantics: whatever is said about a field (documentation, the example file, an error) comes from its
one definition in ``common.config``: its docstring, its default and its constraints.

Not here: the fields themselves (``common.config``), reading files and environment (``common.config_source``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, get_args

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from common.wording import alternatives, named, nearest, shown

_KINDS: Mapping[type, str] = MappingProxyType({int: "an integer", float: "a finite number", str: "text"})


@dataclass(frozen=True, slots=True)
class Allowed:
    """Annotation of a field whose allowed values need their own phrase."""

    phrase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField:
    """One key of ``kev.yaml``."""

    section: str
    key: str
    default: bool | int | float | str | tuple[int, ...] | tuple[str, ...]
    allowed: str
    """Allowed values as a phrase: ``an integer from 1 to 256``."""
    description: str
    """One line: what it does and its unit."""
    inner: tuple[tuple[str, str], ...] = ()
    """Of a list of mappings: the keys of one of them, and the allowed values of each."""

    @property
    def path(self) -> str:
        """Where it stands in the file: ``kev.router.strategy``."""
        return f"kev.{self.section}.{self.key}"

    @property
    def env(self) -> str:
        """The environment variable that overrides it."""
        return f"KEV__{self.section.upper()}__{self.key.upper()}"

    @property
    def is_text(self) -> bool:
        """Whether its value is text, which an environment variable gives without quotes."""
        return isinstance(self.default, str)


def describe(model: type[BaseModel]) -> tuple[ConfigField, ...]:
    """Every field of a tree of sections, in the order of the file."""
    return tuple(
        ConfigField(
            section=section,
            key=key,
            default=info.default.value if isinstance(info.default, StrEnum) else info.default,
            allowed=_allowed(info.annotation, info.metadata),
            description=" ".join((info.description or "").split()),
            inner=_inner(info.annotation),
        )
        for section, section_info in model.model_fields.items()
        for key, info in _fields_of(section_info).items()
    )


def sentences(error: ValidationError, fields: Sequence[ConfigField], from_env: Mapping[str, str]) -> list[str]:
    """One sentence per validation error.

    Args:
        error: what pydantic found.
        fields: every known field.
        from_env: path -> environment variable, for the values that came from the environment.
    """
    by_path = {field.path: field for field in fields}
    return [_sentence(dict(entry), by_path, from_env) for entry in error.errors(include_url=False)]


def unknown_key(parent: str, key: object, fields: Sequence[ConfigField]) -> str:
    """The sentence for a key that does not exist, with the nearest one that does: beside it, else anywhere."""
    if not isinstance(key, str):
        return f"{parent}: keys must be text, got {shown(key)}"
    sections = dict.fromkeys(f"kev.{field.section}" for field in fields)
    siblings = [field.path for field in fields if field.path.startswith(f"{parent}.")]
    beside = {path.rpartition(".")[2]: path for path in (siblings if parent != "kev" else sections)}
    anywhere = {field.key: field.path for field in fields} | {path.rpartition(".")[2]: path for path in sections}
    for candidates in (beside, anywhere):
        if guess := nearest(key, candidates):
            return f"{parent}{named(key)}: unknown key, did you mean {candidates[guess]}?"
    return f"{parent}{named(key)}: unknown key, known here are {', '.join(beside)}"


def _sentence(entry: dict[str, Any], by_path: Mapping[str, ConfigField], from_env: Mapping[str, str]) -> str:
    location: tuple[object, ...] = entry["loc"]
    path = ".".join(["kev", *(part for part in location[:2] if isinstance(part, str))])
    if entry["type"] == "broken_rule":
        path = f"{path}.{entry['ctx']['key']}"
        return f"{from_env.get(path, path)}: {entry['ctx']['message']}"
    if len(location) > 3 and isinstance(location[2], int):
        return _inner_sentence(entry, from_env.get(path, path), by_path[path])
    if entry["type"] in ("extra_forbidden", "invalid_key"):
        parent = ".".join(["kev", *map(str, location[:-1])])
        key = entry["input"] if entry["type"] == "invalid_key" else location[-1]
        return unknown_key(parent, key, tuple(by_path.values()))
    field = by_path.get(path)
    allowed = field.allowed if field else "a mapping of keys to values"
    item = f" at place {location[2]}" if len(location) > 2 else ""
    return f"{from_env.get(path, path)}: must be {allowed}, got {shown(entry['input'])}{item}"


def _inner_sentence(entry: dict[str, Any], path: str, field: ConfigField) -> str:
    """The sentence for a value inside one mapping of a list."""
    index, key = entry["loc"][2:4]
    place, allowed = f"{path}[{index}]{named(str(key))}", dict(field.inner).get(key)
    if allowed is None:
        guess = nearest(str(key), dict(field.inner))
        hint = f"did you mean {guess}?" if guess else f"known here are {', '.join(dict(field.inner))}"
        return f"{place}: unknown key, {hint}"
    if entry["type"] == "missing":
        return f"{place}: is missing, must be {allowed}"
    item = f" at place {entry['loc'][4]}" if len(entry["loc"]) > 4 else ""
    return f"{place}: must be {allowed}, got {shown(entry['input'])}{item}"


def _inner(annotation: object) -> tuple[tuple[str, str], ...]:
    kind = next(iter(get_args(annotation)), None)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return ()
    return tuple((key, _allowed(info.annotation, info.metadata)) for key, info in kind.model_fields.items())


def _fields_of(section: FieldInfo) -> dict[str, FieldInfo]:
    kind = section.annotation
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def _allowed(annotation: object, metadata: Sequence[object]) -> str:
    for item in metadata:
        if isinstance(item, Allowed):
            return item.phrase
    if annotation is bool:
        return "true or false"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return f"one of {alternatives(list(annotation))}"
    kind = next(words for kind, words in _KINDS.items() if annotation is kind)
    return f"{kind}{_limits(metadata)}"


def _limits(limits: Sequence[object]) -> str:
    low = next((f"{limit.ge}" for limit in limits if isinstance(limit, annotated_types.Ge)), "")
    above = next((f"{limit.gt}" for limit in limits if isinstance(limit, annotated_types.Gt)), "")
    high = next((f"{limit.le}" for limit in limits if isinstance(limit, annotated_types.Le)), "")
    if low and high:
        return f" from {low} to {high}"
    if above and high:
        return f" above {above} and up to {high}"
    if low or above:
        return f" of at least {low}" if low else f" above {above}"
    longest = next((limit.max_length for limit in limits if isinstance(limit, annotated_types.MaxLen)), None)
    shortest = next((limit.min_length for limit in limits if isinstance(limit, annotated_types.MinLen)), 0)
    if longest:
        return f" of {shortest} to {longest} characters"
    return ", not empty" if shortest else ""
