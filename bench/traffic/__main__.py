"""The command: ``python -m bench.traffic``. Composition only."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rich.table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.compare.plots import PlotsUnavailableError, check
from bench.traffic.plots import plot
from bench.traffic.report import Told, as_json, filled, headers, lacking, page, rows
from bench.traffic.stories import NAMES, Case, Story, story
from common.types import Strategy

Tick = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell stories; a missed goal is told, not an error. 2 if something cannot be shown."""
    asked = _parse(arguments)
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    if asked.plots:
        try:
            check()
        except PlotsUnavailableError as error:
            console.print(str(error))
            return 2
    if asked.markdown and asked.markdown.exists():
        lacks = lacking(asked.markdown.read_text(encoding="utf-8"), asked.story)
        if lacks:
            console.print(f"{asked.markdown} has no marks <!-- NAME --> for {', '.join(lacks)}; name another file")
            return 2
    chosen = [(told, _cases(told, asked.strategies)) for told in map(story, asked.story)]
    all_told: list[Told] = []
    with _quiet(), _progress(sum(len(cases) for _, cases in chosen)) as tick:
        for subject, cases in chosen:
            readings = {}
            for case in cases:
                tick(f"{subject.name}: {case.label}")
                readings[case.label] = subject.run(case, asked.questions, asked.seed)
            all_told.append(Told(story=subject, readings=readings))
    for told in all_told:
        _show(told, console)
        if asked.plots:
            console.print(f"wrote {plot(told, asked.plots)}")
    _write(asked, all_told)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.traffic", description="Simulated traffic over the real router.")
    parser.add_argument("--story", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument(
        "--strategies", nargs="+", type=Strategy, choices=list(Strategy), default=list(Strategy), metavar="NAME"
    )
    parser.add_argument("--questions", type=_size, default=5_000, help="per case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="tables; a file that exists gets them between its marks"
    )
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="a picture per story")
    return parser.parse_args(arguments)


def _size(text: str) -> int:
    number = int(text)
    if number < 100:
        raise argparse.ArgumentTypeError("needs at least 100 questions: a p99 of fewer says nothing")
    return number


def _cases(told: Story, strategies: Sequence[Strategy]) -> list[Case]:
    """The reference, and the cases with these strategies."""
    return [case for number, case in enumerate(told.cases) if not number or case.strategy in strategies]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the router's warnings, which are the point of the stories."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _progress(total: int) -> Iterator[Tick]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def tick(what: str) -> None:
            progress.update(task, description=what, advance=0 if progress.tasks[0].description == "" else 1)

        yield tick


def _show(told: Told, console: Console) -> None:
    shown = rich.table.Table(title=f"{told.story.name}: {told.story.title}", title_justify="left")
    for number, header in enumerate(headers(told)):
        shown.add_column(header, justify="left" if number < 2 else "right", no_wrap=not number)
    for cells in rows(told):
        shown.add_row(*cells)
    console.print(shown)
    if told.advice:
        console.print(f"the router's own advice: {told.advice}")
    for goal in told.goals:
        verdict = "reached" if goal.reached else "[red]missed[/red]"
        console.print(
            f"goal of {told.story.name}, {goal.case}: {goal.what} {goal.value:.2f}, at most {goal.most:g}: {verdict}"
        )


def _write(asked: argparse.Namespace, all_told: list[Told]) -> None:
    if asked.json:
        asked.json.write_text(as_json(all_told) + "\n", encoding="utf-8")
    if asked.markdown:
        known = asked.markdown.read_text(encoding="utf-8") if asked.markdown.exists() else None
        asked.markdown.write_text(page(all_told) if known is None else filled(known, all_told), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
