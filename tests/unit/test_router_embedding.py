"""Semantic and lexical buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ModelError
from router_svc.embedding import HashedProjection, Projection, ProjectionTable

VOCAB = 50
TOKEN_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def table() -> ProjectionTable:
    # Integers rather than a seeded generator: the streams of generators may change between releases.
    values = np.arange(VOCAB * 6) * 7919 % 101 - 50
    return ProjectionTable(values.reshape(VOCAB, 6).astype(np.float16))


PROJECTIONS = [table(), HashedProjection(6, "kev")]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_buckets_are_pinned(projection: Projection) -> None:
    """Another release, process or machine would send the same question elsewhere."""
    found = [projection.bucket(ids) for ids in ([1, 2, 3], [4], [5, 6, 7, 8], [9, 10])]
    expected = {ProjectionTable: [35, 45, 12, 51], HashedProjection: [37, 42, 50, 14]}
    assert found == expected[type(projection)]


@pytest.mark.parametrize("projection", PROJECTIONS)
@settings(max_examples=60, deadline=None)
@given(token_ids=TOKEN_IDS, data=st.data())
def test_a_bucket_depends_on_the_question_only(
    projection: Projection, token_ids: list[int], data: st.DataObject
) -> None:
    """A question's bucket would change with its neighbours, or fall outside the buckets."""
    bucket = projection.bucket(token_ids)
    assert 0 <= bucket < 64
    projection.bucket([3, 1, 4])
    shuffled = data.draw(st.permutations(token_ids))
    assert projection.bucket(shuffled) == projection.bucket(tuple(token_ids)) == bucket


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_known_is_bucket_zero(projection: Projection) -> None:
    """An empty question, or one of unknown tokens only, would crash the router."""
    assert projection.bucket([]) == 0
    assert projection.bucket([-1]) == 0
    assert table().bucket([VOCAB, 10**12]) == 0
    assert table().bucket([VOCAB, 4]) == table().bucket([4])


def test_bucket_is_the_sign_of_the_mean() -> None:
    """The bucket would not be the one the table was made for."""
    rows = ProjectionTable(np.array([[1, -1, 2], [-3, 5, 2], [0, 0, 0]], dtype=np.float32))
    assert [rows.bucket(ids) for ids in ([0], [1], [0, 1], [0, 0, 0, 0, 1], [2])] == [0b101, 0b110, 0b110, 0b111, 0]


def test_sums_are_exact() -> None:
    """The order of the tokens would decide on which side of a plane a question lies."""
    rows = ProjectionTable(np.array([[1e16], [1.0], [-1e16]], dtype=np.float32))
    assert {rows.bucket(ids) for ids in ([0, 1, 2], [0, 2, 1], [1, 0, 2])} == {1}


def test_a_mapped_table_equals_the_array(tmp_path: Path) -> None:
    """A restart, which reads the table from disk, would change the buckets."""
    rows = np.arange(12, dtype=np.float16).reshape(6, 2) - 5
    np.save(tmp_path / "table.npy", rows)
    mapped = ProjectionTable.load(tmp_path / "table.npy")
    assert mapped.num_planes == 2
    assert [mapped.bucket([token]) for token in range(6)] == [
        ProjectionTable(rows).bucket([token]) for token in range(6)
    ]


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros(4, np.float32),
        np.zeros((4, 2), np.float64),
        np.zeros((4, 17), np.float32),
        np.zeros((0, 2), np.float32),
        np.array([[1.0, np.nan]], np.float32),
    ],
)
def test_refuses_what_is_no_table(rows: np.ndarray) -> None:
    """A damaged table would route silently wrong."""
    with pytest.raises(ModelError):
        ProjectionTable(rows)


def test_refuses_an_unreadable_file(tmp_path: Path) -> None:
    """A damaged file would end in a traceback, or run code by pickle."""
    (tmp_path / "bad.npy").write_bytes(b"no table")
    for name in ("bad.npy", "missing.npy"):
        with pytest.raises(ModelError, match="projection table"):
            ProjectionTable.load(tmp_path / name)


def test_another_key_gives_other_buckets() -> None:
    """The key would not protect against guessing who shares a channel."""
    ids = [[token, token + 1] for token in range(30)]
    assert [HashedProjection(6, "a").bucket(x) for x in ids] != [HashedProjection(6, "b").bucket(x) for x in ids]


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_lexical_buckets_are_even(num_tokens: int) -> None:
    """Short questions would crowd into a few buckets (ties of signs did that)."""
    projection = HashedProjection(4, "kev")
    counts = np.bincount(
        [projection.bucket(range(start, start + num_tokens)) for start in range(0, 3200, num_tokens)], minlength=16
    )
    assert counts.min() > 0
    assert counts.max() < 3 * counts.mean()
