"""Where the latest questions crowd, and what an operator is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import HeatUnit, HotSpot, HotSpotKind, Strategy
from router_svc.hot_spots import HotSpots, in_words
from router_svc.occupancy import Recent
from router_svc.settings import RouterSettings

SETTINGS = RouterSettings(channel_pool_size=16, hot_spot_min_questions=20)
SEMANTIC = Strategy.SEMANTIC_HASH


def evenly(*counts: int) -> list[Recent]:
    """So many questions on each channel, with ten tokens each."""
    return [Recent(count, 10 * count) for count in counts]


EVEN = evenly(*[10] * 16)


def detector(**changes: object) -> HotSpots:
    return HotSpots(replace(SETTINGS, **changes))  # type: ignore[arg-type]


def feed(
    spots: HotSpots, buckets: list[int], now_s: float = 0.0, strategy: Strategy = SEMANTIC, num_tokens: int = 10
) -> None:
    for bucket in buckets:
        spots.note(strategy, bucket, bucket % 16, num_tokens, now_s)


def test_a_bucket_with_half_the_traffic_is_named_with_its_share_and_a_remedy() -> None:
    """An operator would have to count hash_bucket in the outputs by hand, as the first one did."""
    spots = detector()
    feed(spots, [50, *range(40, 45)] * 10)
    feed(spots, [50] * 40)
    [change] = spots.look(0.0, EVEN)
    assert change.begins
    assert (change.spot.kind, change.spot.strategy, change.spot.hash_bucket) == (HotSpotKind.BUCKET, SEMANTIC, 50)
    assert (change.spot.channel_id, change.spot.num_questions, change.spot.share) == (2, 50, 0.5)
    assert "consistent_hash" in change.spot.remedy and "prebucket" in change.spot.remedy
    assert "semantic_planes (now 6)" in change.spot.remedy
    assert in_words(change.spot) == ("hash bucket 50 of semantic_hash (channel 2) has 50% of the latest questions (50)")


def test_three_questions_make_no_hot_spot() -> None:
    """Every quiet deployment would be told of hot spots all day."""
    spots = detector()
    feed(spots, [7] * 3)
    assert spots.look(0.0, evenly(3, *[0] * 15)) == []
    feed(spots, [7] * 17)
    assert [change.spot.hash_bucket for change in spots.look(0.0, EVEN)] == [7]


def test_a_bucket_that_came_before_the_sample_was_large_enough_is_told() -> None:
    """A burst would go unseen because the questions that make it count came after it."""
    spots = detector()
    feed(spots, [7] * 15)
    feed(spots, list(range(100, 110)))
    assert [change.spot.hash_bucket for change in spots.look(0.0, EVEN)] == [7]


def test_it_ends_below_the_lower_share_and_not_before() -> None:
    """The log would fill with beginnings and ends of one hot spot at the border."""
    spots = detector()
    feed(spots, [7] * 25 + list(range(100, 175)))
    assert [change.begins for change in spots.look(0.0, EVEN)] == [True]
    feed(spots, list(range(200, 224)), now_s=1.0)
    assert spots.look(1.0, EVEN) == [] and len(spots.spots) == 1, "20.2 %"
    feed(spots, list(range(300, 303)), now_s=2.0)
    assert [change.begins for change in spots.look(2.0, EVEN)] == [False]
    assert spots.spots == ()


def test_it_ends_when_the_traffic_stops() -> None:
    """A dashboard would show yesterday's hot spot."""
    spots = detector()
    feed(spots, [7] * 30)
    assert spots.look(0.0, EVEN)
    assert [change.begins for change in spots.look(100.0, evenly(*[0] * 16))] == [False]
    assert (spots.recent, spots.heat(9)) == (Recent(0, 0), ())


def test_even_traffic_has_no_hot_spot() -> None:
    """A warning that is always there is read by nobody."""
    spots = detector()
    feed(spots, list(range(64)) * 20)
    assert spots.look(0.0, evenly(*[80] * 16)) == []


