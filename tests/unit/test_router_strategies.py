"""Strategies: which channel for which question."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.types import Strategy
from router_svc.settings import QuestionClass, RouterSettings
from router_svc.strategies import (
    REGISTRY,
    ConsistentHash,
    LengthAware,
    Parts,
    Pick,
    Prebucket,
    RoundRobin,
    RoutingStrategy,
    RoutingView,
    SemanticHash,
    build_strategies,
)

IDLE = [0] * 16


SETTINGS = RouterSettings(
    prebucket_classes=(
        QuestionClass(
            name="refund", num_channels=4, categories=("退款",), patterns=("怎么*退款", "^refund", "money back")
        ),
        QuestionClass(name="address", num_channels=2, patterns=("地址", "address")),
    )
)


class WordBuckets:
    """A projection that reads the bucket off the first token."""

    kind = "first letter"
    num_planes = 3

    def bucket(self, token_ids: Sequence[int]) -> int:
        return token_ids[0] % 8


def encode(text: str) -> list[int]:
    return list(text.encode())


def view(text: str = "what is a KV cache", num_tokens: int = 10, category: str = "") -> RoutingView:
    return RoutingView(text=text, num_tokens=num_tokens, category=category)


def pick(strategy: RoutingStrategy, question: RoutingView, loads: Sequence[int] = IDLE) -> Pick:
    return strategy.pick(strategy.key(question), loads)


def test_every_strategy_is_there() -> None:
    """A request could name a strategy that the router does not have."""
    strategies = build_strategies(RouterSettings(), encode, None)
    assert set(strategies) == set(Strategy)
    for strategy in strategies.values():
        assert 0 <= pick(strategy, view()).channel_id < 16


@pytest.mark.parametrize("name", [Strategy.SEMANTIC_HASH, Strategy.CONSISTENT_HASH])
def test_hashes_are_pinned(name: Strategy) -> None:
    """Another process or release would route the same questions elsewhere."""
    strategy = build_strategies(RouterSettings(), encode, None)[name]
    picks = [pick(strategy, view(text)) for text in ("退款", "refund", "route")]
    expected = {
        Strategy.SEMANTIC_HASH: [(7, 33), (7, 56), (7, 56)],
        Strategy.CONSISTENT_HASH: [(12, 11), (14, 81), (1, 345)],
    }
    assert [(p.channel_id, p.hash_bucket) for p in picks] == expected[name]


def test_round_robin_takes_turns_and_asks_once() -> None:
    """Turns would be lost when a waiting question is looked at again."""
    strategy = RoundRobin(3)
    keys = [strategy.key(view()) for _ in range(4)]
    for loads in ([0] * 3, [5, 0, 0]):
        assert [strategy.pick(key, loads).channel_id for key in keys] == [0, 1, 2, 0]
    assert strategy.pick(keys[1], [5] * 3) == Pick(channel_id=1, hash_bucket=1)


def test_semantic_hash_deals_buckets_evenly() -> None:
    """Some channels would get no bucket and others several."""
    strategy = SemanticHash(4, projection=WordBuckets(), encode=encode, hash_key="kev")
    picks = [pick(strategy, view(chr(ord("a") + offset)), [0] * 4) for offset in range(8)]
    assert sorted(p.hash_bucket for p in picks) == list(range(8))
    assert set(Counter(p.channel_id for p in picks).values()) == {2}


def test_semantic_hash_ignores_load() -> None:
    """A bucket would lose its channel; diverting is the breaker's job, which records it."""
    strategy = SemanticHash(4, projection=WordBuckets(), encode=encode, hash_key="kev")
    home = pick(strategy, view(), [0] * 4).channel_id
    assert pick(strategy, view(), [9 if channel == home else 0 for channel in range(4)]).channel_id == home


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.sets(st.integers(1, 500), min_size=1, max_size=6).map(sorted))
def test_lanes_cover_the_pool(num_channels: int, tiers: list[int]) -> None:
    """A tier would have no channel, or a channel no tier."""
    lanes = LengthAware(num_channels, tiers).lanes
    assert len(lanes) == len(tiers) + 1
    assert all(len(lane) >= 1 and 0 <= lane.start < lane.stop <= num_channels for lane in lanes)
    assert {channel for lane in lanes for channel in lane} == set(range(num_channels))
    if num_channels >= len(lanes):
        assert sum(map(len, lanes)) == num_channels


