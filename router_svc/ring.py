"""Consistent hashing with bounded load: a ring of virtual nodes.

Invariants and semantics: a key belongs to the arc that ends at the first point at or after the key's digest, and the
arc to the member that owns the point. Adding a member takes arcs from the others and moves nothing between them;
removing one hands on its own arcs only. With bounded load no member is picked that already has ``load_bound`` times
its fair share; the walk goes on to the next member clockwise. Sources: Karger et al. 1997 (ring); Mirrokni, Thorup,
Zadimoghaddam 2018, "Consistent Hashing with Bounded Loads", sec. 2 (bound).

Not here: how full a channel may be in absolute numbers (``channels``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from common.errors import InvariantError
from router_svc.digest import KeyedDigest


class HashRing:
    """An immutable ring; a pool of another size is another ring with the same points for the same members."""

    def __init__(self, members: Iterable[int], *, virtual_nodes: int, hash_key: str) -> None:
        """Place every member's points.

        Args:
            members: distinct ids, at least one.
            virtual_nodes: points per member, at least 1.
            hash_key: key of all digests; rings with another key are unrelated.

        Raises:
            InvariantError: no member, a member twice, or no virtual node.
        """
        distinct = tuple(members)
        if not distinct or len(set(distinct)) != len(distinct) or virtual_nodes < 1:
            raise InvariantError(f"a ring needs distinct members and points, got {distinct} with {virtual_nodes} each")
        self._digest = KeyedDigest(hash_key)
        points = sorted(
            (self._digest(b"point:%d:%d" % (member, node)), member)
            for member in distinct
            for node in range(virtual_nodes)
        )
        self._points = [point for point, _ in points]
        self._owners = [member for _, member in points]
        self._num_members = len(distinct)

    @property
    def num_arcs(self) -> int:
        """Arcs of the ring, one per point."""
        return len(self._points)

    def arc(self, key: bytes) -> int:
        """Index of the arc in which ``key`` lies, 0 to ``num_arcs - 1``."""
        return bisect_left(self._points, self._digest(b"key:" + key)) % len(self._points)

    def owner(self, arc: int) -> int:
        """The member that owns an arc, whatever its load."""
        return self._owners[arc]

    def pick(self, arc: int, loads: Sequence[int], load_bound: float) -> int:
        """The first member clockwise from ``arc`` whose load stays within the bound with one more.

        Args:
            arc: index from ``arc``.
            loads: current load of each member, indexed by member id; members only.
            load_bound: above 1; most load as a multiple of the mean.
        """
        most = math.ceil(load_bound * (sum(loads) + 1) / self._num_members)
        owners = self._owners
        for step in range(len(owners)):
            member = owners[(arc + step) % len(owners)]
            if loads[member] < most:
                return member
        raise InvariantError(f"every member of the ring is above the bound of {most}: the loads are not the members'")
