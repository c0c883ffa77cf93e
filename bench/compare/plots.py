"""PNG plots of a run; needs the extra ``bench``.

Not here: the numbers (``readings``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.compare.catalogue import SYSTEMS
from bench.compare.readings import Reading, Status
from bench.compare.sweeps import Sweep

_LABELS = {system.name: system.label for system in SYSTEMS}
_COLORS = {system.name: f"C{number}" for number, system in enumerate(SYSTEMS)}
"""A system looks the same in every plot."""


class PlotsUnavailableError(Exception):
    """matplotlib is missing."""


def check() -> None:
    """Before hours of measuring.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailableError("--plots needs matplotlib; run `pip install -e '.[bench]'`") from error
    matplotlib.use("Agg")


def plot_works(titles: dict[str, str], readings: Sequence[Reading], directory: Path) -> Path:
    """Bars of tokens/s, one panel for each work."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(titles), 1, figsize=(9, 2.6 * len(titles)), squeeze=False)
    for axis, (work, title) in zip(axes[:, 0], titles.items(), strict=True):
        shown = [r for r in readings if r.work == work and r.status is Status.MEASURED][::-1]
        bars = axis.barh(
            [_LABELS[r.system] for r in shown],
            [r.tokens_per_s for r in shown],
            color=[_COLORS[r.system] for r in shown],
        )
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axis.set_title(f"{work}: {title}", fontsize=9)
        axis.set_xlabel("tokens/s")
        axis.margins(x=0.12)
    return _saved(figure, directory / "works.png")


def plot_sweep(sweep: Sweep, readings: Sequence[Sequence[Reading]], directory: Path) -> Path:
    """Seconds and tokens/s over the size, a line for each system."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    names = list(dict.fromkeys(reading.system for column in readings for reading in column))
    for name in names:
        found = [
            (point.size, reading)
            for point, column in zip(sweep.points, readings, strict=True)
            for reading in column
            if reading.system == name and reading.status is Status.MEASURED
        ]
        if not found:
            continue
        sizes = [size for size, _ in found]
        look = {"marker": "o", "color": _COLORS[name], "label": _LABELS[name]}
        left.plot(sizes, [reading.median_s for _, reading in found], **look)
        right.plot(sizes, [reading.tokens_per_s for _, reading in found], **look)
    for axis, unit in ((left, "seconds"), (right, "tokens/s")):
        axis.set(xlabel=sweep.axis, ylabel=unit, xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.2)
    left.legend(fontsize=8)
    figure.suptitle(sweep.title, fontsize=10)
    return _saved(figure, directory / f"sweep-{sweep.name}.png")


def _saved(figure: object, path: Path) -> Path:
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    if not isinstance(figure, Figure):
        raise TypeError(f"not a figure: {figure!r}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
