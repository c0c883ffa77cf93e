"""The table of prefixes: counted references, least recently used, a limit of its own, never across tenants."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from inference_svc.prefixes import PrefixEntry, PrefixTable, prefix_key
from inference_svc.slots import Extent, KVLedger

ARENA = 64
TEXTS = tuple(tuple(range(first, first + size)) for first, size in ((0, 8), (0, 16), (5, 8), (9, 24), (40, 4)))

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "give", "fill", "evict"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, len(TEXTS) - 1),
        st.integers(0, 7),
    ),
    max_size=60,
)


class Rig:
    """A table over a small arena, with a record of what was scrubbed."""

    def __init__(self, *, keep: bool = True, max_positions: int | None = None) -> None:
        self.ledger = KVLedger(ARENA)
        self.scrubbed: list[Extent] = []
        self.table = PrefixTable(
            self.ledger, keep=keep, scrub=self.scrubbed.append, model="m", max_positions=max_positions
        )

    def stored(self, tenant: str, ids: tuple[int, ...]) -> PrefixEntry:
        """A complete prefix that nobody uses."""
        entry = self.table.acquire(tenant, ids)
        assert entry is not None
        entry.num_computed = len(ids)
        self.table.release(entry, 1)
        return entry


@given(_STEPS, st.booleans(), st.sampled_from([None, 0, 12, 30]))
def test_books_hold_under_any_order(
    steps: list[tuple[str, str, int, int]], keep: bool, max_positions: int | None
) -> None:
    """References, positions and tenants after every step; nobody's prefix goes while it is used."""
    rig = Rig(keep=keep, max_positions=max_positions)
    users: list[tuple[str, PrefixEntry]] = []
    for action, tenant, text, pick in steps:
        if action == "take":
            entry = rig.table.acquire(tenant, TEXTS[text])
            if entry is not None:
                assert entry.ids == TEXTS[text] and entry.key == prefix_key(tenant, "m", TEXTS[text])
                users.append((tenant, entry))
        elif action == "give" and users:
            _, entry = users.pop(pick % len(users))
            rig.table.release(entry, pick)
        elif action == "fill" and users:
            entry = users[pick % len(users)][1]
            entry.num_computed = len(entry.ids)
        elif action == "evict":
            rig.table.evict_one()
        counts = Counter(id(entry) for _, entry in users)
        for owner, entry in users:
            assert entry.num_references == counts[id(entry)]
            assert rig.table.find(owner, entry.ids) is entry, "a used prefix was dropped"
        assert rig.table.num_references == len(users)
        assert rig.table.num_positions == rig.ledger.num_held
        in_use = sum({id(entry): entry.extent.length for _, entry in users}.values())
        if not keep:
            assert rig.table.num_positions == in_use
        if max_positions is not None:
            assert rig.table.num_positions <= max(max_positions, in_use)
        rig.ledger.check_integrity()
    assert len(rig.scrubbed) == len(set(rig.scrubbed)), "each extent is zeroed once"


def test_a_prefix_is_found_by_its_own_tenant_alone() -> None:
    """The same ids of another tenant are stored apart."""
    rig = Rig()
    mine = rig.stored("a", TEXTS[0])
    assert rig.table.find("b", TEXTS[0]) is None
    theirs = rig.table.acquire("b", TEXTS[0])
    assert theirs is not None and theirs is not mine and theirs.extent.start != mine.extent.start
    assert not theirs.complete, "what another tenant computed is not taken over"


def test_another_model_never_finds_it() -> None:
    """The key carries the fingerprint."""
    assert prefix_key("a", "m", TEXTS[0]) != prefix_key("a", "n", TEXTS[0])


def test_equal_digests_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are compared, so a collision of the hash waits or computes, and is never served."""
    monkeypatch.setattr("inference_svc.prefixes.prefix_key", lambda tenant, model, _ids: (tenant, model, b"same"))
    rig = Rig()
    rig.stored("a", TEXTS[0])
    assert rig.table.find("a", TEXTS[2]) is None
    assert rig.table.acquire("a", TEXTS[2]) is None


def test_the_least_recently_used_goes_first() -> None:
    """A hit makes a prefix young again."""
    rig = Rig(max_positions=24)
    first, second = rig.stored("a", TEXTS[0]), rig.stored("a", TEXTS[2])
    rig.table.release(rig.table.acquire("a", first.ids) or first, 1)
    rig.stored("a", tuple(range(90, 102)))
    assert rig.table.find("a", first.ids) is first
    assert rig.table.find("a", second.ids) is None and second.extent in rig.scrubbed


def test_a_prefix_above_the_limit_serves_its_users_only() -> None:
    """It is stored while somebody uses it, and goes with the last of them."""
    rig = Rig(max_positions=8)
    entry = rig.table.acquire("a", TEXTS[3])
    again = rig.table.acquire("a", TEXTS[3])
    assert entry is not None and again is entry
    entry.num_computed = len(entry.ids)
    rig.table.release(entry, 1)
    assert len(rig.table) == 1
    rig.table.release(entry, 2)
    assert len(rig.table) == 0 and rig.ledger.num_held == 0


def test_a_reference_is_given_back_once() -> None:
    """A second time would drop a prefix under its next user."""
    rig = Rig()
    entry = rig.stored("a", TEXTS[0])
    with pytest.raises(InvariantError, match="no reference"):
        rig.table.release(entry, 1)
