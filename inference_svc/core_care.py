"""What is decided about an engine core that is not well: when it starts again, and when its step takes too long.

Invariants and semantics: pure. A core that has ended starts again after a pause that grows, a limited number of times
in a row; one that was well for ``HEALTHY_S`` begins a new row. Time counts for a step only while somebody looks: a
machine that sleeps, or a process that is stopped, makes no step long.

Not here: starting and looking (``kev.cores``, ``step_watch``), the thread (``engine_core``).
"""

from __future__ import annotations

from dataclasses import dataclass

HEALTHY_S = 600.0
_PAUSE_GROWTH = 4.0
_LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class Restarts:
    """The restarts of one core."""

    max_in_a_row: int
    first_pause_s: float
    num_in_a_row: int = 0
    started_s: float | None = None
    """When it started last; None while it does not run."""

    @property
    def is_left(self) -> bool:
        """It would start again, if it ended now soon after its start."""
        return self.num_in_a_row < self.max_in_a_row

    def started(self, now_s: float) -> None:
        """It runs."""
        self.started_s = now_s

    def ended(self, now_s: float) -> float | None:
        """It has ended, or could not be started; seconds until the next try, None when there is none."""
        if self.started_s is not None and now_s - self.started_s >= HEALTHY_S:
            self.num_in_a_row = 0
        self.started_s = None
        if not self.is_left:
            return None
        pause_s = self.first_pause_s
        for _ in range(self.num_in_a_row):
            pause_s = min(pause_s * _PAUSE_GROWTH, max(_LONGEST_PAUSE_S, self.first_pause_s))
        self.num_in_a_row += 1
        return pause_s


@dataclass(slots=True)
class StepClock:
    """How long the step in flight has been seen to take."""

    interval_s: float
    """Of the looks; a longer time between two of them counts twice this at most."""
    seen_s: float = 0.0
    _step: int | None = None
    _looked_s: float | None = None

    def look(self, now_s: float, step: int | None) -> float:
        """Seconds of the step in flight, as far as anybody looked.

        Args:
            now_s: monotonic time.
            step: number of the step in flight; None between steps.
        """
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        same = step is not None and step == self._step
        self.seen_s = self.seen_s + min(max(passed_s, 0.0), 2 * self.interval_s) if same else 0.0
        self._step, self._looked_s = step, now_s
        return self.seen_s
