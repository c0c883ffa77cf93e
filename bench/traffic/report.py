"""Tables of the stories: Markdown for the document, JSON for programs.

Invariants and semantics: one table per story, one row per case and class. ``filled`` puts them between the marks
``<!-- NAME -->`` and ``<!-- /NAME -->`` of a document.

Not here: the terminal (``__main__``), pictures (``plots``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.capacity import filled as filled_parts
from bench.traffic.goals import Goal, goals_of
from bench.traffic.measures import ClassReading, Reading
from bench.traffic.stories import Story

_HEADERS = (
    "router",
    "class",
    "wait p50, s",
    "wait p99, s",
    "answer p99, s",
    "refused",
    "timed out",
    "slots taken",
    "max/mean sent",
    "max/mean there",
    "diverted",
)
_RETURN_HEADERS = ("refusals an answer", "most back in 100 ms", "slowest answer, s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A story that was run."""

    story: Story
    readings: Mapping[str, Reading]
    """By the label of the case."""

    @property
    def goals(self) -> list[Goal]:
        """What must hold."""
        return goals_of(self.story.name, self.readings)

    @property
    def advice(self) -> str:
        """What the router told its operator in the case as it was told; empty if nothing."""
        return next((reading.advice for reading in self.readings.values() if reading.advice), "")


def headers(told: Told) -> tuple[str, ...]:
    """Of the columns."""
    return (*_HEADERS, *(_RETURN_HEADERS if told.story.is_about_returns else ()))


def rows(told: Told) -> list[tuple[str, ...]]:
    """Cells of every row, the class of interest first."""
    found: list[tuple[str, ...]] = []
    for label, reading in told.readings.items():
        classes = sorted(reading.classes, key=lambda each: each.kind != told.story.focus)
        for number, each in enumerate(classes):
            row = _row(label if not number else "", each, reading if not number else None)
            found.append((*row, *(_returns(reading, number) if told.story.is_about_returns else ())))
    return found


def _row(label: str, each: ClassReading, whole: Reading | None) -> tuple[str, ...]:
    times = (each.wait_p50_s, each.wait_p99_s, each.answer_p99_s)
    cells = (
        label,
        each.kind,
        *(f"{seconds:.2f}" for seconds in times),
        f"{each.num_rejected:,}",
        f"{each.num_timed_out:,}",
    )
    if whole is None:
        return (*cells, "", "", "", "")
    return (
        *cells,
        f"{whole.utilization:.0%}",
        f"{whole.max_over_mean_placed:.2f}",
        f"{whole.max_over_mean_load:.2f}",
        f"{whole.num_diverted:,}",
    )


def _returns(reading: Reading, number: int) -> tuple[str, ...]:
    """How often clients had to ask, beside the first class of a case."""
    if number:
        return ("",) * len(_RETURN_HEADERS)
    return f"{reading.refusals_per_answer:.2f}", f"{reading.peak_returns:,}", f"{reading.slowest_s:.1f}"


def table(told: Told) -> str:
    """A story as a Markdown table."""
    lines = [headers(told), *rows(told)]
    written = [f"| {' | '.join(cells)} |" for cells in lines]
    written.insert(1, "|---|---|" + "---:|" * (len(lines[0]) - 2))
    return "\n".join(written)


def goal_table(all_told: list[Told]) -> str:
    """Every goal as a Markdown table."""
    lines = ["| story | router | goal | limit | is |", "|---|---|---|---:|---:|"]
    for told in all_told:
        for goal in told.goals:
            missed = "" if goal.reached else " (missed)"
            cells = (told.story.name, goal.case, goal.what, f"{goal.most:g}", f"{goal.value:.2f}{missed}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(document: str, all_told: list[Told]) -> str:
    """A document with the tables of these stories.

    Raises:
        ValueError: the document has no place for one of them.
    """
    parts = {told.story.name: table(told) for told in all_told}
    if any(told.goals for told in all_told):
        parts["goals"] = goal_table(all_told)
    return filled_parts(document, parts)


def lacking(document: str, stories: Sequence[str]) -> list[str]:
    """The stories for whose tables a document has no place."""
    return [name for name in stories if f"<!-- {name} -->\n" not in document]


def page(all_told: list[Told]) -> str:
    """All tables as a page of their own."""
    parts = [f"## {told.story.title}\n\n{table(told)}\n" for told in all_told]
    return "\n".join((*parts, f"## Goals\n\n{goal_table(all_told)}\n"))


def as_json(all_told: list[Told]) -> str:
    """All figures."""
    return json.dumps(
        {
            told.story.name: {
                "title": told.story.title,
                "cases": {label: asdict(reading) for label, reading in told.readings.items()},
                "goals": [asdict(goal) | {"reached": goal.reached} for goal in told.goals],
            }
            for told in all_told
        },
        indent=2,
        ensure_ascii=False,
    )