def test_in_a_small_pool_an_even_share_is_not_hot() -> None:
    """With two channels every bucket has a quarter of the traffic or more."""
    spots = detector(channel_pool_size=2)
    feed(spots, [0, 1] * 50)
    assert spots.look(0.0, evenly(50, 50)) == []
    feed(spots, [1] * 150)
    assert [change.spot.hash_bucket for change in spots.look(0.0, evenly(50, 50))] == [1]
    alone = detector(channel_pool_size=1)
    feed(alone, [0] * 500)
    assert alone.look(0.0, evenly(500)) == []


def test_a_hot_channel_is_told_unless_a_bucket_explains_it() -> None:
    """The same trouble would be told twice, or not at all where the strategy has no buckets."""
    spots = detector()
    feed(spots, [3] * 60, strategy=Strategy.LENGTH_AWARE)
    [change] = spots.look(0.0, evenly(0, 0, 0, 60, *[4] * 12))
    assert (change.spot.kind, change.spot.channel_id) == (HotSpotKind.CHANNEL, 3)
    assert change.spot.hash_bucket is None and "length_tiers" in change.spot.remedy
    both = detector()
    feed(both, [3] * 60)
    assert [c.spot.kind for c in both.look(0.0, evenly(0, 0, 0, 60, *[4] * 12))] == [HotSpotKind.BUCKET]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Strategy.CONSISTENT_HASH, "load_bound (now 1.25)"),
        (SEMANTIC, "semantic_planes"),
        (Strategy.PREBUCKET, "prebucket_classes"),
    ],
)
def test_the_remedy_fits_the_strategy(strategy: Strategy, words: str) -> None:
    """An operator would be told to take what is taken already."""
    spots = detector(breaker_queue_length=0)
    feed(spots, [3] * 60, strategy=strategy)
    [change] = spots.look(0.0, EVEN)
    assert words in change.spot.remedy and "breaker_queue_length 1" in change.spot.remedy
    with_breaker = detector()
    feed(with_breaker, [3] * 60, strategy=strategy)
    assert "the breaker is off" not in with_breaker.look(0.0, EVEN)[0].spot.remedy


def test_a_bucket_of_few_long_questions_is_hot_by_its_tokens() -> None:
    """A channel that long questions keep busy would be told of nobody, because few questions go there."""
    spots = detector(hot_spot_min_questions=100)
    feed(spots, [*range(100, 109)] * 10 + [109, 110], num_tokens=20)
    feed(spots, [50] * 8, num_tokens=700)
    [change] = spots.look(0.0, EVEN)
    spot = change.spot
    assert (spot.kind, spot.hash_bucket, spot.hot_by) == (HotSpotKind.BUCKET, 50, HeatUnit.TOKENS)
    assert (spot.num_questions, spot.share, spot.num_tokens) == (8, 0.08, 5_600)
    assert spot.token_share == pytest.approx(5_600 / (5_600 + 92 * 20))
    assert "length_aware" in spot.remedy and "max_question_tokens" in spot.remedy
    assert "semantic_planes" not in spot.remedy, "to split the bucket makes no question shorter"
    assert in_words(spot).endswith("(channel 2) has 75% of the latest tokens in 8% of the questions")
    assert spots.heat(1)[0].hash_bucket == 50 and spots.recent == Recent(100, 7_440)


def test_what_has_both_shares_is_hot_by_its_questions() -> None:
    """An operator would be told to shorten what is asked too often."""
    spots = detector()
    feed(spots, [7] * 30, num_tokens=500)
    feed(spots, list(range(100, 130)), num_tokens=20)
    [change] = spots.look(0.0, EVEN)
    assert change.spot.hot_by is HeatUnit.QUESTIONS and "consistent_hash" in change.spot.remedy


def test_one_giant_is_no_hot_spot() -> None:
    """Every long question would be a warning in the log."""
    spots = detector(hot_spot_min_questions=100)
    feed(spots, list(range(100, 200)), num_tokens=20)
    feed(spots, [50] * 4, num_tokens=4_000)
    assert spots.look(0.0, EVEN) == []
    feed(spots, [50], num_tokens=4_000)
    assert [change.spot.hash_bucket for change in spots.look(0.0, EVEN)] == [50]


