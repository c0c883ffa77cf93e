"""Where the latest questions crowd: which bucket or channel has far more than its share, and what to do about it.

Invariants and semantics: a bucket is told by its strategy and its hash, and its share is that of all questions of the
window, or of all their tokens (prompts and ``max_tokens``), because that is what loads its channel: a few long
questions hold it for as long as many short ones. It becomes a hot spot when either share is ``hot_spot_share``, but
never below 1.5 times the even share of a channel, nor before ``hot_spot_min_questions`` are in the window; it is one
until both fall below ``hot_spot_end_share``, raised in proportion. Tokens alone make one only of a twentieth of
``hot_spot_min_questions`` questions, and of two at least: a single giant is no crowd. A channel is one by the same
rules, unless a hot bucket explains it. With a single channel nothing can be hot. Memory is bounded, see ``windows``.

Strategies without a hash of their own (their bucket is the channel) have no hot buckets, only hot channels.

Source of the remedies: a bucket that took half the traffic was found in the counts of ``hash_bucket`` and cured by
another strategy, by categories in front of the hash, and by a breaker.

Not here: logs and metrics, where a question goes (``channels``), clocks (time is passed in).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.types import BucketHeat, HeatUnit, HotSpot, HotSpotKind, Strategy
from router_svc.occupancy import Recent
from router_svc.windows import SlidingCounts

if TYPE_CHECKING:
    from router_svc.settings import RouterSettings

_MIN_EVEN_SHARES = 1.5
_MIN_LONG_SHARE = 20
"""One in so many of ``hot_spot_min_questions`` are few, but a crowd if they are long."""
_WITHOUT_BUCKETS = frozenset({Strategy.ROUND_ROBIN, Strategy.LENGTH_AWARE})

_FOR_LONG_ONES = (
    "its questions are long: take router.strategy length_aware, which gives long questions channels of their own"
)
_BOUND = "or lower max_tokens, or bound router.max_question_tokens"

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
        self._min_long = max(2, settings.hot_spot_min_questions // _MIN_LONG_SHARE)
        self._questions: SlidingCounts[_Bucket] = SlidingCounts(settings.hot_spot_window_ms / 1000)
        self._tokens: SlidingCounts[_Bucket] = SlidingCounts(settings.hot_spot_window_ms / 1000)
        self._homes: dict[_Bucket, int] = {}
        """Channel of every bucket that has enough of the window to be hot, or to stay so."""
        self._known: dict[_Spot, HotSpot] = {}

    @property
    def recent(self) -> Recent:
        """What is in the window."""
        return Recent(self._questions.total, self._tokens.total)

    @property
    def spots(self) -> tuple[HotSpot, ...]:
        """The hot spots as of the latest look, the largest share first."""
        return tuple(sorted(self._known.values(), key=lambda spot: max(spot.share, spot.token_share), reverse=True))

    def note(self, strategy: Strategy, bucket: int, channel_id: int, num_tokens: int, now_s: float) -> bool:
        """A question was accepted; ``channel_id`` is what the strategy picked. True: it is time for a ``look``."""
        key = (strategy, bucket)
        mine = Recent(self._questions.add(key, now_s), self._tokens.add(key, now_s, max(1, num_tokens)))
        if strategy in _WITHOUT_BUCKETS or max(_shares(mine, self.recent)) < self._end_share:
            return False
        self._homes[key] = channel_id
        return key not in self._known and self._hot_by(mine, self.recent, self._begin_share) is not None

    def heat(self, number: int) -> tuple[BucketHeat, ...]:
        """The buckets with the largest share of the window's questions or of its tokens, hottest first."""
        largest = dict([*self._questions.most_common(number), *self._tokens.most_common(number)])
        ordered = sorted(largest, key=lambda key: max(_shares(self._of(key), self.recent)), reverse=True)
        return tuple(
            BucketHeat(
                strategy=key[0],
                hash_bucket=key[1],
                num_questions=self._of(key).num_questions,
                num_tokens=self._of(key).num_tokens,
            )
            for key in ordered[:number]
        )

    def look(self, now_s: float, recent: Sequence[Recent]) -> list[Change]:
        """Find what is hot now.

        Args:
            now_s: seconds of a clock that never runs backwards.
            recent: what was placed on each channel in the same window, index = channel id.

        Returns:
            What has begun or ended since the last look.
        """
        self._questions.move_to(now_s)
        self._tokens.move_to(now_s)
        found: dict[_Spot, HotSpot] = {key: spot for key in self._homes if (spot := self._bucket_spot(key)) is not None}
        explained = {spot.channel_id for spot in found.values()}
        total = Recent(sum(each.num_questions for each in recent), sum(each.num_tokens for each in recent))
        for channel_id, mine in enumerate(recent):
            spot = None if channel_id in explained else self._spot(channel_id, channel_id, mine, total)
            if spot is not None:
                found[channel_id] = spot
        before, self._known = self._known, found
        self._homes = {
            key: home
            for key, home in self._homes.items()
            if max(_shares(self._of(key), self.recent)) >= self._end_share
        }
        return [
            *(Change(spot=spot, begins=False) for key, spot in before.items() if key not in found),
            *(Change(spot=spot, begins=True) for key, spot in found.items() if key not in before),
        ]

    def _of(self, key: _Bucket) -> Recent:
        return Recent(self._questions.count(key), self._tokens.count(key))

    def _hot_by(self, mine: Recent, total: Recent, share: float) -> HeatUnit | None:
        """What makes this share of the window a hot spot; None: nothing does."""
        settings = self._settings
        if total.num_questions < settings.hot_spot_min_questions or settings.channel_pool_size == 1:
            return None
        of_questions, of_tokens = _shares(mine, total)
        if of_questions >= share:
            return HeatUnit.QUESTIONS
        return HeatUnit.TOKENS if of_tokens >= share and mine.num_questions >= self._min_long else None

    def _bucket_spot(self, key: _Bucket) -> HotSpot | None:
        strategy, bucket = key
        spot = self._spot(key, self._homes[key], self._of(key), self.recent)
        if spot is None:
            return None
        remedy = _remedy(strategy, spot.hot_by, self._settings)
        return replace(spot, kind=HotSpotKind.BUCKET, strategy=strategy, hash_bucket=bucket, remedy=remedy)

    def _spot(self, key: _Spot, channel_id: int, mine: Recent, total: Recent) -> HotSpot | None:
        """A channel, or what a strategy sends there, with this part of the window; None: it is not hot."""
        hot_by = self._hot_by(mine, total, self._end_share if key in self._known else self._begin_share)
        if hot_by is None:
            return None
        share, token_share = _shares(mine, total)
        return HotSpot(
            kind=HotSpotKind.CHANNEL,
            channel_id=channel_id,
            num_questions=mine.num_questions,
            share=share,
            num_tokens=mine.num_tokens,
            token_share=token_share,
            hot_by=hot_by,
            remedy=_channel_remedy(hot_by, self._settings),
        )


