"""Native attention of questions that share a prefix: each gets the bits that it gets alone, whoever reads along."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import VARIANTS
from tests.integration.attention_questions import Piece, Question, Shape, attend
from tests.integration.kernel_calls import variant

KV_TYPES = (Precision.F32, Precision.BF16)
WINDOWS = (0, 1, 33, 200, 301, 512)


@pytest.fixture(scope="module", params=VARIANTS)
def calls(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    with variant(request.param) as found:
        yield found


def assert_each_as_if_alone(calls: ctypes.CDLL, shape: Shape, pieces: Sequence[Piece], threads: int = 1) -> None:
    outs = attend(calls, shape, pieces, threads)
    for piece, out in zip(pieces, outs, strict=True):
        assert np.isfinite(out).all()
        (alone,) = attend(calls, shape, [replace(piece, shared=None)])
        assert out.tobytes() == alone.tobytes(), (piece.first, piece.num_prefix)


def last_rows(shape: Shape, num_prefix: int, num_private: Sequence[int], shared: int = 0) -> list[Piece]:
    """The last row of one question for each number of own positions, all with the same prefix."""
    stem = Question.random(shape, num_prefix, seed=1000 + shared)
    lengths = [num_prefix + count for count in num_private]
    questions = [stem.branch(num_prefix, length, seed) for seed, length in enumerate(lengths)]
    return [Piece(q, len(q) - 1, len(q), num_prefix, shared) for q in questions]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Shape, list[Piece]]:
    """Questions over up to two prefixes, some with several rows, and some with a prefix of their own."""
    num_kv_heads = draw(st.integers(1, 2))
    shape = Shape(
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.integers(1, 40)),
        window=draw(st.sampled_from(WINDOWS)),
        softcap=draw(st.sampled_from((0.0, 3.0))),
        kv_type=draw(st.sampled_from(KV_TYPES)),
    )
    pieces = []
    for shared in range(draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.integers(1, 20) | st.integers(1, 200), min_size=1, max_size=9))
        for piece in last_rows(shape, draw(st.integers(1, 420)), lengths, shared):
            kind = draw(st.sampled_from(("same", "same", "same", "own", "rows", "inside")))
            first = max(0, piece.first - draw(st.integers(1, 70)))
            inside = min(piece.first, piece.num_prefix - 1)
            pieces.append(
                {
                    "same": piece,
                    "own": replace(piece, shared=None),
                    "rows": replace(piece, first=first),
                    "inside": replace(piece, first=inside, last=inside + 1),
                }[kind]
            )
    return shape, draw(st.permutations(pieces))


@settings(max_examples=60, deadline=None)
@given(crowd=crowds(), threads=st.integers(1, 3))
def test_any_crowd_over_a_prefix_gives_the_bits_of_each_alone(
    calls: ctypes.CDLL, crowd: tuple[Shape, list[Piece]], threads: int
) -> None:
    shape, pieces = crowd
    assert_each_as_if_alone(calls, shape, pieces, threads)


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("window", [0, 301, 512])
@pytest.mark.parametrize("num_prefix", [255, 256, 257, 319, 321])
def test_questions_of_any_number_and_length_give_their_own_bits(
    calls: ctypes.CDLL, num_prefix: int, window: int, kv_type: Precision
) -> None:
    shape = Shape(head_size=40, window=window, kv_type=kv_type)
    for num_private in ((1,), (1, 1), (64, 1, 2), (3, 200, 1, 65, 63, 1, 130, 7)):
        for threads in (1, 2, 3):
            assert_each_as_if_alone(calls, shape, last_rows(shape, num_prefix, num_private), threads)


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize(
    ("num_heads", "num_prefix", "num_questions", "window"),
    [(4, 150, 80, 0), (1, 130, 150, 200), (100, 200, 3, 0), (4, 5000, 7, 0), (4, 5000, 7, 2000)],
)
def test_more_questions_than_a_block_or_the_scratch_holds_give_their_own_bits(
    calls: ctypes.CDLL, num_heads: int, num_prefix: int, num_questions: int, window: int, kv_type: Precision
) -> None:
    shape = Shape(num_heads, 1, 8, window, kv_type=kv_type)
    num_private = [1 + 5 * i % 37 for i in range(num_questions)]
    assert_each_as_if_alone(calls, shape, last_rows(shape, num_prefix, num_private))


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("window", [0, 33, 301])
def test_questions_with_several_rows_over_a_prefix_give_their_own_bits(
    calls: ctypes.CDLL, window: int, kv_type: Precision
) -> None:
    """Some begin inside the prefix, one ends there; some make one block beyond it, some more than one."""
    shape = Shape(head_size=40, window=window, kv_type=kv_type)
    for num_prefix in (256, 321):
        pieces = last_rows(shape, num_prefix, (5, 1, 64, 90, 20))
        rows = [replace(p, first=p.last - count) for p, count in zip(pieces, (5, 30, 64, 150, 9), strict=True)]
        inside = replace(pieces[0], first=num_prefix - 60, last=num_prefix - 20)
        for threads in (1, 2):
            assert_each_as_if_alone(calls, shape, [*rows, inside, pieces[2]], threads)


def test_windows_far_apart_give_each_its_own_bits(calls: ctypes.CDLL) -> None:
    """So far that one block would need more scores than the scratch holds for it."""
    for kv_type in KV_TYPES:
        shape = Shape(head_size=8, window=1500, kv_type=kv_type)
        pieces = last_rows(shape, 1700, [1 + 75 * i for i in range(18)])
        assert_each_as_if_alone(calls, shape, pieces)


def test_questions_over_a_part_of_a_prefix_give_their_own_bits(calls: ctypes.CDLL) -> None:
    for kv_type in KV_TYPES:
        shape = Shape(head_size=8, window=301, kv_type=kv_type)
        whole = last_rows(shape, 300, (1, 40, 2, 3))
        assert_each_as_if_alone(calls, shape, [*whole, *(replace(piece, num_prefix=257) for piece in whole)])


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("name", ["keys", "values"])
def test_what_is_not_a_number_in_a_prefix_reaches_the_questions_that_see_it_alone(
    calls: ctypes.CDLL, name: str, kv_type: Precision
) -> None:
    """The windows of later rows begin behind the bad position, in the tile and in the pair of positions."""
    shape = Shape(head_size=17, window=200, kv_type=kv_type)
    pieces = last_rows(shape, 220, (1, 2, 3, 4, 8, 40))
    clean = attend(calls, shape, pieces)
    for seen_by in range(1, len(pieces)):
        at = pieces[seen_by].question.first_visible(pieces[seen_by].first) - 1
        for piece in pieces:
            getattr(piece.question, name)[at] = np.nan
        outs = attend(calls, shape, pieces)
        for index, (out, expected) in enumerate(zip(outs, clean, strict=True)):
            sees = pieces[index].question.first_visible(pieces[index].first) <= at
            assert np.isnan(out).all() if sees else out.tobytes() == expected.tobytes()
