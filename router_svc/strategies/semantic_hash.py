"""``semantic_hash``: questions about the same thing share a bucket, and a bucket has one channel.

Invariants and semantics: a bucket depends on the question's own words and the deployment's key only: the same alone,
in a batch, in every process and after a restart. Buckets are dealt to channels evenly, in the order of their digests:
a plain modulo would ignore all bits of a bucket but the lowest. A popular bucket makes a busy channel; diverting is
the breaker's job, which records it.

Not here: which words tell the topic (``topic``), from tokens to a bucket (``embedding``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from router_svc.digest import KeyedDigest
from router_svc.embedding import Projection
from router_svc.strategies.routing import Parts, Pick, RoutingView
from router_svc.topic import topic_words


class SemanticBuckets:
    """The semantic bucket of a text, and the place of each bucket when they are dealt out."""

    def __init__(self, *, projection: Projection, encode: Callable[[str], Sequence[int]], hash_key: str) -> None:
        """Deal the buckets.

        Args:
            projection: turns token ids into a bucket.
            encode: token ids of a text without template and prefix, so that these do not blur the bucket.
            hash_key: decides which buckets share a channel when there are more buckets than channels.
        """
        self._projection = projection
        self._encode = encode
        self._blanks = frozenset(encode(" "))
        digest = KeyedDigest(hash_key)
        dealt = sorted(range(self.num_buckets), key=lambda bucket: digest(b"bucket:%d" % bucket))
        self._places = [0] * len(dealt)
        for place, bucket in enumerate(dealt):
            self._places[bucket] = place

    @property
    def num_buckets(self) -> int:
        """Buckets are 0 to this, exclusive."""
        return 1 << self._projection.num_planes

    def bucket(self, text: str) -> int:
        """The bucket of a text."""
        ids = self._encode(topic_words(text))
        return self._projection.bucket([token_id for token_id in ids if token_id not in self._blanks] or ids)

    def channel(self, bucket: int, channels: range) -> int:
        """Which of some channels a bucket has; each of them has equally many buckets."""
        return channels[self._places[bucket] % len(channels)]

    def explain(self, text: str, bucket: int) -> str:
        """Where a bucket comes from."""
        return (
            f"the words that tell the topic ({topic_words(text).strip()!r}) fall into bucket {bucket} of "
            f"{self.num_buckets} ({self._projection.kind})"
        )


class SemanticHash:
    """One channel for each semantic bucket."""

    def __init__(
        self, num_channels: int, *, projection: Projection, encode: Callable[[str], Sequence[int]], hash_key: str
    ) -> None:
        """Deal the buckets to the channels; the arguments are those of ``SemanticBuckets``."""
        self._buckets = SemanticBuckets(projection=projection, encode=encode, hash_key=hash_key)
        self._channels = range(num_channels)

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Of a router's parts."""
        settings = parts.settings
        return cls(
            settings.channel_pool_size, projection=parts.projection, encode=parts.encode, hash_key=settings.hash_key
        )

    def key(self, view: RoutingView) -> int:
        """The semantic bucket."""
        return self._buckets.bucket(view.text)

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The bucket's channel."""
        return Pick(channel_id=self._buckets.channel(key, self._channels), hash_bucket=key)

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        """The words, the bucket and its channel."""
        channel_id = self._buckets.channel(key, self._channels)
        return f"{self._buckets.explain(view.text, key)}, which channel {channel_id} has"
