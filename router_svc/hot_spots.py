"""Where the latest questions crowd: which bucket or channel has far more than its share, and what to do about it.

Invariants and semantics: a bucket is told by its strategy and its hash, and its share is that of all questions of the
window, because that is what loads its channel. It becomes a hot spot at ``hot_spot_share``, but never below 1.5 times
the even share of a channel, nor before ``hot_spot_min_questions`` are in the window; it is one until it falls below
``hot_spot_end_share``, raised in proportion. A channel is one by the same rules, unless a hot bucket explains it. With
a single channel nothing can be hot. Memory is bounded, see ``windows``.

Strategies without a hash of their own (their bucket is the channel) have no hot buckets, only hot channels.

Source of the remedies: a bucket that took half the traffic was found in the counts of ``hash_bucket`` and cured by
another strategy, by categories in front of the hash, and by a breaker.

Not here: logs and metrics, where a question goes (``channels``), clocks (time is passed in).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.types import BucketHeat, HotSpot, HotSpotKind, Strategy
from router_svc.windows import SlidingCounts

if TYPE_CHECKING:
    from router_svc.settings import RouterSettings

_MIN_EVEN_SHARES = 1.5
_WITHOUT_BUCKETS = frozenset({Strategy.ROUND_ROBIN, Strategy.LENGTH_AWARE})

_Bucket = tuple[Strategy, int]
_Spot = tuple[Strategy, int] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A hot spot that begins, or that has ended."""

    spot: HotSpot
    begins: bool


class HotSpots:
    """The detector; owned by one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        """Nothing has come yet."""
        self._settings = settings
        floor = _MIN_EVEN_SHARES / settings.channel_pool_size
        self._begin_share = min(1.0, max(settings.hot_spot_share, floor))
        self._end_share = self._begin_share * settings.hot_spot_end_share / settings.hot_spot_share
        self._buckets: SlidingCounts[_Bucket] = SlidingCounts(settings.hot_spot_window_ms / 1000)
        self._homes: dict[_Bucket, int] = {}
        """Channel of every bucket that has enough of the window to be hot, or to stay so."""
        self._known: dict[_Spot, HotSpot] = {}

    @property
    def num_recent(self) -> int:
        """Questions in the window."""
        return self._buckets.total

    @property
    def spots(self) -> tuple[HotSpot, ...]:
        """The hot spots as of the latest look, the largest share first."""
        return tuple(sorted(self._known.values(), key=lambda spot: spot.share, reverse=True))

    def note(self, strategy: Strategy, bucket: int, channel_id: int, now_s: float) -> bool:
        """A question was accepted; ``channel_id`` is what the strategy picked. True: it is time for a ``look``."""
        key = (strategy, bucket)
        count = self._buckets.add(key, now_s)
        if strategy in _WITHOUT_BUCKETS or count < self._end_share * self._buckets.total:
            return False
        self._homes[key] = channel_id
        return key not in self._known and self._is_hot(count, self._begin_share, self._buckets.total)

    def heat(self, number: int) -> tuple[BucketHeat, ...]:
        """The buckets with the most questions in the window, hottest first."""
        return tuple(
            BucketHeat(strategy=strategy, hash_bucket=bucket, num_questions=count)
            for (strategy, bucket), count in self._buckets.most_common(number)
        )

    def look(self, now_s: float, recent: Sequence[int]) -> list[Change]:
        """Find what is hot now.

        Args:
            now_s: seconds of a clock that never runs backwards.
            recent: questions placed on each channel in the same window, index = channel id.

        Returns:
            What has begun or ended since the last look.
        """
        self._buckets.move_to(now_s)
        found: dict[_Spot, HotSpot] = {key: spot for key in self._homes if (spot := self._bucket_spot(key)) is not None}
        explained, total = {spot.channel_id for spot in found.values()}, sum(recent)
        for channel_id, count in enumerate(recent):
            spot = None if channel_id in explained else self._channel_spot(channel_id, count, total)
            if spot is not None:
                found[channel_id] = spot
        before, self._known = self._known, found
        enough = self._end_share * self._buckets.total
        self._homes = {key: home for key, home in self._homes.items() if self._buckets.count(key) >= enough}
        return [
            *(Change(spot=spot, begins=False) for key, spot in before.items() if key not in found),
            *(Change(spot=spot, begins=True) for key, spot in found.items() if key not in before),
        ]

    def _is_hot(self, count: int, share: float, total: int) -> bool:
        settings = self._settings
        is_enough = total >= settings.hot_spot_min_questions and settings.channel_pool_size > 1
        return is_enough and count >= share * total

    def _bucket_spot(self, key: _Bucket) -> HotSpot | None:
        count, total = self._buckets.count(key), self._buckets.total
        if not self._is_hot(count, self._end_share if key in self._known else self._begin_share, total):
            return None
        strategy, bucket = key
        return HotSpot(
            kind=HotSpotKind.BUCKET,
            channel_id=self._homes[key],
            num_questions=count,
            share=count / total,
            remedy=_remedy(strategy, self._settings),
            strategy=strategy,
            hash_bucket=bucket,
        )

    def _channel_spot(self, channel_id: int, count: int, total: int) -> HotSpot | None:
        share = self._end_share if channel_id in self._known else self._begin_share
        if not self._is_hot(count, share, total):
            return None
        return HotSpot(
            kind=HotSpotKind.CHANNEL,
            channel_id=channel_id,
            num_questions=count,
            share=count / total,
            remedy=_channel_remedy(self._settings),
        )


def in_words(spot: HotSpot) -> str:
    """What is hot, in half a sentence."""
    what = f"channel {spot.channel_id}"
    if spot.kind is HotSpotKind.BUCKET:
        what = f"hash bucket {spot.hash_bucket} of {spot.strategy} (channel {spot.channel_id})"
    return f"{what} has {spot.share:.0%} of the latest questions ({spot.num_questions})"


def _remedy(strategy: Strategy, settings: RouterSettings) -> str:
    if strategy is Strategy.CONSISTENT_HASH:
        ways = [
            f"one text is asked again and again: lower router.load_bound (now {settings.load_bound:g}) to spread it "
            "sooner, or take router.strategy round_robin"
        ]
    elif strategy is Strategy.PREBUCKET:
        ways = [
            "divide its class, or give the class more channels (router.prebucket_classes)",
            "or take router.strategy consistent_hash or round_robin",
        ]
    else:
        ways = [
            "take router.strategy consistent_hash, which spreads what is too much for one channel, or round_robin",
            "or put categories in front of the hash (prebucket)",
        ]
        if strategy is Strategy.SEMANTIC_HASH:
            ways.append(f"or raise router.semantic_planes (now {settings.semantic_planes}) to split the bucket")
    return "; ".join([*ways, *_breaker_hint(settings)])


def _channel_remedy(settings: RouterSettings) -> str:
    ways = [
        "look at bucket_heat for what goes there; take router.strategy round_robin or consistent_hash, "
        "with length_aware other router.length_tiers"
    ]
    return "; ".join([*ways, *_breaker_hint(settings)])


def _breaker_hint(settings: RouterSettings) -> list[str]:
    if settings.breaker_queue_length == 0:
        return ["the breaker is off: router.breaker_queue_length 1 sends what is too much to idle channels"]
    return []
