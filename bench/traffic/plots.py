"""A picture per story; needs the extra ``bench``.

Not here: the figures (``measures``).
"""

from __future__ import annotations

from pathlib import Path

from bench.traffic.report import Told


def plot(told: Told, directory: Path) -> Path:
    """Waits of the class of interest on the left, the channels' shares of the questions on the right."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1.25, 1))
    labels = list(told.readings)[::-1]
    seconds = [told.readings[label].of(told.story.focus).answer_p99_s for label in labels]
    bars = left.barh(
        labels, seconds, color=["C1" if number == len(labels) - 2 else "C0" for number in range(len(labels))]
    )
    left.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    left.set_xlabel(f"p99 answer time of class {told.story.focus}, s")
    left.margins(x=0.15)
    for number, (label, reading) in enumerate(told.readings.items()):
        times = [share * len(reading.shares) for share in sorted(reading.shares, reverse=True)]
        right.step(range(1, len(times) + 1), times, where="mid", label=label, color=f"C{number}", linewidth=1.2)
    right.set(xlabel="channels, the most used first", ylabel="questions, times the mean", yscale="log")
    right.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["1/4", "1/2", "1", "2", "4", "8", "16"])
    right.minorticks_off()
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=6)
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.grid(visible=True, alpha=0.2)
    figure.suptitle(told.story.title, fontsize=10)
    figure.tight_layout()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{told.story.name}.png"
    figure.savefig(path, dpi=90, metadata={"Software": ""})
    pyplot.close(figure)
    return path
