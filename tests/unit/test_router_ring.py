"""Consistent hashing with bounded load."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from router_svc.digest import KeyedDigest
from router_svc.ring import HashRing

KEYS = [b"question %d" % number for number in range(400)]


def owners(ring: HashRing) -> dict[bytes, int]:
    return {key: ring.owner(ring.arc(key)) for key in KEYS}


def test_digest_is_pinned() -> None:
    """A release would move every question to another bucket, or two processes would disagree."""
    assert KeyedDigest("kev")(b"data") == 0x270DBC30BFFCDEAD
    assert KeyedDigest("other")(b"data") != KeyedDigest("kev")(b"data")
    assert KeyedDigest("k" * 500)(b"data") != KeyedDigest("k" * 501)(b"data")


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.text(min_size=1, max_size=8))
def test_a_new_member_only_takes(num_members: int, virtual_nodes: int, hash_key: str) -> None:
    """Growing the pool would move questions between channels that were there before."""
    before = owners(HashRing(range(num_members), virtual_nodes=virtual_nodes, hash_key=hash_key))
    after = owners(HashRing(range(num_members + 1), virtual_nodes=virtual_nodes, hash_key=hash_key))
    assert all(after[key] in (before[key], num_members) for key in KEYS)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 12), st.data())
def test_a_lost_member_only_gives(num_members: int, data: st.DataObject) -> None:
    """Losing a channel would move questions of the others."""
    lost = data.draw(st.integers(0, num_members - 1))
    before = owners(HashRing(range(num_members), virtual_nodes=16, hash_key="kev"))
    rest = [member for member in range(num_members) if member != lost]
    after = owners(HashRing(rest, virtual_nodes=16, hash_key="kev"))
    assert all(after[key] == before[key] for key in KEYS if before[key] != lost)


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 24), st.text(min_size=1, max_size=8))
def test_growth_and_loss_move_little_more_than_a_fair_share(num_members: int, hash_key: str) -> None:
    """Resizing the pool would move most questions to other channels."""
    small = owners(HashRing(range(num_members), virtual_nodes=64, hash_key=hash_key))
    large = owners(HashRing(range(num_members + 1), virtual_nodes=64, hash_key=hash_key))
    moved = sum(small[key] != large[key] for key in KEYS) / len(KEYS)
    fair = 1 / (num_members + 1)
    # 64 points a member make its share of the ring vary by 1/8 of itself (one sigma), 400 keys add some more.
    sigma = math.sqrt((fair / 8) ** 2 + fair * (1 - fair) / len(KEYS))
    assert moved <= fair + 5 * sigma


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 12),
    st.floats(1.05, 3.0),
    st.lists(st.tuples(st.sampled_from(KEYS[:9]), st.integers(-30, 30)), max_size=60),
)
def test_the_bound_holds_while_questions_come_and_go(
    num_members: int, load_bound: float, keys: list[tuple[bytes, int]]
) -> None:
    """The bound would hold for a filling ring only, and not for one whose questions end in any order."""
    ring = HashRing(range(num_members), virtual_nodes=8, hash_key="kev")
    loads, placed = [0] * num_members, list[int]()
    for key, ending in keys:
        if 0 <= ending < len(placed):
            loads[placed.pop(ending)] -= 1
        most = math.ceil(load_bound * (sum(loads) + 1) / num_members)
        member = ring.pick(ring.arc(key), loads, load_bound)
        assert loads[member] + 1 <= most
        loads[member] += 1
        placed.append(member)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.floats(1.01, 3.0), st.lists(st.sampled_from(KEYS[:6]), max_size=80))
def test_no_member_exceeds_the_bound(num_members: int, load_bound: float, keys: list[bytes]) -> None:
    """A hot key would pile up on one channel."""
    ring = HashRing(range(num_members), virtual_nodes=8, hash_key="kev")
    loads = [0] * num_members
    for key in keys:
        loads[ring.pick(ring.arc(key), loads, load_bound)] += 1
        assert max(loads) <= math.ceil(load_bound * sum(loads) / num_members)


def test_a_key_stays_home_within_the_bound() -> None:
    """Repeated questions would wander and reuse nothing."""
    ring = HashRing(range(8), virtual_nodes=64, hash_key="kev")
    assert all(ring.pick(ring.arc(key), [2] * 8, 1.25) == owner for key, owner in owners(ring).items())


def test_virtual_nodes_even_out() -> None:
    """One channel would own most of the ring."""
    counts = Counter(owners(HashRing(range(8), virtual_nodes=64, hash_key="kev")).values())
    assert len(counts) == 8
    assert max(counts.values()) < 2 * len(KEYS) / 8


@pytest.mark.parametrize(("members", "virtual_nodes"), [([], 8), ([1, 1], 8), ([1], 0)])
def test_refuses_an_impossible_ring(members: list[int], virtual_nodes: int) -> None:
    """A broken ring would fail at the first question instead of at start."""
    with pytest.raises(InvariantError):
        HashRing(members, virtual_nodes=virtual_nodes, hash_key="kev")
