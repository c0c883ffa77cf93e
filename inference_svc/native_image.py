"""Packed models on disk: written once per model and precision while they are packed, mapped into memory ever after.

Invariants and semantics: an image holds the tensors, each on a cache line, the structures that point into them, with
numbers of tensors for pointers, and at its end a description. It is made for one fingerprint and one layout of the
structures and ignored for any other; a damaged one is made anew. A draft is mapped as soon as it is on the disk, and
gets its name when the model has passed the check against transformers: what has the name is whole. Mapped pages are
private: nothing written to memory reaches the file. An image is locked as long as it is mapped. When one is published,
others that were made of the same model folder in the same form go, and so does what nobody used for long.

Not here: packing (``native_model``), the check (``native_check``), names and locks (``kept_files``).
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from common.clock import SystemClock
from inference_svc.kept_files import PartialFile, mark_used, sweep
from inference_svc.kernels.layout import CLayer, CMlp, CModel
from inference_svc.kernels.library import ABI_VERSION
from inference_svc.native_model import NativeModel
from inference_svc.tensor_store import Structures, check_filled

_LOG = logging.getLogger("kev.model")

_KIND = b"kev packed model "
_MAGIC = _KIND + b"2\n"
_CONTENT = 3
"""Raised when the same model is packed to other numbers: 2, columns are equalized for int8; 3, rows are spread."""
_LINE_BYTES = 64
_BUFFER_BYTES = 4 << 20
"""Written at once, from multiples of it: smaller pieces leave a file that cannot be mapped in large pages."""
_SPARE_SHARE = 1.02
"""Room that must be free, by what the tensors are estimated at: tables of positions and descriptions come besides."""
_SUFFIX = ".kevmodel"
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float32, torch.int32)}


class ImageLostError(Exception):
    """What was written of an image cannot be relied on; the model must be packed again, elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageName:
    """Which image is meant."""

    folder: Path
    fingerprint: str
    """Of the model and the kernels."""
    origin: str
    """The model's folder, and the form it is packed in: of all its images only the last one stays."""

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / f"{self.fingerprint[:32]}{_SUFFIX}"

    @property
    def label(self) -> str:
        """What its description must say."""
        sizes = ":".join(str(ctypes.sizeof(kind)) for kind in (CModel, CLayer, CMlp))
        return f"{self.fingerprint}:{sizes}:abi-{ABI_VERSION}:content-{_CONTENT}"


