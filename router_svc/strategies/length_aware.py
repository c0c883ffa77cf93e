"""``length_aware``: short and long questions on channels of their own.

Invariants and semantics: the pool is split into contiguous lanes, one per length tier, shortest first. Every tier has
at least one channel of its own when the pool has as many channels as there are tiers; in a smaller pool neighbouring
tiers share a channel. A question takes the least loaded channel of its lane. If all of these are busy it may take an
*idle* channel of a longer tier. So a long question is never in front of a shorter one outside a shared channel, and a
shorter one is in front of a long one on a channel of the long lane at most once: a channel that holds anything is not
borrowed. Neither starves the other, and no channel idles while questions shorter than its tier wait.

Not here: how many tokens a question has (``tokens``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Self

from router_svc.strategies.routing import Parts, Pick, RoutingView


class LengthAware:
    """Lanes of channels, one per length tier. The breaker never crosses lanes."""

    def __init__(self, num_channels: int, tiers: Sequence[int]) -> None:
        self._borders = tuple(tiers)
        num_lanes = len(self._borders) + 1
        starts = [lane * num_channels // num_lanes for lane in range(num_lanes + 1)]
        self._lanes = [range(low, max(low + 1, high)) for low, high in itertools.pairwise(starts)]

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Of a router's parts."""
        return cls(parts.settings.channel_pool_size, parts.settings.length_tiers)

    @property
    def lanes(self) -> tuple[range, ...]:
        """Channel ids per tier, shortest questions first."""
        return tuple(self._lanes)

    def key(self, view: RoutingView) -> int:
        """The tier: the first border that is not below the question's tokens."""
        return bisect_left(self._borders, view.num_tokens)

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The least loaded channel of the tier's lane, the first one of equals; or an idle one of a longer tier."""
        lane = self._lanes[key]
        in_lane = loads[lane.start : lane.stop]
        least = min(in_lane)
        channel_id = lane.start + in_lane.index(least)
        if least and not all(longer := loads[lane.stop :]):
            borrowed = lane.stop + longer.index(0)
            return Pick(channel_id=borrowed, hash_bucket=borrowed, may_divert=False)
        return Pick(channel_id=channel_id, hash_bucket=channel_id, lane=lane)

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        """The tier, its lane, and whether a channel was borrowed."""
        lane, channel_id = self._lanes[key], self.pick(key, loads).channel_id
        above = f"above {self._borders[key - 1]}" if key else "at least 0"
        upto = f"up to {self._borders[key]}" if key < len(self._borders) else "no upper border"
        tier = f"{view.num_tokens} tokens are tier {key} ({above}, {upto}), which has channels {lane[0]} to {lane[-1]}"
        if channel_id in lane:
            return f"{tier}; channel {channel_id} has the fewest outstanding questions of these"
        return f"{tier}; all of these are busy, so it borrows the idle channel {channel_id} of a longer tier"
