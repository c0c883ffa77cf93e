"""The command: ``python -m bench.compare``. Composition only."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import rich.table
from rich.console import Console

from bench.compare.catalogue import ENVIRONMENTS, SYSTEMS, available_cores, takes_part
from bench.compare.install import NotInstalledError, install
from bench.compare.models import ModelFiles, bench_cache, demo_model, random_model
from bench.compare.plots import PlotsUnavailableError, check, plot_sweep, plot_works
from bench.compare.readings import Reading
from bench.compare.report import Run, this_machine
from bench.compare.rounds import Rules, Seat, measure
from bench.compare.session import Shape, open_session
from bench.compare.sweeps import SWEEPS, Point, Sweep, expected_s, parts, seats_within
from bench.compare.table import NOT_BUILT, Table, goal_table, sweep_table, work_table
from bench.compare.works import WORKS, Render
from common.errors import ModelError
from common.tokenization import Tokenizer
from common.types import Prompt, Truncate

_WORKS_SLOTS, _WORKS_CONTEXT = 8, 2_304
_NOT_SWEPT = frozenset({"kev-shared-bf16", "kev-shared-int8", "serial"})
"""Same computation as strict without a common prefix; and the growth of one by one is plain."""


class Bench:
    """One run of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._console = _console()
        self._start = time.monotonic()
        self._arguments = arguments
        self._systems = [system for system in SYSTEMS if system.name in arguments.systems]
        rules = Rules(num_rounds=arguments.rounds, num_alone=arguments.alone, limit_s=arguments.limit_s)
        self._run = Run(
            machine=this_machine(), rules=rules, num_threads=arguments.threads, clipped_tokens=arguments.tokens
        )

    def run(self) -> None:
        """Measure everything that was asked for; what is done is saved as soon as it is done."""
        demo = demo_model(self._tell)
        render = _render(demo.directory)
        if self._arguments.works:
            self._measure_works(demo, render)
        for name in self._arguments.sweeps:
            self._measure_sweep(SWEEPS[name](render), demo)

    def _measure_works(self, demo: ModelFiles, render: Render) -> None:
        run, cache = self._run, bench_cache()
        shape = self._shape(_WORKS_SLOTS, _WORKS_CONTEXT)
        with open_session(self._systems, demo, shape, cache, self._tell) as session:
            run.versions |= session.versions
            for name in self._arguments.works:
                work = WORKS[name](render).clipped(self._arguments.tokens)
                seats = [seat for seat in session.seats if takes_part(seat.system, work.name)]
                readings = measure(work, seats, run.rules, self._tell)
                run.titles[work.name] = work.title
                run.readings += readings
                self._add(work_table(f"{work.name}: {work.title}", readings))
        if run.clipped_tokens is None:
            self._add(goal_table(run.outcomes()))
        else:
            self._tell(f"answers were clipped to {run.clipped_tokens} tokens: no goal is judged")
        if self._arguments.plots:
            self._tell(f"wrote {plot_works(run.titles, run.readings, self._arguments.plots)}")

    def _measure_sweep(self, sweep: Sweep, demo: ModelFiles) -> None:
        systems = [system for system in self._systems if system.name not in _NOT_SWEPT]
        if not systems:
            return self._tell(f"sweep {sweep.name}: none of the chosen systems takes part")
        shape = self._shape(sweep.max_slots, sweep.max_context)
        columns: list[list[Reading]] = []
        for model, points in parts(sweep.points):
            files = demo if model == "demo" else random_model(self._tell)
            with open_session(systems, files, shape, bench_cache(), self._tell) as session:
                self._run.versions |= session.versions
                for point in points:
                    columns.append(self._measure_point(sweep, point, session.seats, columns))
        self._run.sweeps[sweep.name] = columns
        sizes = [point.size for point in sweep.points]
        self._add(sweep_table(f"Growth: {sweep.title}", sweep.axis, columns, sizes))
        if self._arguments.plots:
            self._tell(f"wrote {plot_sweep(sweep, columns, self._arguments.plots)}")

    def _measure_point(
        self, sweep: Sweep, point: Point, seats: Sequence[Seat], before: Sequence[Sequence[Reading]]
    ) -> list[Reading]:
        rules = replace(self._run.rules, num_rounds=self._arguments.sweep_rounds, num_alone=1)
        if before:
            last = sweep.points[len(before) - 1]
            seats = seats_within(
                seats, before[-1], lambda last_s: expected_s(last_s, last.size, point.size, sweep.power), rules.limit_s
            )
        return measure(point.work.clipped(self._arguments.tokens), seats, rules, self._tell)

    def _shape(self, max_slots: int, max_context: int) -> Shape:
        return Shape(max_slots=max_slots, max_context=max_context, num_threads=self._arguments.threads)

    def _add(self, table: Table) -> None:
        self._run.tables.append(table)
        shown = rich.table.Table(title=table.title, title_justify="left")
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in table.rows:
            shown.add_row(*row)
        self._console.print(shown)
        if self._arguments.json:
            self._arguments.json.write_text(self._run.json(), encoding="utf-8")
        if self._arguments.markdown:
            self._arguments.markdown.write_text(self._run.markdown(self._run.tables), encoding="utf-8")

    def _tell(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        self._console.print(f"{minutes:3}:{seconds:02} {text}", style="dim", highlight=False)


def _render(model_dir: Path) -> Render:
    tokenizer = Tokenizer.from_dir(model_dir, prompt_template="{question}")

    def render(question: str, system_prompt: str) -> Prompt:
        return tokenizer.render(question, system_prompt, max_prompt_tokens=1 << 20, truncate=Truncate.NONE)

    return render


def _console() -> Console:
    """As wide as the terminal; what is written to a file is not squeezed."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def _setup(console: Console) -> int:
    failed = 0
    for environment in ENVIRONMENTS:
        try:
            install(environment, bench_cache(), console.print)
        except NotInstalledError as error:
            console.print(f"{environment.name} is not installed: {error}")
            failed += 1
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Kev beside every installed peer.", epilog=NOT_BUILT
    )
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--setup", action="store_true", help="make the peers' environments, and end")
    parser.add_argument("--works", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--sweeps", nargs="*", choices=SWEEPS, default=[])
    parser.add_argument("--systems", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--sweep-rounds", type=_count, default=1)
    parser.add_argument("--threads", type=_count, default=len(available_cores()), help="default: all cores")
    parser.add_argument("--alone", type=int, default=8, help="questions that are also asked alone, as warm-up")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds of one system on one work")
    parser.add_argument("--tokens", type=_count, help="clip answers: for trying the bench, not for publishing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="the section of RESULTS.md")
    parser.add_argument("--plots", type=Path, help="directory for PNG plots (extra `bench`)")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> int:
    """Set up, or measure and report."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.setup:
        return _setup(_console())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that stopped processes are ended on the way out.
    try:
        if arguments.plots:
            check()
            arguments.plots.mkdir(parents=True, exist_ok=True)
        Bench(arguments).run()
    except (ModelError, PlotsUnavailableError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
