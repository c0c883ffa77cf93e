"""When those who were refused should come back: one after the other, as places become free.

Invariants and semantics: whoever is refused stands in a line that drains at the pace of the pool, and is told when his
turn would come, after those who were refused before him. So N questions refused at one moment are told N moments over
N / pace seconds, not one. Within the time of one place the moment is drawn from the request's id, so that the lines of
several routers do not fall into step. The line forgets its questions as their turns pass, whether they came back or
not; who comes back and is refused again stands at its end.

Tenants share the pace: turns go round among those with somebody in line, so whoever asks again and again before his
turn only sends himself away. A tenant is told by one of ``NUM_LANES`` digests, in which others may fall together with
him; memory is at most these numbers. Source: McKenney 1990, "Stochastic Fairness Queueing".

Nobody is sent away for longer than ``MAX_S``. Where that much of the line is taken, the rest is drawn from its second
half and adds nothing to it. Without a known pace a place a second is expected of every channel, from a second on.

Not here: the pace (``service_rate``), what callers are told in words (``refusals``), clocks (time is passed in).
"""

from __future__ import annotations

from dataclasses import dataclass

from router_svc.digest import KeyedDigest

MIN_S = 0.05
MAX_S = 60.0
UNKNOWN_S = 1.0
"""Sooner than this nobody is told to come back while the pace is not known."""
NUM_LANES = 64

_DIGESTS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What there was no room for."""

    request_id: str = ""
    """Empty: it has none yet."""
    tenant: str = ""
    num_missing: int = 1
    """Places that it lacked."""
    num_questions: int = 1
    """Places that it takes when it comes back."""


class ReturnLine:
    """Owned by one event loop."""

    __slots__ = ("_digest", "_lanes", "_now_s", "_num_refused", "_unknown_per_s")

    def __init__(self, num_channels: int, hash_key: str) -> None:
        """Nobody was refused; ``num_channels`` stand for the pace until it is known."""
        self._unknown_per_s = num_channels / UNKNOWN_S
        self._digest = KeyedDigest(hash_key)
        self._lanes: dict[int, float] = {}
        """Questions in line, by digest of their tenant; only of those with somebody in line."""
        self._now_s = float("-inf")
        self._num_refused = 0

    @property
    def num_waiting(self) -> float:
        """Questions in line as of the latest refusal."""
        return sum(self._lanes.values())

    def wait_s(self, refused: Refused, per_s: float | None, now_s: float) -> float:
        """Put something at the end of its tenant's line, and say for how long it should stay away.

        Args:
            refused: what there was no room for.
            per_s: places that become free per second, above 0; None: not known.
            now_s: seconds of a clock that never runs backwards.
        """
        pace = self._unknown_per_s if per_s is None else per_s
        if now_s > self._now_s:
            self._drain((now_s - self._now_s) * pace)
            self._now_s = now_s
        self._num_refused += 1
        lane = self._digest(refused.tenant.encode("utf-8", "surrogatepass")) % NUM_LANES
        ahead = self._lanes.get(lane, 0.0)
        own = ahead + refused.num_missing
        others = sum(min(waiting, own) for number, waiting in self._lanes.items() if number != lane)
        turn_s, drawn = (own + others) / pace, self._draw(refused.request_id)
        if per_s is None:
            turn_s += UNKNOWN_S
        if turn_s >= MAX_S:
            return MAX_S * (1 - drawn / 2)
        self._lanes[lane] = ahead + refused.num_questions
        return min(max(turn_s + drawn / pace, MIN_S), MAX_S)

    def _drain(self, num_questions: float) -> None:
        """So many turns have passed, one for each tenant in line, again and again."""
        level, left = 0.0, len(self._lanes)
        for waiting in sorted(self._lanes.values()):
            if (waiting - level) * left > num_questions:
                level += num_questions / left
                break
            num_questions -= (waiting - level) * left
            level, left = waiting, left - 1
        self._lanes = {lane: waiting - level for lane, waiting in self._lanes.items() if waiting > level}

    def _draw(self, request_id: str) -> float:
        """From 0 to 1, the same for the same id; without one, by the number of the refusal."""
        name = request_id or f"\0{self._num_refused}"
        return self._digest(name.encode("utf-8", "surrogatepass")) / _DIGESTS
