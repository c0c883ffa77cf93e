"""What the terminal shows of a cluster: one live line per process, or plain lines where there is no terminal.

Invariants and semantics: texts from logs are shown, never obeyed (``kev.live_table.printable``).

Not here: what happens (``kev.up.supervisor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kev.live_table import printable
from kev.up.child import Child
from kev.up.lifecycle import State

_STYLES = {
    State.READY: "green",
    State.NOT_READY: "yellow",
    State.BACKING_OFF: "yellow",
    State.FAILED: "red",
}


@dataclass(slots=True)
class Screen:
    """Follows the children of one cluster."""

    console: Console
    _children: Sequence[Child] = ()
    _live: Live | None = None
    _shown: dict[str, str] = field(default_factory=dict)

    def follow(self, children: Sequence[Child]) -> None:
        """Show these from now on."""
        self._children = children

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the final picture on the screen."""
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """One line, above the moving picture."""
        self.console.print(f"kev: {printable(sentence)}", markup=False, highlight=False, soft_wrap=True)

    def on_change(self, child: Child) -> None:
        """Tell what is news: without a terminal every change, on one only what went wrong."""
        state = child.lifecycle.state
        went_wrong = state in (State.BACKING_OFF, State.NOT_READY, State.FAILED)
        sentence = f"{child.spec.name}: {_in_words(child)}"
        if (self._live is None or went_wrong) and self._shown.get(child.spec.name) != sentence:
            self._shown[child.spec.name] = sentence
            self.say(sentence)

    def render(self) -> Table:
        """One line per process."""
        table = Table.grid(padding=(0, 2))
        for child in self._children:
            lifecycle = child.lifecycle
            cells = (
                child.spec.name,
                f":{child.spec.port}",
                f"pid {child.pid}" if child.pid else "",
                f"{lifecycle.in_state_s:.0f} s",
                f"restarts {lifecycle.num_starts - 1}" if lifecycle.num_starts > 1 else "",
            )
            state = Text(_in_words(child), style=_STYLES.get(lifecycle.state, ""), overflow="ellipsis", no_wrap=True)
            table.add_row(*(Text(printable(cell)) for cell in cells), state)
        return table


def _in_words(child: Child) -> str:
    lifecycle, note = child.lifecycle, printable(child.note)
    match lifecycle.state:
        case State.BACKING_OFF:
            return f"{note}; starts again in {lifecycle.start_delay_s:.1f} s"
        case State.FAILED:
            return f"{note}; given up after {lifecycle.num_starts} starts, see {child.log_path}"
        case State.NOT_READY:
            return f"not ready: {note}"
        case State.STOPPED:
            return f"stopped, {note}" if note else "stopped"
        case state:
            return state.value
