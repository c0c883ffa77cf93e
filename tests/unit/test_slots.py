"""The KV ledger keeps its books under any sequence of reservations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from inference_svc.memory_plan import KVGeometry
from inference_svc.slots import Extent, KVLedger


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 30)), max_size=60),
    alignment=st.sampled_from([1, 2, 8]),
)
def test_free_and_held_always_make_the_whole(actions: list[tuple[bool, int, int]], alignment: int) -> None:
    """No position is ever owned twice or lost; all is free again at the end."""
    ledger = KVLedger(128, alignment)
    held: list[Extent] = []
    for take, size, pick in actions:
        if take or not held:
            extent = ledger.reserve(f"owner-{len(held)}", size)
            if extent is None:
                assert ledger.num_free < 128, "an empty arena has room for every size used here"
            else:
                assert extent.length >= size and extent.start % alignment == 0
                held.append(extent)
        else:
            ledger.release(held.pop(pick % len(held)))
        ledger.check_integrity()
        assert ledger.num_free + ledger.num_held == 128
    for extent in held:
        ledger.release(extent)
    assert ledger.num_free == 128
    assert ledger.reserve("all", 128) is not None, "free ranges are merged again"


def test_an_extent_is_refused_after_its_positions_went_to_another() -> None:
    """A stale view of released memory would be cross-talk; the epoch catches it."""
    ledger = KVLedger(16)
    first = ledger.reserve("a", 16)
    assert first is not None
    ledger.release(first)
    second = ledger.reserve("b", 16)
    assert second is not None and second.start == first.start
    with pytest.raises(InvariantError, match="stale"):
        ledger.check(first, "a", 0, 1)
    with pytest.raises(InvariantError, match="not held"):
        ledger.release(first)


@pytest.mark.parametrize(("owner", "first", "last", "words"), [("b", 0, 1, "belongs to"), ("a", 0, 9, "leave extent")])
def test_foreign_owners_and_rows_out_of_range_are_refused(owner: str, first: int, last: int, words: str) -> None:
    """Another owner, or a row past the end of the extent, never reaches the cache."""
    ledger = KVLedger(16)
    extent = ledger.reserve("a", 8)
    assert extent is not None
    with pytest.raises(InvariantError, match=words):
        ledger.check(extent, owner, first, last)


def test_broken_books_are_noticed() -> None:
    """check_integrity is able to fail."""
    ledger = KVLedger(16)
    ledger.reserve("a", 4)
    ledger._free.append((2, 3))
    with pytest.raises(InvariantError, match="broken"):
        ledger.check_integrity()


def test_position_bytes_count_kv_heads_and_the_real_head_size() -> None:
    """Gemma-3-270M in bf16: 18 layers, 1 KV head of 256: 18,432 bytes, not 46,080 and not 11,520."""
    geometry = KVGeometry(num_layers=18, num_kv_heads=1, key_head_size=256, value_head_size=256, element_bytes=2)
    assert geometry.position_bytes == 18_432
    assert geometry.num_positions(0, 8, 4096, 1) == 8 * 4096
    assert geometry.num_positions(18_432 * 100 + 5, 8, 4096, 1) == 100


def test_extents_start_on_cache_lines() -> None:
    """One bf16 head of 8 takes 16 bytes a position: four positions fill a cache line."""
    geometry = KVGeometry(num_layers=2, num_kv_heads=1, key_head_size=8, value_head_size=16, element_bytes=2)
    assert geometry.alignment_positions == 4
    assert geometry.num_positions(0, 2, 9, 4) == 24
