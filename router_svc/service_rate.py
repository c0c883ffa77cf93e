"""At which pace channels give places back: the number behind every ``Retry-After``.

Invariants and semantics: of a ``ServiceRate`` only time in which there is work counts, so neither an idle hour nor the
pause between two bursts slows it. The estimate is the releases of the last ``_HORIZON_S`` seconds of work, and of at
least the last ``_MIN_POINTS`` moments at which something was released, over the time that they took; releases within
``_GRAIN_S`` are one moment. While nothing is released although there is work, the estimate falls with every second.

Bounds, once ``_MIN_POINTS`` moments are known: with a steady pace the estimated time per place is between the true one
and 9/8 of it, whether questions end one by one or in bursts of any size; a pace that changed is fully seen after the
longer of ``_HORIZON_S`` and ``_MIN_POINTS`` moments.

``Pace`` is the rate while every channel has work, or somebody waits for one: a pool that few questions leave half idle
is not slow. Until enough of such time is known it is the rate while there is any work at all.

Not here: how many places somebody waits for (``return_line``), clocks (time is passed in).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_HORIZON_S = 10.0
_MIN_POINTS = 8
_GRAIN_S = 0.05


@dataclass(slots=True)
class _Moment:
    worked_s: float
    num: int


class ServiceRate:
    """The pace of releases over the time in which there was work."""

    __slots__ = ("_moments", "_num", "_since_s", "_worked_s", "is_idle")

    def __init__(self) -> None:
        """Nothing is known, and there is no work."""
        self._moments: deque[_Moment] = deque()
        self._num = 0
        """Releases after the first moment, which only says where the others begin to count."""
        self._worked_s = 0.0
        self._since_s: float | None = None
        self.is_idle = True

    @property
    def is_steady(self) -> bool:
        """Whether enough is known for the bounds above."""
        return len(self._moments) > _MIN_POINTS

    def begin(self, now_s: float | None) -> None:
        """There is work from now on; None: from a time that nobody knows, so the next release only starts the watch."""
        self.is_idle = False
        self._since_s = now_s
        if now_s is not None and not self._moments:
            self._moments.append(_Moment(self._worked_s, 0))

    def release(self, now_s: float) -> None:
        """A place was given back."""
        if self._since_s is None:
            self._since_s = now_s
            if not self._moments:
                self._moments.append(_Moment(self._worked_s, 0))
            return
        worked_s = self._worked_until(now_s)
        moments = self._moments
        if len(moments) > 1 and worked_s - moments[-1].worked_s < _GRAIN_S:
            moments[-1].num += 1
        else:
            moments.append(_Moment(worked_s, 1))
        self._num += 1
        while len(moments) > _MIN_POINTS + 1 and moments[1].worked_s <= worked_s - _HORIZON_S:
            moments.popleft()
            self._num -= moments[0].num

    def end(self, now_s: float | None) -> None:
        """There is no work any more; None: since a time that nobody knows, so the time since the last begin is lost."""
        if not self.is_idle and now_s is not None:
            self._worked_s = self._worked_until(now_s)
        self._since_s = None
        self.is_idle = True

    def per_s(self, now_s: float | None) -> float | None:
        """Places per second of work; None: nothing is known. ``now_s`` None is the latest release."""
        if not self._num:
            return None
        last = self._moments[-1].worked_s
        worked_s = last if now_s is None else max(last, self._worked_until(now_s))
        return self._num / max(worked_s - self._moments[0].worked_s, _GRAIN_S)

    def _worked_until(self, now_s: float) -> float:
        return self._worked_s if self._since_s is None else self._worked_s + max(0.0, now_s - self._since_s)


class Pace:
    """Of a pool; what it tells is about a pool whose channels all have work, as far as it has seen that."""

    __slots__ = ("_of_any_work", "_of_full_work")

    def __init__(self) -> None:
        """Nothing is known, and there is no work."""
        self._of_any_work, self._of_full_work = ServiceRate(), ServiceRate()

    def note(self, *, has_work: bool, is_full: bool, now_s: float | None) -> None:
        """Whether there is work from now on; see ``ServiceRate.begin``. ``is_full``: every channel has some."""
        for rate, is_on in ((self._of_any_work, has_work), (self._of_full_work, has_work and is_full)):
            if is_on == rate.is_idle:
                (rate.begin if is_on else rate.end)(now_s)

    def release(self, now_s: float) -> None:
        """A place was given back; to be said before ``note``."""
        for rate in (self._of_any_work, self._of_full_work):
            if not rate.is_idle:
                rate.release(now_s)

    def per_s(self, now_s: float | None) -> float | None:
        """Places per second; None: nothing is known."""
        rate = self._of_full_work if self._of_full_work.is_steady else self._of_any_work
        return rate.per_s(now_s)