@dataclass(slots=True)
class ImageDraft:
    """A ``TensorStore`` in a file that has no name yet."""

    name: ImageName
    partial: PartialFile
    _entries: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def begin(cls, name: ImageName, num_bytes: int) -> ImageDraft | None:
        """A draft; None, and a line in the log, where there is no room for an image of about ``num_bytes``."""
        try:
            name.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(name.folder).free
            if free < num_bytes * _SPARE_SHARE:
                raise OSError(f"{num_bytes / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free")
            partial = PartialFile.beside(name.path, buffer_bytes=_BUFFER_BYTES)
            with ExitStack() as unless_written:
                unless_written.callback(partial.close)
                partial.file.write(bytes(_LINE_BYTES))
                unless_written.pop_all()
            return cls(name, partial)
        except OSError as error:
            _LOG.warning("%s", _not_kept(name.path, error))
            return None

    def add(self, dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[torch.Tensor]) -> int:
        """See ``TensorStore``.

        Raises:
            ImageLostError: the file cannot be written.
        """
        offset = self.partial.file.tell()
        try:
            for block in blocks:
                self._write(block.flatten().view(torch.uint8).numpy().data)
            end = self.partial.file.tell()
            self._write(memoryview(bytes(-end % _LINE_BYTES)))
        except OSError as error:
            raise self._lost(error) from error
        check_filled(end - offset, dtype, shape)
        self._entries.append({"dtype": str(dtype), "shape": list(shape), "offset": offset})
        return len(self._entries)

    def _write(self, data: memoryview) -> None:
        """Fill the buffer to the last byte before it is written, so that writes begin where they should."""
        file = self.partial.file
        while data:
            room = _BUFFER_BYTES - file.tell() % _BUFFER_BYTES
            file.write(data[:room])
            data = data[room:]

    def finish(self, structures: Structures) -> tuple[torch.Tensor, ...]:
        """See ``TensorStore``.

        Raises:
            ImageLostError: the file cannot be written or mapped.
        """
        file = self.partial.file
        parts = {name: getattr(structures, name).hex() for name in ("model", "layers", "mlps")}
        about = {"label": self.name.label, "origin": self.name.origin, "tensors": self._entries, **parts}
        described = json.dumps(about).encode()
        try:
            start = file.tell()
            file.write(described)
            file.seek(0)
            file.write(_MAGIC + start.to_bytes(8, "little") + len(described).to_bytes(8, "little"))
            file.flush()
            os.fsync(file.fileno())
            return _mapped(file, self._entries)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    def publish(self) -> None:
        """Let later starts find it, and remove what it replaces; failing to is only logged: the model is fine."""
        try:
            self.partial.publish(self.name.path)
        except OSError as error:
            _LOG.warning("%s", _not_kept(self.name.path, error))
            return
        sweep(self.name.folder, _SUFFIX, SystemClock().time(), is_outdated=self._is_outdated)

    def close(self) -> None:
        """Remove what was written, unless it is published."""
        self.partial.close()

    def _is_outdated(self, file: BinaryIO) -> bool:
        """An image of the same origin, with other content."""
        try:
            about = _description(file)
        except (OSError, ValueError):
            return False
        return about.get("origin") == self.name.origin and about.get("label") != self.name.label

    def _lost(self, error: Exception) -> ImageLostError:
        return ImageLostError(_not_kept(self.name.path, error))


def open_image(name: ImageName) -> NativeModel | None:
    """Map a packed model into memory; None when there is none of this fingerprint, or a damaged one."""
    try:
        with name.path.open("rb") as file:
            about = _description(file)
            if about.get("label") != name.label:
                return None
            mark_used(file)
            tensors = _mapped(file, about["tensors"])
            structures = Structures(*(bytes.fromhex(about[part]) for part in ("model", "layers", "mlps")))
        return NativeModel.of(structures, tensors)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        _LOG.warning("%s is damaged and is made anew: %s", name.path, error)
        return None


def _description(file: BinaryIO) -> dict[str, Any]:
    """What an image says of itself; nothing if another version of Kev has written it.

    Raises:
        ValueError: it is none, or not a whole one.
    """
    file.seek(0)
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        if magic.startswith(_KIND):
            return {}
        raise ValueError("not a packed model")
    start, num_bytes = (int.from_bytes(file.read(8), "little") for _ in range(2))
    if start + num_bytes != os.fstat(file.fileno()).st_size:
        raise ValueError("cut off")
    file.seek(start)
    about = json.loads(file.read(num_bytes))
    if not isinstance(about, dict):
        raise ValueError("not a description")
    return about


def _mapped(file: BinaryIO, entries: Iterable[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """The tensors of a file. The mapping keeps a handle of the file, and with it the lock, while one of them lives.

    Raises:
        ValueError: one leaves the file.
    """
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # Kernels without large pages refuse: the file is the same in small ones.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return tuple(_tensor(whole, entry) for entry in entries)


def _tensor(whole: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape, offset = _DTYPES[entry["dtype"]], entry["shape"], entry["offset"]
    piece = whole[offset : offset + prod(shape) * dtype.itemsize]
    if piece.numel() != prod(shape) * dtype.itemsize or offset % _LINE_BYTES:
        raise ValueError("a tensor leaves the file or its place")
    return piece.view(dtype).view(shape)


def _not_kept(path: Path, error: Exception) -> str:
    return f"the packed model is not kept in {path.parent}: {error}; the next start packs it again"
