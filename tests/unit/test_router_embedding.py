"""Semantic and lexical buckets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ModelError
from router_svc.embedding import HashedProjection, Projection, ProjectionTable

VOCAB = 50
TOKEN_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def cell(priority: int, bucket: int) -> int:
    return priority << 16 | bucket


def table() -> ProjectionTable:
    # Integers rather than a seeded generator: the streams of generators may change between releases.
    values = [cell(token * 7919 % 101, token * 31 % 64) for token in range(VOCAB)]
    return ProjectionTable(np.array(values, dtype=np.uint32), 6)


PROJECTIONS = [table(), HashedProjection(6, "kev")]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_buckets_are_pinned(projection: Projection) -> None:
    """Another release, process or machine would send the same question elsewhere."""
    found = [projection.bucket(ids) for ids in ([1, 2, 3], [4], [5, 6, 7, 8], [9, 10])]
    expected = {ProjectionTable: [62, 60, 25, 23], HashedProjection: [38, 39, 35, 19]}
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


def test_the_bucket_is_that_of_the_largest_cell() -> None:
    """A word more, or one twice, would move a question although its telling word is the same."""
    rows = ProjectionTable(np.array([cell(5, 1), cell(9, 2), cell(0, 3)], dtype=np.uint32), 2)
    assert [rows.bucket(ids) for ids in ([0], [1], [2], [0, 1], [0, 0, 2], [1, 0, 2])] == [1, 2, 3, 2, 1, 2]


def test_a_mapped_table_equals_the_array(tmp_path: Path) -> None:
    """A restart, which reads the table from disk, would change the buckets."""
    cells = np.array([cell(token, token % 4) for token in range(6)], dtype=np.uint32)
    np.save(tmp_path / "table.npy", cells)
    mapped = ProjectionTable.load(tmp_path / "table.npy", 2)
    assert mapped.num_planes == 2
    assert [mapped.bucket([token]) for token in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("cells", "num_planes"),
    [
        (np.zeros((4, 2), np.uint32), 6),
        (np.zeros(4, np.float32), 6),
        (np.zeros(0, np.uint32), 6),
        (np.array([cell(1, 64)], np.uint32), 6),
        (np.zeros(4, np.uint32), 0),
        (np.zeros(4, np.uint32), 17),
    ],
)
def test_refuses_what_is_no_table(cells: np.ndarray, num_planes: int) -> None:
    """A damaged table, or that of another number of planes, would route silently wrong."""
    with pytest.raises(ModelError):
        ProjectionTable(cells, num_planes)


def test_refuses_an_unreadable_file(tmp_path: Path) -> None:
    """A damaged file would end in a traceback, or run code by pickle."""
    (tmp_path / "bad.npy").write_bytes(b"no table")
    for name in ("bad.npy", "missing.npy"):
        with pytest.raises(ModelError, match="projection table"):
            ProjectionTable.load(tmp_path / name, 6)


def test_another_key_gives_other_buckets() -> None:
    """The key would not protect against guessing who shares a channel."""
    ids = [[token, token + 1] for token in range(30)]
    assert [HashedProjection(6, "a").bucket(x) for x in ids] != [HashedProjection(6, "b").bucket(x) for x in ids]


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_lexical_buckets_are_even(num_tokens: int) -> None:
    """Short questions would crowd into a few buckets."""
    projection = HashedProjection(4, "kev")
    counts = np.bincount(
        [projection.bucket(range(start, start + num_tokens)) for start in range(0, 3200, num_tokens)], minlength=16
    )
    assert counts.min() > 0
    assert counts.max() < 3 * counts.mean()


def test_questions_meet_as_often_as_their_words_overlap() -> None:
    """Two questions that share their telling word would rarely meet (the signs of a mean did that)."""
    questions = [(range(start, start + 4), range(start + 2, start + 6)) for start in range(1000, 41_000, 100)]
    projection = HashedProjection(12, "kev")
    met = sum(projection.bucket(one) == projection.bucket(other) for one, other in questions)
    assert met / len(questions) == pytest.approx(2 / 6, abs=0.08)  # two tokens of six, of nearly equal weight


def test_a_rare_token_decides_more_often() -> None:
    """Questions would be sorted by their most ordinary words."""
    projection = HashedProjection(12, "kev")
    ordinary = range(100, 300)
    met = sum(projection.bucket([token, 20_000 + token]) == projection.bucket([20_000 + token]) for token in ordinary)
    assert met > 0.9 * len(ordinary)


_CHILD = """
import sys
from router_svc.embedding import HashedProjection
print(*(HashedProjection(8, "a key").bucket([token, token * 7 + 1]) for token in range(50)))
"""


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_another_process_finds_the_same_buckets(seed: str) -> None:
    """After a restart, or on another router, the same question would go elsewhere."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
    )
    own = HashedProjection(8, "a key")
    assert list(map(int, done.stdout.split())) == [own.bucket([token, token * 7 + 1]) for token in range(50)]
