"""The capacity tables of ``docs/scale.md``: what a deployment of a given load needs, and where it breaks first.

    python -m bench.capacity [--write]

Invariants and semantics: every table is made from ``Inputs`` and nothing else. ``--write`` puts the tables into the
document; a test keeps them equal.

Not here: the arithmetic (``plan``, ``store_use``), what it starts from (``inputs``).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench.entries import EntryBytes
from bench.inputs import Inputs
from bench.plan import GIB, Plan
from bench.store_use import bytes_per_question

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
QUESTIONS_PER_MINUTE = (1_000, 100_000, 10_000_000)


def tables(inputs: Inputs) -> dict[str, str]:
    """Every generated part of the document, by the name of its mark."""
    return {
        "inputs": _inputs_table(inputs),
        "entries": _entries_table(inputs),
        "plans": _plans_table(inputs),
        "limits": _limits_table(inputs),
        "joined": _plans_table(inputs.joined()),
        "joined-limits": _limits_table(inputs.joined()),
    }


def filled(document: str, parts: dict[str, str]) -> str:
    """The document with every marked part replaced.

    Raises:
        ValueError: a mark is missing.
    """
    for name, table in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not mark.search(document):
            raise ValueError(f"the document has no part {name!r}")
        document = mark.sub(lambda found, text=table: f"{found[1]}{text}{found[2]}", document)  # type: ignore[misc]
    return document


def _table(*rows: Sequence[str]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def _inputs_table(inputs: Inputs) -> str:
    rows = [
        (f"`{item.name}`", _number(getattr(inputs, item.name)), item.metadata["source"], item.metadata["why"])
        for item in fields(inputs)
    ]
    return _table(("input", "value", "is", "from"), *rows)


def _entries_table(inputs: Inputs) -> str:
    sizes = EntryBytes.encoded(inputs)
    kept = bytes_per_question(inputs, sizes)
    return _table(
        ("entry", "bytes in its envelope", "per question"),
        (f"work item, {inputs.prompt_tokens} prompt tokens", _number(sizes.work), "1, until its outcome"),
        ("started", _number(sizes.started), "1"),
        (f"delta of {_number(inputs.tokens_per_delta)} token(s)", _number(sizes.delta), _number(inputs.num_deltas)),
        (f"outcome, {inputs.answer_tokens} answer tokens", _number(sizes.result), "2: in the log and by itself"),
        ("request record", _number(sizes.record), f"1/{inputs.questions_per_request}"),
        ("kept per question, with overhead", _number(kept), f"for {_number(inputs.retention_s)} s"),
    )


def _plans_table(inputs: Inputs) -> str:
    plans = [Plan.of(rate, inputs) for rate in QUESTIONS_PER_MINUTE]
    rows: list[tuple[str, list[str]]] = [
        ("questions per second", [_number(p.questions_per_s) for p in plans]),
        ("a question's time in its slot, s", [_number(p.service_s) for p in plans]),
        ("busy slots", [_number(p.busy_slots) for p in plans]),
        ("deployments (tags, stores)", [_number(p.num_deployments) for p in plans]),
        ("inference nodes, spares included", [_number(p.num_nodes) for p in plans]),
        ("channels per deployment", [_number(p.num_channels) for p in plans]),
        ("questions that wait for a slot", [f"{p.wait_share:.1%}" for p in plans]),
        ("mean wait for a slot, ms", [_number(p.wait_ms) for p in plans]),
        ("messages written per second", [_number(p.messages_per_s) for p in plans]),
        ("scripts per second", [_number(p.scripts_per_s) for p in plans]),
        ("busy cores of all stores", [_number(p.store_cores) for p in plans]),
        ("kept in all stores, GiB", [_number(p.store_bytes / GIB) for p in plans]),
        ("busy cores of one aggregator per deployment, all together", [_number(p.aggregator_cores) for p in plans]),
        ("busy cores of all routers", [_number(p.router_cores) for p in plans]),
        ("first bottleneck", [p.first_bottleneck for p in plans]),
    ]
    heads = ["questions per minute", *(f"{rate:,}" for rate in QUESTIONS_PER_MINUTE)]
    return _table(heads, *([name, *cells] for name, cells in rows))


def _limits_table(inputs: Inputs) -> str:
    plans = [Plan.of(rate, inputs) for rate in QUESTIONS_PER_MINUTE]
    heads = ["deployments needed by", *(f"{rate:,}" for rate in QUESTIONS_PER_MINUTE)]
    return _table(heads, *([name, *(_number(p.limits[name]) for p in plans)] for name in plans[0].limits))


def _number(value: float) -> str:
    """Three digits that mean something, thousands apart."""
    if 0 < value < 0.001:
        return "< 0.001"
    if value == 0 or value >= 100:
        return f"{value:,.0f}" if value < 10_000 else f"{round(value, 2 - math.floor(math.log10(value))):,.0f}"
    return f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables or put them into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put them into {DOCUMENT.name}")
    arguments = parser.parse_args(argv)
    parts = tables(Inputs())
    if arguments.write:
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), parts), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{table}" for name, table in parts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
