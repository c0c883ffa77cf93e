"""Strategies: which channel for which question."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.types import Strategy
from router_svc.settings import RouterSettings
from router_svc.strategies import (
    ConsistentHash,
    LengthAware,
    Pick,
    RoundRobin,
    RoutingStrategy,
    RoutingView,
    SemanticHash,
    build_strategies,
)

IDLE = [0] * 16


class WordBuckets:
    """A projection that reads the bucket off the first token."""

    num_planes = 3

    def bucket(self, token_ids: Sequence[int]) -> int:
        return token_ids[0] % 8


def encode(text: str) -> list[int]:
    return list(text.encode())


def view(text: str = "what is a KV cache", num_tokens: int = 10) -> RoutingView:
    return RoutingView(text=text, num_tokens=num_tokens)


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
        Strategy.SEMANTIC_HASH: [(3, 29), (6, 15), (6, 15)],
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
    assert not found.may_divert


def test_length_aware_takes_the_shortest_queue_of_the_lane() -> None:
    """A lane would fill one channel while another one is idle."""
    assert pick(LengthAware(6, (64, 512)), view(num_tokens=100), [0, 0, 2, 1, 0, 0]).channel_id == 3


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


def test_lone_surrogates_do_not_stop_routing() -> None:
    """A half emoji would raise out of the router."""
    strategy = ConsistentHash(4, virtual_nodes=8, load_bound=1.25, hash_key="kev")
    assert 0 <= pick(strategy, view("\ud83d"), [0] * 4).channel_id < 4


@pytest.mark.parametrize("name", list(Strategy))
def test_a_decision_costs_microseconds(name: Strategy) -> None:
    """Routing would show in the latency of a short question."""
    strategy = build_strategies(RouterSettings(), encode, None)[name]
    question, best_s = view("帮我总结一下Transformer的注意力机制"), 1.0
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            pick(strategy, question)
        best_s = min(best_s, (time.perf_counter() - start) / 20)
    assert best_s < 50e-6
