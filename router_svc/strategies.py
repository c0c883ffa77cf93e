"""How a channel is picked for a question: one small class per strategy.

Invariants and semantics: ``key`` looks at the question alone and is asked once per question; ``pick`` turns a key into
a channel for the loads of the moment and may be asked again while the question waits. Neither keeps anything of a
question. All digests are keyed and stable: the same configuration routes the same question to the same bucket in
every process and after a restart.

Not here: room on a channel, the breaker and the overflow queue (``channels``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.types import Strategy
from router_svc.digest import KeyedDigest
from router_svc.embedding import HashedProjection, Projection
from router_svc.ring import HashRing
from router_svc.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingView:
    """What a strategy may know of a question."""

    text: str
    """Normalized."""
    num_tokens: int
    """Prompt tokens after the last common prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A strategy's decision."""

    channel_id: int
    hash_bucket: int
    """Bucket of the strategy's hash; for strategies without one, the channel id."""
    may_divert: bool = True
    """Whether the breaker may send the question to any other channel."""


class RoutingStrategy(Protocol):
    """Picks channels. ``key`` may run on any thread; ``pick`` takes microseconds."""

    def key(self, view: RoutingView) -> int:
        """What of the question decides: a bucket, a turn, a tier."""
        ...

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The channel for a key.

        Args:
            key: from ``key``.
            loads: outstanding questions per channel, index = channel id.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy bound to a question's key. Equal choices pick the same channel for the same loads."""

    strategy: RoutingStrategy
    key: int

    def __call__(self, loads: Sequence[int]) -> Pick:
        """The channel for the loads of the moment."""
        return self.strategy.pick(self.key, loads)


class RoundRobin:
    """Channels take turns in order of arrival."""

    def __init__(self, num_channels: int) -> None:
        self._num_channels = num_channels
        self._turns = itertools.count()

    def key(self, view: RoutingView) -> int:
        """The channel whose turn it is."""
        return next(self._turns) % self._num_channels

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """That channel."""
        return Pick(channel_id=key, hash_bucket=key)


class SemanticHash:
    """Questions whose tokens point the same way share a bucket, and a bucket has one channel."""

    def __init__(
        self, num_channels: int, *, projection: Projection, encode: Callable[[str], Sequence[int]], hash_key: str
    ) -> None:
        """Deal the buckets to the channels.

        Args:
            num_channels: size of the pool.
            projection: turns token ids into a bucket.
            encode: token ids of a text without template and prefix, so that these do not blur the bucket.
            hash_key: decides which buckets share a channel when there are more buckets than channels.
        """
        self._projection = projection
        self._encode = encode
        digest = KeyedDigest(hash_key)
        # Dealing buckets in the order of their digests gives each channel equally many; a plain modulo would ignore
        # all planes but the first few.
        dealt = sorted(range(2**projection.num_planes), key=lambda bucket: digest(b"bucket:%d" % bucket))
        self._channels = [0] * len(dealt)
        for position, bucket in enumerate(dealt):
            self._channels[bucket] = position % num_channels

    def key(self, view: RoutingView) -> int:
        """The semantic bucket."""
        return self._projection.bucket(self._encode(view.text))

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The bucket's channel."""
        return Pick(channel_id=self._channels[key], hash_bucket=key)


class LengthAware:
    """Channels are split into contiguous lanes, one per length tier; the shortest queue of the lane is taken.

    Every tier has at least one channel of its own when the pool has as many channels as there are tiers; in a smaller
    pool neighbouring tiers share a channel. The breaker never crosses lanes: a long question must not hold up short
    ones.
    """

    def __init__(self, num_channels: int, tiers: Sequence[int]) -> None:
        self._borders = tuple(tiers)
        num_lanes = len(self._borders) + 1
        starts = [lane * num_channels // num_lanes for lane in range(num_lanes + 1)]
        self._lanes = [range(low, max(low + 1, high)) for low, high in itertools.pairwise(starts)]

    @property
    def lanes(self) -> tuple[range, ...]:
        """Channel ids per tier, shortest questions first."""
        return tuple(self._lanes)

    def key(self, view: RoutingView) -> int:
        """The tier: the first border that is not below the question's tokens."""
        return bisect_left(self._borders, view.num_tokens)

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The least loaded channel of the tier's lane, the first one of equals."""
        lane = self._lanes[key]
        in_lane = loads[lane.start : lane.stop]
        channel_id = lane.start + in_lane.index(min(in_lane))
        return Pick(channel_id=channel_id, hash_bucket=channel_id, may_divert=False)


class ConsistentHash:
    """The same text goes to the same channel while the channel's load is within the bound; see ``ring``."""

    def __init__(self, num_channels: int, *, virtual_nodes: int, load_bound: float, hash_key: str) -> None:
        """Build the ring; ``common.config`` bounds its points."""
        self._ring = HashRing(range(num_channels), virtual_nodes=virtual_nodes, hash_key=hash_key)
        self._load_bound = load_bound

    def key(self, view: RoutingView) -> int:
        """The arc of the ring in which the text lies."""
        return self._ring.arc(view.text.encode("utf-8", "surrogatepass"))

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The arc's channel, or the next one clockwise that is within the bound."""
        return Pick(channel_id=self._ring.pick(key, loads, self._load_bound), hash_bucket=key)


def build_strategies(
    settings: RouterSettings, encode: Callable[[str], Sequence[int]], projection: Projection | None
) -> dict[Strategy, RoutingStrategy]:
    """Every strategy by name; a request may name any of them.

    Args:
        settings: sizes and keys.
        encode: plain token ids of a text.
        projection: the model's table; None takes the lexical fall-back.
    """
    num_channels, hash_key = settings.channel_pool_size, settings.hash_key
    return {
        Strategy.SEMANTIC_HASH: SemanticHash(
            num_channels,
            projection=projection or HashedProjection(settings.semantic_planes, hash_key),
            encode=encode,
            hash_key=hash_key,
        ),
        Strategy.ROUND_ROBIN: RoundRobin(num_channels),
        Strategy.LENGTH_AWARE: LengthAware(num_channels, settings.length_tiers),
        Strategy.CONSISTENT_HASH: ConsistentHash(
            num_channels, virtual_nodes=settings.virtual_nodes, load_bound=settings.load_bound, hash_key=hash_key
        ),
    }
