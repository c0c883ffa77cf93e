"""``round_robin``: channels take turns.

Not here: priorities and deadlines, which this strategy does not know.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

from router_svc.strategies.routing import Parts, Pick, RoutingView


class RoundRobin:
    """Channels take turns in order of arrival."""

    def __init__(self, num_channels: int) -> None:
        self._num_channels = num_channels
        self._turns = itertools.count()

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Of a router's parts."""
        return cls(parts.settings.channel_pool_size)

    def key(self, view: RoutingView) -> int:
        """The channel whose turn it is."""
        return next(self._turns) % self._num_channels

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """That channel."""
        return Pick(channel_id=key, hash_bucket=key)

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        """Whose turn it is."""
        return f"channels 0 to {self._num_channels - 1} take turns, and it is the turn of channel {key}"
