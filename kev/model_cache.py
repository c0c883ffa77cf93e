"""The user's cache of converted models, shared by every process of the user.

Invariants and semantics: an entry is a directory that appears whole or not at all: it is written beside its place,
flushed, then renamed. One process makes an entry while the others wait for it. Entries are never changed; another
version has another key.

Not here: what a model is made from (``kev.models``), how (``inference_svc.gguf_import``).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import ModelError

Progress = Callable[[str], None]

_BLOCK_BYTES = 1 << 22


class ModelCache:
    """Directories of converted models under ``root``/models."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models = root / "models"

    def entry(self, key: str, make: Callable[[Path], None], progress: Progress) -> Path:
        """The directory of ``key``, made by ``make`` (into the empty directory it is given) if it is not there yet.

        Whatever ``make`` raises leaves no entry behind.

        Raises:
            ModelError: the cache cannot be written.
        """
        final = self._models / key
        if final.is_dir():
            return final
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with _lock(self._models / f"{key}.lock", progress):
                if not final.is_dir():
                    _make_whole(final, make)
        except OSError as error:
            raise ModelError(
                f"the model cannot be prepared in {self.root}: {error}; make room there, or name another directory "
                "with core.cache_dir or KEV_CACHE_DIR"
            ) from error
        return final

    def first_time(self, name: str) -> bool:
        """Whether this is the first call for ``name`` on this cache."""
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            (self._models / f"{name}.shown").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True


def sha256_of(file: Path, progress: Progress) -> str:
    """SHA-256 of a file as hexadecimal digits; reports each tenth of a large file."""
    digest = hashlib.sha256()
    size_bytes = max(1, file.stat().st_size)
    num_read_bytes = tenths = 0
    with file.open("rb") as source:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            num_read_bytes += len(block)
            if num_read_bytes * 10 // size_bytes > tenths and size_bytes > 64 * _BLOCK_BYTES:
                tenths = num_read_bytes * 10 // size_bytes
                progress(f"checking {file.name}: {tenths * 10} %")
    return digest.hexdigest()


def _lock(file: Path, progress: Progress) -> FileLock:
    """A lock that is held; released when its ``with`` block ends."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("another process is preparing this model; waiting for it")
        lock.acquire()
    return lock


def _make_whole(final: Path, make: Callable[[Path], None]) -> None:
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # Left by a process that was killed; the lock says it is not in use.
    partial.mkdir()
    try:
        make(partial)
        for file in partial.rglob("*"):
            if file.is_file():
                _flush(file)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(file: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())
