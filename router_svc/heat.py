"""The router's heat: what an operator is told of where the latest questions went.

Invariants and semantics: every accepted question is counted once, and so are its tokens (prompt and ``max_tokens``),
under the strategy and bucket that it was routed by.
A hot spot that begins is one warning in the log, with its remedy; one that ends is one line. Both come when somebody
looks: a question that makes a bucket hot, otherwise at most once a second, and whoever reads the counts.

Not here: when something is hot (``hot_spots``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from common.ports import Clock
from common.types import BucketHeat, HotSpot, Strategy
from router_svc.channels import Placement
from router_svc.hot_spots import HotSpots, in_words
from router_svc.occupancy import Recent
from router_svc.settings import RouterSettings

_LOOK_INTERVAL_S = 1.0
_MAX_BUCKETS_SHOWN = 64

_log = logging.getLogger(__name__)


class Heat:
    """Of one router, for one event loop."""

    def __init__(self, settings: RouterSettings, recent: Callable[[], Sequence[Recent]], clock: Clock) -> None:
        """Nothing has come yet.

        Args:
            settings: windows and thresholds.
            recent: what was placed on each channel in the window of now, index = channel id.
            clock: measures the window.
        """
        self._hot_spots = HotSpots(settings)
        self._recent = recent
        self._clock = clock
        self._next_look_s = float("-inf")

    def note(self, strategy: Strategy, placements: Iterable[Placement], num_tokens: Iterable[int]) -> None:
        """Questions of a request were accepted, with so many tokens each."""
        now_s, is_due = self._clock.monotonic(), False
        for placement, num in zip(placements, num_tokens, strict=True):
            picked = placement.channel_id if placement.diverted_from is None else placement.diverted_from
            is_due |= self._hot_spots.note(strategy, placement.hash_bucket, picked, num, now_s)
        if is_due or now_s >= self._next_look_s:
            self.spots()

    def spots(self) -> tuple[HotSpot, ...]:
        """What is hot now, the largest share first."""
        now_s = self._clock.monotonic()
        self._next_look_s = now_s + _LOOK_INTERVAL_S
        for change in self._hot_spots.look(now_s, self._recent()):
            if change.begins:
                _log.warning("hot spot: %s; %s", in_words(change.spot), change.spot.remedy)
            else:
                _log.info("hot spot ended: %s", in_words(change.spot))
        return self._hot_spots.spots

    def buckets(self) -> tuple[BucketHeat, ...]:
        """The buckets with the largest shares as of the latest look, hottest first."""
        return self._hot_spots.heat(_MAX_BUCKETS_SHOWN)

    @property
    def recent(self) -> Recent:
        """What came in the window as of the latest look."""
        return self._hot_spots.recent
