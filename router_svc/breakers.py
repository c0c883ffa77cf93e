"""The breaker of a channel: whether new questions should keep away from it for a while, and why.

Invariants and semantics: three states. *Closed*: everything goes as the strategy says. *Open*: new questions go
elsewhere. *Half-open*: the cool-down is over, and the next question that comes is a probe; until its outcome, others go
elsewhere. A probe that succeeds closes the breaker, one that fails opens it again; one that is withdrawn or cancelled
says nothing, and the next one is a probe.

It opens when the oldest outstanding question of its channel is ``max_age_s`` old (and stays open while that lasts), or
when ``failure_rate`` of at least ``min_outcomes`` outcomes of the last ``window_s`` were failures. How long the
channel's queue is beside the others' needs no memory and is looked at by the pool.

An open breaker is advice. Whether there is a better channel is the pool's affair: with every breaker open the shortest
channel takes all the same.

Not here: who is on the channel (``channels``), clocks (time is passed in).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvariantError
from common.types import BreakerState, Diversion
from router_svc.windows import SlidingCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """When a breaker opens, besides by the length of its channel."""

    max_age_s: float = 0.0
    """Age of the oldest outstanding question that opens it; 0: no age does."""
    failure_rate: float = 0.0
    """Share of failures that opens it, up to 1; 0: none does."""
    min_outcomes: int = 20
    """Outcomes in the window from which on the share means something, at least 1."""
    window_s: float = 30.0
    """Length of the window for the share, above 0."""
    cooldown_s: float = 5.0
    """How long it stays open before a probe, at least 0."""

    @property
    def can_open(self) -> bool:
        """Whether anything opens a breaker."""
        return self.max_age_s > 0 or self.failure_rate > 0


class Breaker:
    """Of one channel."""

    __slots__ = ("_outcomes", "_probe", "_probes", "_rules", "_until_s", "state", "why")

    def __init__(self, rules: BreakerRules) -> None:
        """Closed, without a past.

        Raises:
            InvariantError: a rule is out of range.
        """
        if min(rules.max_age_s, rules.cooldown_s) < 0 or not 0 <= rules.failure_rate <= 1 or rules.min_outcomes < 1:
            raise InvariantError(f"a breaker cannot follow {rules}")
        self._rules = rules
        self.state = BreakerState.CLOSED
        self.why: Diversion | None = None
        """What opened it; None while closed."""
        self._until_s = 0.0
        self._outcomes: SlidingCounts[str] = SlidingCounts(rules.window_s)
        """By kind of failure; empty is success."""
        self._probes = 0
        self._probe: int | None = None

    @property
    def takes(self) -> bool:
        """Whether a new question may come: closed, or half-open and the probe is not under way."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and self._probe is None)

    @property
    def num_failed(self) -> int:
        """Failures in the window, as of the latest time told."""
        return self._outcomes.total - self._outcomes.count("")

    @property
    def main_failure(self) -> str:
        """The most frequent kind of failure in the window; empty without one."""
        return next((kind for kind, _ in self._outcomes.most_common(2) if kind), "")

    def look(self, now_s: float, oldest_s: float | None) -> None:
        """Take note of the time.

        Args:
            now_s: seconds of a clock that never runs backwards.
            oldest_s: since when the oldest outstanding question is on the channel; None: there is none.
        """
        rules = self._rules
        if rules.max_age_s and oldest_s is not None and now_s - oldest_s >= rules.max_age_s:
            self._open(now_s, Diversion.AGE)
        elif self.state is BreakerState.OPEN and now_s >= self._until_s:
            self.state = BreakerState.HALF_OPEN
        self._outcomes.move_to(now_s)

    def begin(self) -> int | None:
        """A question was put on the channel; returns its number if it is the probe, for ``end`` or ``forget``."""
        if self.state is not BreakerState.HALF_OPEN or self._probe is not None:
            return None
        self._probes += 1
        self._probe = self._probes
        return self._probe

    def end(self, now_s: float, *, failure: str, probe: int | None) -> None:
        """A question of the channel has its outcome; ``failure`` is of what kind it is, empty for a success."""
        self._outcomes.add(failure, now_s)
        failed = bool(failure)
        if probe is not None and probe == self._probe:
            if failed:
                self._open(now_s, Diversion.FAILURES)
            else:
                self._close()
        elif failed and self.state is BreakerState.CLOSED and self._fails_too_often():
            self._open(now_s, Diversion.FAILURES)

    def forget(self, probe: int | None) -> None:
        """A question left the channel without an outcome that says anything."""
        if probe is not None and probe == self._probe:
            self._probe = None

    def _fails_too_often(self) -> bool:
        rules, outcomes = self._rules, self._outcomes
        if not rules.failure_rate or outcomes.total < rules.min_outcomes:
            return False
        return self.num_failed >= rules.failure_rate * outcomes.total

    def _open(self, now_s: float, why: Diversion) -> None:
        self.state, self.why = BreakerState.OPEN, why
        self._until_s = now_s + self._rules.cooldown_s
        self._probe = None

    def _close(self) -> None:
        self.state, self.why, self._probe = BreakerState.CLOSED, None, None
        self._outcomes.clear()