def test_a_channel_of_long_questions_is_told_what_fits() -> None:
    """The lane of long questions is full, and nobody is told which border to move."""
    spots = detector()
    feed(spots, list(range(100, 140)), strategy=Strategy.LENGTH_AWARE)
    [change] = spots.look(0.0, [Recent(3, 3_000), *evenly(*[3] * 15)])
    assert (change.spot.kind, change.spot.channel_id, change.spot.hot_by) == (HotSpotKind.CHANNEL, 0, HeatUnit.TOKENS)
    assert "length_tiers" in change.spot.remedy
    assert in_words(change.spot) == "channel 0 has 87% of the latest tokens in 6% of the questions"


def test_with_prebucket_its_class_gets_channels() -> None:
    """A remedy for another strategy."""
    spots = detector()
    feed(spots, list(range(100, 140)), num_tokens=20)
    feed(spots, [3] * 5, strategy=Strategy.PREBUCKET, num_tokens=900)
    [change] = spots.look(0.0, EVEN)
    assert "prebucket_classes" in change.spot.remedy


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 2, 3, 4, 5, 6]), st.floats(0, 8), st.booleans(), st.sampled_from([1, 1, 1, 6, 50])
    ),
    max_size=100,
)


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.integers(1, 12), st.integers(2, 60))
def test_the_detector_agrees_with_a_naive_one(
    events: list[tuple[int, float, bool, int]], num_channels: int, min_questions: int
) -> None:
    """It would name a bucket that is not hot, miss one that is, or forget to tell its end."""
    spots = detector(channel_pool_size=num_channels, hot_spot_min_questions=min_questions)
    seen: list[tuple[int, int, int]] = []
    hot: set[int] = set()
    asked: set[int] = set()  # buckets that had their share of the window when they were last asked for
    told: dict[int, HotSpot] = {}
    now_s = 0.0
    begin = min(1.0, max(0.25, 1.5 / num_channels))
    end = begin * 0.2 / 0.25
    for bucket, pause_s, is_dense, num_tokens in events:
        now_s += pause_s if not is_dense else 0.0
        slot = int(now_s / 5)
        spots.note(SEMANTIC, bucket, 0, num_tokens, now_s)
        seen = [(b, num, at) for b, num, at in [*seen, (bucket, num_tokens, slot)] if at > slot - 12]
        counts = Counter(b for b, _, _ in seen)
        tokens = {b: sum(num for other, num, _ in seen if other == b) for b in counts}

        def shares(b: int, counts: Counter[int] = counts, tokens: dict[int, int] = tokens) -> tuple[float, float]:
            return counts[b] / counts.total(), tokens.get(b, 0) / sum(tokens.values())

        def is_hot(b: int, share: float, counts: Counter[int] = counts) -> bool:
            of_questions, of_tokens = shares(b)
            is_enough = counts.total() >= min_questions and num_channels > 1
            is_crowd = counts[b] >= max(2, min_questions // 20)
            return is_enough and (of_questions >= share or (of_tokens >= share and is_crowd))

        for change in spots.look(now_s, evenly(*[0] * num_channels)):
            assert change.spot.hash_bucket is not None
            assert (change.spot.hash_bucket in told) != change.begins
            told.pop(change.spot.hash_bucket, None)
            if change.begins:
                told[change.spot.hash_bucket] = change.spot
        asked |= {bucket} if max(shares(bucket)) >= end else set()
        hot = {b for b in hot if is_hot(b, end)} | {b for b in asked if is_hot(b, begin)}
        asked = {b for b in asked if max(shares(b)) >= end}
        assert set(told) == hot == {spot.hash_bucket for spot in spots.spots}
        for spot in spots.spots:
            assert (spot.share, spot.token_share) == shares(spot.hash_bucket or 0)
        assert {h.hash_bucket: (h.num_questions, h.num_tokens) for h in spots.heat(9)} == {
            b: (counts[b], tokens[b]) for b in counts
        }
