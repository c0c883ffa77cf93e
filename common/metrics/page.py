"""The table of metrics in docs/operations.md.

Invariants and semantics: made from the catalogue alone; ``python -m common.metrics.page`` writes it into the checkout
it is started in, and a test fails while it is out of date.

Not here: the meaning of each metric (``catalogue``).
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from common.metrics.catalogue import METRICS

PAGE_PATH = Path("docs/operations.md")
_BEGIN, _END = "<!-- metrics -->\n", "<!-- /metrics -->\n"


def render_table() -> str:
    """One row per metric, by tier."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for tier, metrics in groupby(METRICS, lambda metric: metric.tier):
        lines.append(f"| **{tier}** | | | |")
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it is now.

    Raises:
        ValueError: the page does not say where the table goes.
    """
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{render_table()}{_END}{after}"


if __name__ == "__main__":
    PAGE_PATH.write_text(with_table(PAGE_PATH.read_text(encoding="utf-8")), encoding="utf-8")