def _shares(mine: Recent, total: Recent) -> tuple[float, float]:
    """Of the questions and of their tokens."""
    return mine.num_questions / max(1, total.num_questions), mine.num_tokens / max(1, total.num_tokens)


def in_words(spot: HotSpot) -> str:
    """What is hot, in half a sentence."""
    what = f"channel {spot.channel_id}"
    if spot.kind is HotSpotKind.BUCKET:
        what = f"hash bucket {spot.hash_bucket} of {spot.strategy} (channel {spot.channel_id})"
    if spot.hot_by is HeatUnit.TOKENS:
        return f"{what} has {spot.token_share:.0%} of the latest tokens in {spot.share:.0%} of the questions"
    return f"{what} has {spot.share:.0%} of the latest questions ({spot.num_questions})"


def _remedy(strategy: Strategy, hot_by: HeatUnit, settings: RouterSettings) -> str:
    if hot_by is HeatUnit.TOKENS:
        ways = [_FOR_LONG_ONES, _BOUND]
        if strategy is Strategy.PREBUCKET:
            ways = ["its questions are long: give their class more channels (router.prebucket_classes)", _BOUND]
    elif strategy is Strategy.CONSISTENT_HASH:
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


def _channel_remedy(hot_by: HeatUnit, settings: RouterSettings) -> str:
    if hot_by is HeatUnit.TOKENS:
        ways = [_FOR_LONG_ONES, "with length_aware other router.length_tiers", _BOUND]
        return "; ".join([*ways, *_breaker_hint(settings)])
    ways = [
        "look at bucket_heat for what goes there; take router.strategy round_robin or consistent_hash, "
        "with length_aware other router.length_tiers"
    ]
    return "; ".join([*ways, *_breaker_hint(settings)])


def _breaker_hint(settings: RouterSettings) -> list[str]:
    if settings.breaker_queue_length == 0:
        return ["the breaker is off: router.breaker_queue_length 1 sends what is too much to idle channels"]
    return []
