"""Showing a request while it runs: a live table on a terminal, plain lines elsewhere.

Invariants and semantics: text of a question or an answer is shown, never obeyed: control characters (terminal
sequences among them) appear as U+FFFD, and markup is not interpreted.

Not here: asking (``kev.cli``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.ports import Clock
from common.types import Result, StreamEvent, StreamEventType

_CONTROL = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)) if code not in (9, 10)
}
_TAIL_CHARS = 240
"""A running row shows this much of its newest text, so that the table stays on the screen."""


def printable(text: str) -> str:
    """``text`` without characters that a terminal would act on; line feeds and tabs stay."""
    return text.replace("\r\n", "\n").translate(_CONTROL)


class View(Protocol):
    """Follows one request."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the final picture on the screen."""
        ...

    def apply(self, event: StreamEvent) -> None:
        """Show what the event says."""
        ...


@dataclass(slots=True)
class ChannelRow:
    """One question, as far as it is known."""

    question: str
    channel_id: int | None = None
    state: str = "queued"
    text: str = ""
    result: Result | None = None

    def apply(self, event: StreamEvent) -> None:
        """Take in an event of this question."""
        if event.channel_id is not None:
            self.channel_id = event.channel_id
        match event.type:
            case StreamEventType.STARTED:
                self.state = "running"
            case StreamEventType.DELTA:
                self.state = "running"
                self.text += event.text
            case StreamEventType.ATTEMPT_CHANGED:
                self.text = event.text
            case StreamEventType.RESULT if event.result is not None:
                self.result = event.result
                self.state = event.result.finish_reason.value
                self.text = event.result.text or (event.result.error.message if event.result.error else "")


@dataclass(slots=True)
class ChannelTable:
    """A table with one row per question that changes while they are answered."""

    questions: tuple[str, ...]
    console: Console
    clock: Clock
    _rows: list[ChannelRow] = field(init=False)
    _started_s: float = field(init=False)
    _live: Live = field(init=False)

    def __post_init__(self) -> None:
        """Start with every question queued."""
        self._rows = [ChannelRow(question) for question in self.questions]
        self._started_s = self.clock.monotonic()
        self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Replace the moving picture by the whole table."""
        self._live.stop()
        self.console.print(self.render(whole=True))

    def apply(self, event: StreamEvent) -> None:
        """Take in an event; the next refresh shows it."""
        if event.question_index is not None:
            self._rows[event.question_index].apply(event)

    def render(self, *, whole: bool = False) -> Table:
        """The table now; ``whole`` shows the full texts instead of their ends."""
        table = Table(expand=True)
        table.add_column("question", ratio=2)
        for name in ("channel", "state", "tokens", "ms"):
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        table.add_column("text", ratio=5)
        waited_ms = round((self.clock.monotonic() - self._started_s) * 1000)
        for row in self._rows:
            text = row.text if whole or len(row.text) <= _TAIL_CHARS else "…" + row.text[-_TAIL_CHARS:]
            cells = (
                row.question,
                "" if row.channel_id is None else str(row.channel_id),
                row.state,
                str(row.result.tokens) if row.result else "",
                str(row.result.elapsed_ms if row.result else waited_ms),
                text.strip(),
            )
            table.add_row(*(Text(printable(cell)) for cell in cells))
        return table


@dataclass(slots=True)
class PlainLines:
    """Each answer in full when it is there, in completion order."""

    questions: tuple[str, ...]
    console: Console

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to finish."""

    def apply(self, event: StreamEvent) -> None:
        """Print results, skip the rest."""
        if event.result is None:
            return
        result = event.result
        row = ChannelRow(self.questions[result.question_index])
        row.apply(event)
        head = (
            f"[{result.question_index}] {row.question}\n"
            f"channel={result.channel_id} | time={result.elapsed_ms}ms | tokens={result.tokens} | {row.state}"
        )
        # print, not rich: a pipe gets lines as they are, without wrapping
        print(printable(head), printable(row.text.strip()), sep="\n", end="\n\n", file=self.console.file, flush=True)