@pytest.mark.parametrize(("num_tokens", "tier"), [(1, 0), (64, 0), (65, 1), (512, 1), (513, 2), (100_000, 2)])
def test_length_tiers_are_closed_above(num_tokens: int, tier: int) -> None:
    """A question at a border would be in the wrong lane."""
    strategy = LengthAware(16, (64, 512))
    found = pick(strategy, view(num_tokens=num_tokens))
    assert found.channel_id in strategy.lanes[tier]
    assert found.hash_bucket == found.channel_id
    assert found.lane == strategy.lanes[tier], "the breaker would send a long question to short ones"


def test_length_aware_takes_the_shortest_queue_of_the_lane() -> None:
    """A lane would fill one channel while another one is idle."""
    assert pick(LengthAware(6, (64, 512)), view(num_tokens=100), [0, 0, 2, 1, 3, 4]).channel_id == 3


def test_a_short_question_borrows_an_idle_channel_of_a_longer_tier() -> None:
    """Channels for long questions would idle while short ones queue."""
    strategy = LengthAware(6, (64, 512))
    assert pick(strategy, view(num_tokens=10), [1, 1, 0, 1, 0, 0]).channel_id == 2
    assert pick(strategy, view(num_tokens=10), [1, 1, 1, 1, 0, 0]).channel_id == 4
    assert pick(strategy, view(num_tokens=10), [2, 1, 1, 1, 1, 1]).channel_id == 1, "a busy channel is not borrowed"
    assert pick(strategy, view(num_tokens=600), [0, 0, 0, 0, 1, 1]).channel_id == 4, (
        "a long one never goes to short ones"
    )


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    num_channels=st.integers(2, 12),
    arrivals=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 30)), max_size=60),
)
def test_neither_short_nor_long_questions_starve(num_channels: int, arrivals: list[tuple[int, int]]) -> None:
    """One giant would hold up short questions, or many short ones would hold up the giant."""
    strategy = LengthAware(num_channels, (64,))
    short_lane, long_lane = strategy.lanes
    channels: list[list[int]] = [[] for _ in range(num_channels)]
    for num_tokens, num_done in arrivals:
        for channel in range(num_done % (num_channels + 1)):
            if channels[channel]:
                channels[channel].pop(0)
        loads = [len(channel) for channel in channels]
        picked = pick(strategy, view(num_tokens=num_tokens), loads).channel_id
        ahead = channels[picked]
        if num_tokens > 64:
            assert picked in long_lane
            assert sum(tokens <= 64 for tokens in ahead) <= 1, "at most one borrower is in front of it"
        else:
            assert all(tokens <= 64 for tokens in ahead), "nothing long is in front of it"
            assert picked in short_lane or not ahead
            if loads[picked]:
                assert all(loads[channel] for channel in (*short_lane, *long_lane)), "a channel idles"
        ahead.append(num_tokens)


def test_consistent_hash_spreads_a_hot_question() -> None:
    """90 % of the traffic on one question would fill one channel (bounded load must hold)."""
    strategy = ConsistentHash(8, virtual_nodes=64, load_bound=1.25, hash_key="kev")
    loads, buckets = [0] * 8, set()
    for number in range(80):
        found = pick(strategy, view("怎么退款" if number % 10 else f"other {number}"), loads)
        loads[found.channel_id] += 1
        buckets.add(found.hash_bucket)
    assert max(loads) <= 13
    assert len(buckets) <= 9


@hypothesis_settings(max_examples=30, deadline=None)
@given(num_channels=st.integers(1, 40), texts=st.lists(st.text(max_size=30), min_size=1, max_size=60))
def test_consistent_hash_keeps_every_channel_within_its_bound(num_channels: int, texts: list[str]) -> None:
    """A hot text would fill one channel (Mirrokni et al. 2018)."""
    strategy = ConsistentHash(num_channels, virtual_nodes=8, load_bound=1.25, hash_key="kev")
    loads = [0] * num_channels
    for text in texts:
        loads[pick(strategy, view(text), loads).channel_id] += 1
        assert max(loads) <= math.ceil(1.25 * sum(loads) / num_channels)


# --- classes first

CLASSES = {"refund": range(4), "address": range(4, 6), "default": range(6, 16)}


