"""Where configuration comes from: a YAML file, and environment variables that override single keys.

Invariants and semantics: YAML is read by the 1.2 core rules, so ``off``, ``yes`` and ``1_000`` are text and only
``true``/``false`` are booleans; a key given twice is refused. ``KEV__ROUTER__STRATEGY`` overrides
``kev.router.strategy``; the value of a text field is taken as it is, any other is read as a YAML scalar or list.

Not here: what the keys mean and which values are right (``common.config``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from common.config_text import ConfigField
from common.errors import ConfigError
from common.wording import alternatives, nearest, shown

ENV_PREFIX = "KEV__"
_MAX_DEPTH = 32

_FLOAT = r"""[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+[eE][-+]?[0-9]+
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"""
# Source: YAML 1.2.2, sec. 10.3.2, without octal and hexadecimal integers.
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)


class _TooDeepError(Exception):
    """A value lies in more lists and mappings than any configuration needs."""


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the YAML 1.2 core schema, refusing duplicate keys and deep nests."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth >= _MAX_DEPTH:
            raise _TooDeepError
        self._depth += 1
        try:
            node: yaml.Node | None = super().compose_node(parent, index)
            return node
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                problem = f"the key {shown(key_node.value)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        found: dict[object, object] = super().construct_mapping(node, deep=deep)
        return found


class _CoreDumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would not read back as text."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Line breaks (NEL and U+2028 too) survive double quotes only.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_CoreDumper.add_representer(str, _represent_text)
_CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _CORE_SCHEMA:
    _regexp = re.compile(rf"^(?:{_pattern})$", re.VERBOSE)
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)
    _CoreDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)


def read_file(path: str | os.PathLike[str]) -> object:
    """The content of a YAML file.

    Raises:
        ConfigError: the file cannot be read or is not YAML; names the file and, where there is one, the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{shown_path(path)}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown_path(path)}: must be UTF-8 text, byte {error.start} is not") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown_path(path)}: cannot be read: {reason}") from None
    return _parse_yaml(text, shown_path(path))


def dump_yaml(value: object, *, flow: bool = False) -> str:
    """``value`` as YAML that every reader, of version 1.1 or 1.2, takes for the same value.

    Args:
        value: plain data: mappings, lists, text, numbers, booleans, ``None``.
        flow: on one line, as in ``[64, 512]``.
    """
    text: str = yaml.dump(
        value, Dumper=_CoreDumper, allow_unicode=True, sort_keys=False, default_flow_style=flow, width=2**31
    )
    return text.removesuffix("...\n")


def read_env(env: Mapping[str, str], fields: Iterable[ConfigField]) -> dict[ConfigField, object]:
    """The fields that ``env`` overrides, with their values.

    Raises:
        ConfigError: a ``KEV__`` variable names no field, or its value is not YAML.
    """
    known = {field.env: field for field in fields}
    found: dict[ConfigField, object] = {}
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX):
            continue
        if name not in known:
            guess = nearest(name, known)
            sections = sorted({f"{ENV_PREFIX}{field.section.upper()}__..." for field in known.values()})
            hint = f"did you mean {guess}?" if guess else f"names begin with {alternatives(sections)}"
            raise ConfigError(f"{shown(name)}: unknown environment variable, {hint}")
        found[known[name]] = value if known[name].is_text else _parse_yaml(value, name)
    return found


def _parse_yaml(text: str, origin: str) -> object:
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{origin}{where}: is not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{origin}, line {line}: has the character U+{error.character:04X}, not allowed") from None
    except _TooDeepError:
        raise ConfigError(f"{origin}: is nested too deeply, in more than {_MAX_DEPTH} lists and mappings") from None
    except ValueError as error:
        raise ConfigError(f"{origin}: is not valid YAML: {error}") from None


def shown_path(path: str | os.PathLike[str]) -> str:
    """``path`` as text that can always be encoded."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()
