"""A cache folder holds whole files, in bounds, and nobody loses one that is in use."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from inference_svc.kept_files import UNUSED_DAYS, PartialFile, mark_used, sweep

NOW_S = 1_000_000_000.0
DAY_S = 86_400.0


def _file(path: Path, age_s: float, content: bytes = b"x") -> Path:
    path.write_bytes(content)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_has_its_name_only_when_it_is_published(tmp_path: Path) -> None:
    """Whatever ends the writer before: nothing that a reader would take."""
    target = tmp_path / "deep" / "a.kept"
    with closing(PartialFile.beside(target)) as given_up:
        given_up.file.write(b"half")
    assert not _names(target.parent)
    with closing(PartialFile.beside(target)) as partial:
        partial.file.write(b"whole")
        assert not target.exists()
        partial.publish(target)
    assert target.read_bytes() == b"whole" and _names(target.parent) == {"a.kept"}


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    """Same target at the same time: each has a file of its own, and the last one published stays."""
    target = tmp_path / "a.kept"
    with closing(PartialFile.beside(target)) as one, closing(PartialFile.beside(target)) as other:
        one.file.write(b"one")
        other.file.write(b"other")
        other.publish(target)
        assert target.read_bytes() == b"other"
        one.publish(target)
    assert target.read_bytes() == b"one" and _names(tmp_path) == {"a.kept"}


def test_what_nobody_used_for_long_goes(tmp_path: Path) -> None:
    """Files of another kind, young ones and ones marked as used stay."""
    _file(tmp_path / "old.kept", (UNUSED_DAYS + 1) * DAY_S)
    _file(tmp_path / "old.other", (UNUSED_DAYS + 1) * DAY_S)
    _file(tmp_path / "young.kept", (UNUSED_DAYS - 1) * DAY_S)
    with _file(tmp_path / "used.kept", (UNUSED_DAYS + 1) * DAY_S).open("rb") as file:
        mark_used(file)
    sweep(tmp_path, ".kept", NOW_S)
    assert _names(tmp_path) == {"old.other", "young.kept", "used.kept"}
    sweep(tmp_path / "nowhere", ".kept", NOW_S)


def test_only_so_many_stay(tmp_path: Path) -> None:
    """The last used ones."""
    for age in range(6):
        _file(tmp_path / f"{age}.kept", 60.0 * age)
    sweep(tmp_path, ".kept", NOW_S, most=4)
    assert _names(tmp_path) == {"0.kept", "1.kept", "2.kept", "3.kept"}


def test_what_is_outdated_goes(tmp_path: Path) -> None:
    """Whatever its age, by what it holds."""
    _file(tmp_path / "a.kept", 0, b"old")
    _file(tmp_path / "b.kept", 0, b"new")
    sweep(tmp_path, ".kept", NOW_S, is_outdated=lambda file: file.read() == b"old")
    assert _names(tmp_path) == {"b.kept"}


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    """Another process that holds the file open under a mark: locks of one process's handles exclude each other too."""
    path = _file(tmp_path / "a.kept", 0)
    with path.open("rb") as file:
        mark_used(file)
        os.utime(path, (0, 0))
        sweep(tmp_path, ".kept", NOW_S)
        assert path.exists()
    sweep(tmp_path, ".kept", NOW_S)
    assert not path.exists()


def test_what_a_dead_writer_left_goes(tmp_path: Path) -> None:
    """After an hour, and never under a writer that is alive."""
    alive, dead, young = (PartialFile.beside(tmp_path / "a.kept") for _ in range(3))
    for partial, age_s in ((alive, 7_200.0), (dead, 7_200.0), (young, 60.0)):
        os.utime(partial.path, (NOW_S - age_s, NOW_S - age_s))
    dead.file.close()
    young.file.close()
    sweep(tmp_path, ".kept", NOW_S)
    assert _names(tmp_path) == {alive.path.name, young.path.name}
    alive.close()
