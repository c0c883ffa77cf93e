"""Native attention: near the exact softmax, and each row the same bits in any company, cut, storage and threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kernels.attention_calls import CAttention
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import VARIANTS
from tests.integration.attention_questions import Piece, Question, Shape, attend
from tests.integration.kernel_calls import Floats, variant

KV_TYPES = (Precision.F32, Precision.BF16)
HEAD_SIZES = (1, 8, 15, 16, 17, 31, 33, 64, 80, 128, 256)
MASKS = ((0, 0.0), (5, 0.0), (32, 20.0), (33, 0.0), (0, 1.5))
"""Window and softcap."""


@pytest.fixture(scope="module", params=VARIANTS)
def calls(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    with variant(request.param) as found:
        yield found


def tolerance(question: Question) -> float:
    """For what is summed in float32; bfloat16 queries and weights differ from the exact ones by 2^-9 of themselves."""
    largest = float(np.abs(question.values).max())
    return largest * (3e-6 if question.shape.kv_type is Precision.F32 else 2e-2)


def assert_close(out: Floats, question: Question, first: int, last: int) -> None:
    np.testing.assert_allclose(out, question.exact(first, last), rtol=0, atol=tolerance(question))


def alone(calls: ctypes.CDLL, question: Question) -> Floats:
    return attend(calls, question.shape, [Piece(question, 0, len(question))])[0]


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_outputs_are_near_the_exact_softmax(calls: ctypes.CDLL, head_size: int, kv_type: Precision) -> None:
    for window, softcap in MASKS:
        for num_heads, num_kv_heads in ((4, 1), (3, 3), (6, 2)):
            shape = Shape(num_heads, num_kv_heads, head_size, window, softcap, kv_type)
            question = Question.random(shape, 70, seed=head_size)
            first, second = attend(calls, shape, [Piece(question, 0, 70), Piece(question, 69, 70)])
            assert_close(first, question, 0, 70)
            assert_close(second, question, 69, 70)


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("window", [0, 100])
def test_long_contexts_and_wide_groups_are_near_the_exact_softmax(
    calls: ctypes.CDLL, window: int, kv_type: Precision
) -> None:
    """Blocks that the scratch makes smaller, groups that one block cannot hold, and more blocks than one."""
    for num_heads, length, first in ((4, 5000, 4990), (130, 300, 298), (7, 300, 0)):
        shape = Shape(num_heads, 1, 24, window, kv_type=kv_type)
        question = Question.random(shape, length)
        (out,) = attend(calls, shape, [Piece(question, first, length)], threads=2)
        assert_close(out[-2:], question, length - 2, length)
        assert_close(out[:1], question, first, first + 1)


def test_every_place_of_the_prefix_gives_the_same_bits(calls: ctypes.CDLL) -> None:
    for kv_type in KV_TYPES:
        shape = Shape(head_size=20, window=40, kv_type=kv_type)
        question = Question.random(shape, 67)
        whole = alone(calls, question)
        for num_prefix in range(68):
            first = min(num_prefix, 66)
            pieces = [Piece(question, first, 67, num_prefix), Piece(question, 0, 67, num_prefix)]
            cut, full = attend(calls, shape, pieces)
            assert cut.tobytes() == whole[first:].tobytes()
            assert full.tobytes() == whole.tobytes()


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
def test_every_row_alone_gives_the_bits_of_the_prefill(calls: ctypes.CDLL, kv_type: Precision) -> None:
    """One row at a time, as decoding does, over borders of tiles, windows and pairs of positions."""
    for window in (0, 1, 2, 31, 32, 33, 64, 65):
        shape = Shape(head_size=40, window=window, kv_type=kv_type)
        question = Question.random(shape, 140)
        whole = alone(calls, question)
        for position in range(140):
            (row,) = attend(calls, shape, [Piece(question, position, position + 1)])
            assert row.tobytes() == whole[position : position + 1].tobytes(), (window, position)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(calls: ctypes.CDLL, threads: int) -> None:
    for kv_type in KV_TYPES:
        shape = Shape(6, 2, 64, kv_type=kv_type)
        questions = [Question.random(shape, length, seed=length) for length in (1, 30, 200, 90)]
        together = attend(calls, shape, [Piece(q, 0, len(q)) for q in questions], threads)
        for question, out in zip(questions, together, strict=True):
            assert out.tobytes() == alone(calls, question).tobytes()


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Shape, list[Piece]]:
    num_kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.integers(1, 70)),
        window=draw(st.integers(0, 80)),
        softcap=draw(st.sampled_from((0.0, 3.0))),
        kv_type=draw(st.sampled_from(KV_TYPES)),
    )
    pieces = []
    for seed in range(draw(st.integers(1, 3))):
        question = Question.random(shape, draw(st.integers(1, 150)), seed)
        borders = draw(st.lists(st.integers(0, len(question)), max_size=4))
        cuts = [0, *sorted(borders), len(question)]
        prefixes = draw(st.lists(st.integers(0, len(question)), min_size=len(cuts) - 1, max_size=len(cuts) - 1))
        for first, last, num_prefix in zip(cuts[:-1], cuts[1:], prefixes, strict=True):
            pieces.append(Piece(question, first, last, min(num_prefix, last)))
    return shape, draw(st.permutations(pieces))


@settings(max_examples=40, deadline=None)
@given(crowd=crowds(), threads=st.integers(1, 3))
def test_any_cut_in_any_company_gives_the_bits_of_the_question_alone(
    calls: ctypes.CDLL, crowd: tuple[Shape, list[Piece]], threads: int
) -> None:
    shape, pieces = crowd
    outs = attend(calls, shape, pieces, threads)
    wholes = {id(piece.question): alone(calls, piece.question) for piece in pieces}
    for piece, out in zip(pieces, outs, strict=True):
        assert out.tobytes() == wholes[id(piece.question)][piece.first : piece.last].tobytes()
    question = pieces[0].question
    assert_close(wholes[id(question)], question, 0, len(question))


@pytest.mark.parametrize("kv_type", KV_TYPES, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_reaches_the_rows_that_see_it_alone(
    calls: ctypes.CDLL, poison: float, kv_type: Precision
) -> None:
    """One bad position of the question itself: earlier rows and rows whose window has passed it keep their bits."""
    for window, at in ((0, 20), (9, 20), (9, 21), (32, 1)):
        shape = Shape(head_size=17, window=window, kv_type=kv_type)
        question = Question.random(shape, 80)
        clean = alone(calls, question)
        end = at + window if window else 80
        for name in ("keys", "values"):
            bad = getattr(question, name).copy()
            bad[at, 0, 3] = poison
            out = alone(calls, replace(question, **{name: bad}))
            assert out[:at].tobytes() == clean[:at].tobytes()
            assert out[end:].tobytes() == clean[end:].tobytes()
            if np.isnan(poison) or name == "values":
                assert not np.isfinite(out[at:end, :, 3]).any()


def test_scores_far_apart_leave_the_largest_value(calls: ctypes.CDLL) -> None:
    for kv_type in KV_TYPES:
        shape = Shape(head_size=16, kv_type=kv_type)
        question = Question.random(shape, 60, spread=1.0)
        huge = replace(question, keys=question.keys * np.float32(2.0**40))
        assert_close(alone(calls, huge), huge, 0, 60)


def test_no_segments_and_no_rows_are_nothing_to_do(calls: ctypes.CDLL) -> None:
    shape = Shape()
    question = Question.random(shape, 5)
    assert attend(calls, shape, []) == []
    nothing, some = attend(calls, shape, [Piece(question, 3, 3), Piece(question, 0, 5)])
    assert nothing.size == 0
    assert some.tobytes() == alone(calls, question).tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 3, "num_kv_heads": 2},
        {"head_size": 0},
        {"num_kv_heads": 0},
        {"window": -1},
        {"kv_type": int(Precision.I8)},
        {"ldq": 31},
        {"ldo": 31},
        {"q": None},
        {"values": None},
    ],
    ids=str,
)
def test_a_call_that_makes_no_sense_is_refused(calls: ctypes.CDLL, change: dict[str, int | None]) -> None:
    memory = np.zeros(64, np.float32)
    address = memory.ctypes.data
    call = CAttention(address, 32, address, address, address, 32, 4, 2, 8, 0, 1.0, 0.0, int(Precision.F32))
    for name, value in change.items():
        setattr(call, name, value)
    assert calls.kev_attention(None, ctypes.addressof(call), None, 0, None) != 0
    assert not memory.any()
