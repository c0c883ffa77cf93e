"""Weights are packed in blocks of rows, and the blocks make the whole; long packing is told of."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import ManualClock
from common.errors import InvariantError
from inference_svc.decoder import Linear
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import Library, kernels
from inference_svc.kernels.packed import PackedWeight, packed_blocks, packed_bytes
from inference_svc.progress import Progress
from inference_svc.tensor_store import MemoryStore, Structures


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 50), st.booleans(), st.booleans(), st.data()
)
def test_blocks_are_the_rows(
    sizes: list[int], num_rows: int, has_columns: bool, has_divisors: bool, data: st.DataObject
) -> None:
    """However parts and blocks are cut: each row once, in order, scaled as it was before there were blocks."""
    torch.manual_seed(data.draw(st.integers(0, 100)))
    parts = [torch.randn(size, 5).bfloat16() for size in sizes]
    whole = torch.cat(parts)
    columns = 2.0 ** torch.randint(-3, 3, (5,)) if has_columns else None
    divisors = 2.0 ** torch.randint(-3, 3, (len(whole),)) if has_divisors else None
    linear = Linear(lambda: parts, columns=columns, divisors=divisors)
    blocks = list(linear.blocks(num_rows))
    assert linear.shape() == tuple(whole.shape)
    assert all(len(block) == num_rows for block in blocks[:-1]) and len(blocks[-1]) <= num_rows
    expected = whole if divisors is None else whole / divisors.bfloat16()[:, None]
    expected = expected if columns is None else expected.float() * columns
    assert torch.equal(torch.cat(blocks), expected)


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
def test_packed_blocks_are_the_packed_whole(precision: Precision) -> None:
    """Bytes, scales and sums, with a rest that fills no panel and a width that fills no word."""
    library = kernels()
    if not isinstance(library, Library):
        pytest.skip(library)
    weight = torch.randn(100, 35)
    whole = PackedWeight.pack(weight, precision, library)
    for rows in (16, 48, 112):
        blocks = list(packed_blocks(weight.split(rows), precision, library))
        assert torch.equal(torch.cat([block.data for block in blocks]), whole.data)
        for kind in ("scale", "sums"):
            made = [getattr(block, kind) for block in blocks]
            if precision is Precision.I8:
                assert torch.equal(torch.cat(made), getattr(whole, kind))
            else:
                assert made == [None] * len(blocks)
    assert packed_bytes(100, 35, precision, library) == whole.data.numel()


def test_a_store_takes_what_was_announced() -> None:
    """A block too few would leave a part of a weight to chance."""
    library = kernels()
    if not isinstance(library, Library):
        pytest.skip(library)
    store = MemoryStore(library)
    assert store.add(torch.float32, (2, 3), [torch.ones(4), torch.zeros(2)]) == 1
    with pytest.raises(InvariantError, match="16 bytes"):
        store.add(torch.float32, (2, 3), [torch.ones(4)])
    [kept] = store.finish(Structures(b"", b"", b""))
    assert torch.equal(kept, torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])) and kept.data_ptr() % 64 == 0


def test_long_work_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """Short work is not, nor is the end."""
    clock = ManualClock()
    progress = Progress(clock)
    with caplog.at_level(logging.INFO, logger="kev.model"):
        for done in range(1, 41):
            clock.advance(1.0)
            progress.tell("layers packed", done, 40)
    assert [record.getMessage() for record in caplog.records] == [
        f"layers packed: {done} of 40" for done in range(5, 40, 5)
    ]
