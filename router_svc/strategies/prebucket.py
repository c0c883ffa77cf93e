"""``prebucket``: classes of questions with channels of their own, and the semantic hash inside a class.

Invariants and semantics: every channel belongs to one class. The classes of the configuration take theirs from channel
0 on, in order; the rest of the pool is of the class ``default``. A question's category decides where there is one;
otherwise the first class with a matching pattern; otherwise ``default``. Diverting stays inside the class, so that a
flood of one class holds up that class only. The bucket is ``class * 2^planes + semantic bucket``, classes counted in
the order of the configuration, ``default`` last.

Not here: refusing unknown categories (``common.request``), how a pattern matches (``common.text_pattern``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from common.text_pattern import TextPattern, fold
from common.types import DEFAULT_CLASS
from router_svc.embedding import Projection
from router_svc.settings import QuestionClass
from router_svc.strategies.routing import Parts, Pick, RoutingView
from router_svc.strategies.semantic_hash import SemanticBuckets


@dataclass(frozen=True, slots=True)
class _Class:
    name: str
    channels: range
    patterns: tuple[TextPattern, ...]


class Prebucket:
    """Classes first, then semantic buckets."""

    def __init__(
        self,
        num_channels: int,
        classes: Sequence[QuestionClass],
        *,
        projection: Projection,
        encode: Callable[[str], Sequence[int]],
        hash_key: str,
    ) -> None:
        """Give every class its channels; ``common.config`` sees to it that they leave one for ``default``.

        Args:
            num_channels: size of the pool.
            classes: in the order in which their patterns are tried.
            projection: as for ``SemanticBuckets``.
            encode: as for ``SemanticBuckets``.
            hash_key: as for ``SemanticBuckets``.
        """
        self._buckets = SemanticBuckets(projection=projection, encode=encode, hash_key=hash_key)
        found: list[_Class] = []
        start = 0
        for each in classes:
            channels = range(start, start + each.num_channels)
            found.append(_Class(each.name, channels, tuple(map(TextPattern, each.patterns))))
            start = channels.stop
        self._classes = (*found, _Class(DEFAULT_CLASS, range(start, num_channels), ()))
        self._by_category = {
            category: index
            for index, each in enumerate(classes)
            for category in (each.name, *each.categories)
        }  # fmt: skip
        self._has_patterns = any(each.patterns for each in classes)

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Of a router's parts."""
        settings = parts.settings
        return cls(
            settings.channel_pool_size,
            settings.prebucket_classes,
            projection=parts.projection,
            encode=parts.encode,
            hash_key=settings.hash_key,
        )

    @property
    def classes(self) -> dict[str, range]:
        """Channel ids per class."""
        return {each.name: each.channels for each in self._classes}

    def key(self, view: RoutingView) -> int:
        """The bucket: class and semantic bucket."""
        index, _ = self._classify(view)
        return index * self._buckets.num_buckets + self._buckets.bucket(view.text)

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The bucket's channel within its class."""
        index, bucket = divmod(key, self._buckets.num_buckets)
        channels = self._classes[index].channels
        return Pick(channel_id=self._buckets.channel(bucket, channels), hash_bucket=key, lane=channels)

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        """What decided the class, the class's channels, and the bucket inside."""
        index, bucket = divmod(key, self._buckets.num_buckets)
        each = self._classes[index]
        _, why = self._classify(view)
        channel_id = self._buckets.channel(bucket, each.channels)
        return (
            f"{why} makes it class {each.name} with channels {each.channels[0]} to {each.channels[-1]}; "
            f"{self._buckets.explain(view.text, bucket)}, which channel {channel_id} has in this class"
        )

    def _classify(self, view: RoutingView) -> tuple[int, str]:
        """Index of the class, and what decided it."""
        default = len(self._classes) - 1
        if view.category:
            index = self._by_category.get(view.category, default)
            return index, f"the category {view.category!r}"
        if self._has_patterns:
            folded = fold(view.text)
            for index, each in enumerate(self._classes):
                for pattern in each.patterns:
                    if pattern.matches(folded):
                        return index, f"the pattern {pattern.source!r}"
        return default, "no category and no matching pattern"