@pytest.mark.parametrize(
    ("text", "category", "name"),
    [
        ("anything", "refund", "refund"),
        ("anything", "退款", "refund"),
        ("怎么退款", "address", "address"),
        ("怎么退款", "default", "default"),
        ("请问怎么才能申请退款呢", "", "refund"),
        ("REFUND please", "", "refund"),
        ("no refund please", "", "default"),
        ("Money Back and a new address", "", "refund"),
        ("修改地址", "", "address"),
        ("what is a KV cache", "", "default"),
        ("what is a KV cache", "a category that configuration lets pass", "default"),
        ("", "", "default"),
    ],
)
def test_category_then_pattern_decide_the_class(text: str, category: str, name: str) -> None:
    """A flood of one class would fill the channels of another."""
    strategy = build_strategies(SETTINGS, encode, None)[Strategy.PREBUCKET]
    assert isinstance(strategy, Prebucket)
    assert strategy.classes == CLASSES
    question = view(text, category=category)
    found = pick(strategy, question)
    assert found.channel_id in CLASSES[name]
    assert found.lane == CLASSES[name], "the breaker would divert into another class"
    assert found.hash_bucket // 64 == list(CLASSES).index(name)
    why = strategy.explain(question, strategy.key(question), IDLE)
    assert f"class {name}" in why


def test_a_class_keeps_its_semantic_buckets_apart() -> None:
    """A class with several channels would use one of them."""
    strategy = Prebucket(
        16,
        SETTINGS.prebucket_classes,
        projection=WordBuckets(),
        encode=lambda text: encode(text.strip()),
        hash_key="kev",
    )
    picks = [pick(strategy, view(f"{chr(ord('a') + letter)}word", category="refund")) for letter in range(8)]
    assert Counter(found.channel_id for found in picks) == dict.fromkeys(range(4), 2)


def test_without_classes_every_question_is_of_the_default_one() -> None:
    """A router that has no classes could not start."""
    strategy = Prebucket(16, (), projection=WordBuckets(), encode=encode, hash_key="kev")
    assert strategy.classes == {"default": range(16)}
    assert pick(strategy, view(category="refund")).hash_bucket < 8


# --- all of them


@pytest.mark.parametrize("name", list(Strategy))
@hypothesis_settings(max_examples=40, deadline=None)
@given(
    text=st.text(alphabet=st.characters(codec="utf-8"), max_size=60),
    num_tokens=st.integers(0, 5000),
    loads=st.lists(st.integers(0, 9), min_size=16, max_size=16),
    data=st.data(),
)
def test_a_decision_depends_on_question_and_loads_only(
    name: Strategy, text: str, num_tokens: int, loads: list[int], data: st.DataObject
) -> None:
    """The same question would go elsewhere in a batch, after a restart, or after somebody asked why."""
    question = view(text, num_tokens, data.draw(st.sampled_from(["", "refund", "address"])))
    strategy = build_strategies(SETTINGS, encode, None)[name]
    key = strategy.key(question)
    first = strategy.pick(key, loads)
    assert strategy.explain(question, key, loads)
    assert strategy.pick(key, loads) == strategy.pick(key, tuple(loads)) == first
    assert 0 <= first.channel_id < 16
    if name is not Strategy.ROUND_ROBIN:
        strategy.key(view("another question", 7))
        assert strategy.key(question) == key
        assert build_strategies(SETTINGS, encode, None)[name].key(question) == key


class BusiestFirst:
    """A toy: as small as a strategy can be."""

    @classmethod
    def build(cls, parts: Parts) -> BusiestFirst:
        return cls()

    def key(self, view: RoutingView) -> int:
        return 0

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        return Pick(channel_id=loads.index(max(loads)), hash_bucket=key)

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        return "the busiest channel may have the prefix"


def test_a_strategy_is_a_class_and_a_line() -> None:
    """Adding one would mean changing the router."""
    registry = {**REGISTRY, Strategy.ROUND_ROBIN: BusiestFirst.build}
    strategies = build_strategies(SETTINGS, encode, None, registry)
    assert pick(strategies[Strategy.ROUND_ROBIN], view(), [0, 3, 1]).channel_id == 1


def test_lone_surrogates_do_not_stop_routing() -> None:
    """A half emoji would raise out of the router."""
    strategy = ConsistentHash(4, virtual_nodes=8, load_bound=1.25, hash_key="kev")
    assert 0 <= pick(strategy, view("\ud83d"), [0] * 4).channel_id < 4


@pytest.mark.parametrize("name", list(Strategy))
def test_a_decision_costs_microseconds(name: Strategy) -> None:
    """Routing would show in the latency of a short question."""
    strategy = build_strategies(SETTINGS, encode, None)[name]
    question, best_s = view("帮我总结一下Transformer的注意力机制"), 1.0
    for _ in range(50):
        start = time.thread_time()
        for _ in range(20):
            pick(strategy, question)
        best_s = min(best_s, (time.thread_time() - start) / 20)
    assert best_s < 50e-6
