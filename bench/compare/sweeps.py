"""How cost grows: with the number of channels, the length of prompts, and the size of the model.

Invariants and semantics: pure. Points of a sweep run from small to large; a system whose last point lets expect more
than the limit is skipped from there on, and the table says so. Expected is the last time, grown by the ratio of the
sizes, and by its square for prompts, whose attention may grow so.

Not here: taking turns (``rounds``), the models themselves (``models``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.compare.readings import Reading, Status
from bench.compare.rounds import Seat
from bench.compare.works import Render, Work, long_work, short_work

DEMO_PARAMETERS = 0.27e9
RANDOM_PARAMETERS = 1.03e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size."""

    size: float
    work: Work
    model: str = "demo"
    """``demo`` or ``random``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Points along one axis, for processes loaded alike as long as the model is the same."""

    name: str
    title: str
    axis: str
    points: tuple[Point, ...]
    max_slots: int
    max_context: int
    power: float = 1.0
    """Expected time grows at most with the size to this power."""


def channels(render: Render) -> Sweep:
    """1 to 32 questions at a time."""
    return Sweep(
        name="channels",
        title="questions at a time, 32 new tokens each",
        axis="channels",
        points=tuple(
            Point(size=number, work=short_work(render, f"channels {number}", number, 32))
            for number in (1, 2, 4, 8, 16, 32)
        ),
        max_slots=32,
        max_context=512,
    )


def prompt_length(render: Render) -> Sweep:
    """16 to 4,096 prompt tokens."""
    return Sweep(
        name="prompt",
        title="4 questions, prompt tokens of each, 16 new tokens each",
        axis="prompt tokens",
        points=tuple(
            Point(size=length, work=long_work(render, f"prompt {length:,}", 4, length, 16))
            for length in (16, 64, 256, 1_024, 4_096)
        ),
        max_slots=4,
        max_context=4_096 + 64,
        power=2.0,
    )


def model_size(render: Render) -> Sweep:
    """The demo model and a random one of about four times its size."""
    work = short_work(render, "model", 8, 16)
    return Sweep(
        name="model",
        title="parameters of the model, 8 short questions, 16 new tokens each",
        axis="parameters",
        points=(
            Point(size=DEMO_PARAMETERS, work=_named(work, "model 270M")),
            Point(size=RANDOM_PARAMETERS, work=_named(work, "model 1B"), model="random"),
        ),
        max_slots=8,
        max_context=512,
    )


SWEEPS: dict[str, Callable[[Render], Sweep]] = {
    "channels": channels,
    "prompt": prompt_length,
    "model": model_size,
}
"""By the name on the command line."""


def expected_s(last_s: float, last_size: float, size: float, power: float) -> float:
    """Upper estimate of a point's seconds from those of the point before."""
    return float(last_s * (size / last_size) ** power)


def seats_within(
    seats: Sequence[Seat], last: Sequence[Reading], grown: Callable[[float], float], limit_s: float
) -> list[Seat]:
    """The same seats, without those whose next point would take too long or whose last one already would have.

    Args:
        seats: of the sweep.
        last: readings of the point before.
        grown: expected seconds from those of the point before.
        limit_s: seconds that a point may take.
    """
    known = {reading.system: reading for reading in last}
    return [_within(seat, known.get(seat.system.name), grown, limit_s) for seat in seats]


def _within(seat: Seat, last: Reading | None, grown: Callable[[float], float], limit_s: float) -> Seat:
    if last is None or seat.player is None:
        return seat
    if last.status is Status.SKIPPED:
        return Seat(system=seat.system, status=Status.SKIPPED, note=last.note)
    if last.status is Status.MEASURED and (due_s := grown(last.median_s)) > limit_s:
        note = f"up to {due_s:,.0f} s expected, limit {limit_s:,.0f} s"
        return Seat(system=seat.system, status=Status.SKIPPED, note=note)
    return seat


def parts(points: Sequence[Point]) -> list[tuple[str, tuple[Point, ...]]]:
    """Points in order, grouped by model."""
    models = list(dict.fromkeys(point.model for point in points))
    return [(model, tuple(point for point in points if point.model == model)) for model in models]


def _named(work: Work, name: str) -> Work:
    return Work(name=name, title=work.title, asks=work.asks)
