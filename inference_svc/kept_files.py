"""Files that a cache folder keeps: written whole or not at all, and removed when nobody has used them for long.

Invariants and semantics: a file is written under a name that no other has and moved into place, so that a reader finds
all of it or nothing, whatever ends the writer and however many write at once. Whoever writes a file, or has it mapped,
holds a lock that ends with the process at the latest; what is locked is not removed. A file counts as used when it was
last written or marked. Where there are no locks, files are used all the same.

Not here: what the files hold (``native_image``, ``probe_cache``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

UNUSED_DAYS = 30
"""After so many days a file that nobody used is removed."""
_DAY_S = 86_400.0
_PARTIAL = ".partial"
_PARTIAL_AGE_S = 3_600.0
"""A file is locked a moment after it was made: one as young as that is left alone."""


@dataclass(slots=True)
class PartialFile:
    """A file that is being written; locked by this process. Removed when it is closed, unless it has been published."""

    path: Path
    file: BinaryIO
    """Open for writing and reading."""
    published: bool = False

    @classmethod
    def beside(cls, target: Path, *, buffer_bytes: int = -1) -> Self:
        """A new empty one in the folder of ``target``.

        Args:
            target: the name it is to have.
            buffer_bytes: written at once; as Python chooses if negative.

        Raises:
            OSError: the folder cannot be written.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.with_name(f"{target.name}.{secrets.token_hex(6)}{_PARTIAL}")
        file = path.open("x+b", buffering=buffer_bytes)
        _lock(file, alone=True)
        return cls(path, file)

    def publish(self, target: Path) -> None:
        """Give it its name, in the place of whatever has it.

        Raises:
            OSError: that is not possible.
        """
        self.file.flush()
        mark_used(self.file)
        self.path.replace(target)
        self.published = True

    def close(self) -> None:
        """Close it; memory that shows it stays valid."""
        with suppress(OSError):
            self.file.close()
        if not self.published:
            with suppress(OSError):
                self.path.unlink()


def mark_used(file: BinaryIO) -> None:
    """Count a file as used now, and as in use while it, or a mapping made of it, is open."""
    _lock(file, alone=False)
    if os.utime in os.supports_fd:
        with suppress(OSError):  # read-only, or another user's
            os.utime(file.fileno())


def sweep(
    folder: Path,
    suffix: str,
    now_s: float,
    *,
    is_outdated: Callable[[BinaryIO], bool] = lambda _: False,
    most: int | None = None,
) -> None:
    """Remove the files that were not used for long, and what writers that died have left; others' are left in silence.

    Args:
        folder: the folder.
        suffix: of the files that are looked at.
        now_s: seconds since the epoch.
        is_outdated: whether a file may go whatever its age.
        most: how many may stay, the last used ones.
    """
    ages = _ages(folder, now_s)
    kept = sorted((age_s, path) for path, age_s in ages.items() if path.suffix == suffix)
    for place, (age_s, path) in enumerate(kept):
        if age_s > UNUSED_DAYS * _DAY_S or (most is not None and place >= most):
            _remove(path)
        else:
            _remove(path, is_outdated)
    for path, age_s in ages.items():
        if path.suffix == _PARTIAL and suffix in path.suffixes and age_s > _PARTIAL_AGE_S:
            _remove(path)


def _ages(folder: Path, now_s: float) -> dict[Path, float]:
    ages = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                ages[path] = now_s - path.stat().st_mtime
    return ages


def _remove(path: Path, is_wanted: Callable[[BinaryIO], bool] = lambda _: True) -> None:
    """Remove a file that nobody has locked."""
    with suppress(OSError), path.open("rb") as file:
        if is_wanted(file) and _lock(file, alone=True):
            path.unlink()


def _lock(file: BinaryIO, *, alone: bool) -> bool:
    """Lock, or turn a lock into the other kind; whether that is possible now."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
