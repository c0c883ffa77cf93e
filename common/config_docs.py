"""The configuration as an example file and as a page of documentation.

Invariants and semantics: both are made from ``Config.describe`` alone; ``python -m common.config_docs`` writes them
into the checkout it is started in, and a test fails while they are out of date.

Not here: the words of one field (``common.config_text``).
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from common.config import Config
from common.config_source import dump_yaml
from common.config_text import ConfigField

EXAMPLE_PATH = Path("deploy/examples/kev.yaml")
PAGE_PATH = Path("docs/configuration.md")

_PAGE_HEAD = """\
# Configuration

Kev reads one YAML file with the single top key `kev`; every key may be left out. `kev config check` says what is
wrong or probably not meant, `kev config show` prints what holds. Each key can be overridden by an environment variable:
`kev.router.strategy` by `KEV__ROUTER__STRATEGY`. An unknown key or variable is an error that names the nearest known
one. YAML is read by its 1.2 rules: `off` and `yes` are text, `true` and `false` are booleans.

A file with every key: [deploy/examples/kev.yaml](../deploy/examples/kev.yaml). This page is generated from
`common/config_sections.py` by `python -m common.config_docs`.
"""


def render_default_yaml() -> str:
    """A ``kev.yaml`` with every field at its default, under its documentation."""
    lines = ["# Every setting of Kev at its default; each may be left out.", "kev:"]
    for section, fields in groupby(Config.describe(), lambda field: field.section):
        lines.append(f"  {section}:")
        for field in fields:
            lines += [f"    # {field.description}", f"    {field.key}: {_yaml_value(field)}  # {field.allowed}"]
    return "\n".join(lines) + "\n"


def render_page() -> str:
    """``docs/configuration.md``: one table per section."""
    lines = [_PAGE_HEAD]
    for section, fields in groupby(Config.describe(), lambda field: field.section):
        lines += [f"## kev.{section}", "", "| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{field.key}` | `{_yaml_value(field)}` | {field.allowed} | {field.description} |" for field in fields
        ]
        lines.append("")
    return "\n".join(lines)


def _yaml_value(field: ConfigField) -> str:
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return dump_yaml(value, flow=True).strip()


if __name__ == "__main__":
    EXAMPLE_PATH.write_text(render_default_yaml(), encoding="utf-8")
    PAGE_PATH.write_text(render_page(), encoding="utf-8")
