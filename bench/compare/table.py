"""The tables: for the terminal and, cell for cell the same, as Markdown for RESULTS.md.

Invariants and semantics: pure. A system without a number shows why in its place; nothing is left out silently.

Not here: the numbers (``readings``), the file around them (``report``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.compare.catalogue import SYSTEMS
from bench.compare.goals import Outcome
from bench.compare.readings import Reading, Status

COLUMNS = ("system", "tokens/s", "round, s", "first token, s", "question p50 / p99, s", "peak RSS, MiB", "changed")
GOAL_COLUMNS = ("work", "system", "over", "goal", "measured", "reached")
NOT_BUILT = "W4 (typed decisions) is not built yet and was not run."
_LABELS = {system.name: system.label for system in SYSTEMS}
_EMPTY = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells with a heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """A Markdown table under its title."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
        return f"{self.title}\n\n{body}\n"


def work_table(title: str, readings: Sequence[Reading]) -> Table:
    """One work, a row for each system."""
    return Table(title=title, columns=COLUMNS, rows=tuple(map(_row, readings)))


def goal_table(outcomes: Sequence[Outcome]) -> Table:
    """Each goal against each of its peers."""
    rows = tuple(
        (
            outcome.work,
            _LABELS[outcome.system],
            _LABELS[outcome.over],
            f">= {outcome.factor:.3g}x",
            _EMPTY if outcome.ratio is None else f"{outcome.ratio:.2f}x",
            {True: "yes", False: "no", None: "not measured"}[outcome.reached],
        )
        for outcome in outcomes
    )
    return Table(title=f"Goals. {NOT_BUILT}", columns=GOAL_COLUMNS, rows=rows)


def sweep_table(title: str, axis: str, readings: Sequence[Sequence[Reading]], sizes: Sequence[float]) -> Table:
    """Tokens/s of each system at each size."""
    names = list(dict.fromkeys(reading.system for column in readings for reading in column))
    cells = [{reading.system: _rate(reading) for reading in column} for column in readings]
    rows = tuple((_LABELS[name], *(column.get(name, _EMPTY) for column in cells)) for name in names)
    columns = (f"tokens/s by {axis}", *(f"{size:,.3g}" if size >= 1e6 else f"{size:,.0f}" for size in sizes))
    return Table(title=title, columns=columns, rows=rows)


def _row(reading: Reading) -> tuple[str, ...]:
    label = _LABELS[reading.system]
    if reading.status is not Status.MEASURED:
        return (label, _why(reading), *[_EMPTY] * (len(COLUMNS) - 2))
    first_s = reading.first_token_p50_s
    return (
        label + (f" ({reading.note})" if reading.note else ""),
        f"{reading.tokens_per_s:.1f}",
        f"{reading.median_s:.2f}",
        _EMPTY if first_s is None else f"{first_s:.2f}",
        f"{reading.question_p50_s:.2f} / {reading.question_p99_s:.2f}",
        f"{reading.peak_rss_bytes / 2**20:,.0f}",
        f"{reading.num_changed} of {reading.num_compared}" if reading.num_compared else _EMPTY,
    )


def _rate(reading: Reading) -> str:
    return f"{reading.tokens_per_s:.1f}" if reading.status is Status.MEASURED else _why(reading)


def _why(reading: Reading) -> str:
    wordy = reading.status in (Status.FAILED, Status.SKIPPED, Status.NOT_OFFERED) and reading.note
    return f"{reading.status}: {reading.note.splitlines()[0][:100]}" if wordy else str(reading.status)
