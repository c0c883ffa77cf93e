"""``consistent_hash``: the same text goes to the same channel while the channel's load is within the bound.

Not here: the ring, its bound and their sources (``ring``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from router_svc.ring import HashRing
from router_svc.strategies.routing import Parts, Pick, RoutingView


class ConsistentHash:
    """A ring of the pool's channels; the bucket is the arc of the text."""

    def __init__(self, num_channels: int, *, virtual_nodes: int, load_bound: float, hash_key: str) -> None:
        """Build the ring; ``common.config`` bounds its points."""
        self._ring = HashRing(range(num_channels), virtual_nodes=virtual_nodes, hash_key=hash_key)
        self._load_bound = load_bound

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Of a router's parts."""
        settings = parts.settings
        return cls(
            settings.channel_pool_size,
            virtual_nodes=settings.virtual_nodes,
            load_bound=settings.load_bound,
            hash_key=settings.hash_key,
        )

    def key(self, view: RoutingView) -> int:
        """The arc of the ring in which the text lies."""
        return self._ring.arc(view.text.encode("utf-8", "surrogatepass"))

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The arc's channel, or the next one clockwise that is within the bound."""
        return Pick(channel_id=self._ring.pick(key, loads, self._load_bound), hash_bucket=key)

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        """The arc, its owner, and whether the bound sent the question on."""
        owner, picked = self._ring.owner(key), self._ring.pick(key, loads, self._load_bound)
        arc = f"the text's digest lies on arc {key} of {self._ring.num_arcs}, which belongs to channel {owner}"
        bound = f"{self._load_bound:g} times the mean load"
        if picked == owner:
            return f"{arc}, within the bound of {bound}"
        return f"{arc}; that is at the bound of {bound}, so it goes on clockwise to channel {picked}"
