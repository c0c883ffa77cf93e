"""Packed models on disk: written once per model and precision, mapped into memory at every later start.

Invariants and semantics: an image holds the tensors, each on a cache line, and the structures that point into them,
with pointers stored as numbers of tensors. It is made for one fingerprint and one layout of the structures and ignored
for any other; a damaged one is made anew. It is written under another name and moved into place. Only models that
passed the check against transformers are written. Mapped pages are private: nothing written to memory reaches the file.

Not here: packing (``native_model``), the check (``native_check``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from inference_svc.kernels.layout import CLayer, CMlp, CModel
from inference_svc.kernels.library import ABI_VERSION
from inference_svc.native_model import NativeModel

_LOG = logging.getLogger("kev.model")

_MAGIC = b"kev packed model 1\n"
_CONTENT = 2
"""Raised when the same model is packed to other numbers: 2, columns are equalized for int8."""
_LINE_BYTES = 64
_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float32, torch.int32)}
_Kind = Any
"""A ctypes structure or an array of them, as a type."""


def save_image(native: NativeModel, path: Path, fingerprint: str) -> None:
    """Write a packed model; failing to is only logged, the model in memory is fine."""
    numbers = {tensor.data_ptr(): index + 1 for index, tensor in enumerate(native.tensors)}
    blobs = [_relocated(blob, numbers) for blob in (native.model, native.layers, native.mlps)]
    entries, offset = [], 0
    for tensor in (*blobs, *native.tensors):
        num_bytes = tensor.numel() * tensor.element_size()
        entries.append({"dtype": str(tensor.dtype), "shape": list(tensor.shape), "offset": offset})
        offset += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
    header = json.dumps({"label": _label(fingerprint), "num_bytes": offset, "entries": entries}).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            start = _first_byte(len(header))
            for entry, tensor in zip(entries, (*blobs, *native.tensors), strict=True):
                file.seek(start + int(str(entry["offset"])))
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
            file.truncate(start + offset)
        partial.replace(path)
    except OSError as error:
        _LOG.warning("the packed model could not be kept in %s: %s; the next start packs it again", path, error)
        with contextlib.suppress(OSError):
            partial.unlink()


def open_image(path: Path, fingerprint: str) -> NativeModel | None:
    """Map a packed model into memory; None when there is none of this fingerprint, or a damaged one."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("not a packed model")
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        if header["label"] != _label(fingerprint):
            return None
        start, size = _first_byte(header_bytes), path.stat().st_size
        if size != start + header["num_bytes"]:
            raise ValueError("cut off")
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
        model, layers, mlps, *tensors = (_tensor(mapped, entry) for entry in header["entries"])
        return NativeModel(
            _restored(CModel, model, tensors),
            _restored(CLayer * (layers.numel() // ctypes.sizeof(CLayer)), layers, tensors),
            _restored(CMlp * (mlps.numel() // ctypes.sizeof(CMlp)), mlps, tensors),
            tuple(tensors),
        )
    except (OSError, KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        _LOG.warning("%s is damaged and is made anew: %s", path, error)
        return None


def pointer_offsets(kind: _Kind) -> Iterator[int]:
    """Byte offsets of all pointers inside a structure or an array of structures."""
    if issubclass(kind, ctypes.Array):
        for index in range(kind._length_):
            start = index * ctypes.sizeof(kind._type_)
            yield from (start + offset for offset in pointer_offsets(kind._type_))
        return
    for name, field_type in kind._fields_:
        offset = getattr(kind, name).offset
        if issubclass(field_type, ctypes.Structure):
            yield from (offset + inner for inner in pointer_offsets(field_type))
        elif field_type is ctypes.c_void_p or hasattr(field_type, "contents"):
            yield offset


def _relocated(blob: _Kind, numbers: dict[int, int]) -> torch.Tensor:
    """The bytes of structures, with the number of a tensor in the place of its address, 0 for any other."""
    image = bytearray(bytes(blob))
    for offset in pointer_offsets(type(blob)):
        address = int.from_bytes(image[offset : offset + _WORD_BYTES], "little")
        image[offset : offset + _WORD_BYTES] = numbers.get(address, 0).to_bytes(_WORD_BYTES, "little")
    return torch.frombuffer(image, dtype=torch.uint8)


def _restored(kind: _Kind, blob: torch.Tensor, tensors: list[torch.Tensor]) -> _Kind:
    """Structures from their bytes, with addresses in the place of numbers.

    Raises:
        ValueError: a number names no tensor, or the size is wrong.
    """
    image = bytearray(blob.numpy().tobytes())
    if len(image) != ctypes.sizeof(kind):
        raise ValueError(f"{kind.__name__} has {len(image)} bytes, not {ctypes.sizeof(kind)}")
    for offset in pointer_offsets(kind):
        number = int.from_bytes(image[offset : offset + _WORD_BYTES], "little")
        if number > len(tensors):
            raise ValueError(f"a pointer to tensor {number} of {len(tensors)}")
        address = tensors[number - 1].data_ptr() if number else 0
        image[offset : offset + _WORD_BYTES] = address.to_bytes(_WORD_BYTES, "little")
    return kind.from_buffer_copy(image)


def _tensor(mapped: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    piece = mapped[entry["offset"] : entry["offset"] + num_bytes]
    if piece.numel() != num_bytes:
        raise ValueError("a tensor leaves the file")
    return piece.view(dtype).view(shape)


def _first_byte(header_bytes: int) -> int:
    """Where tensors begin: on a cache line after the header."""
    return -(-(len(_MAGIC) + 8 + header_bytes) // _LINE_BYTES) * _LINE_BYTES


def _label(fingerprint: str) -> str:
    sizes = ":".join(str(ctypes.sizeof(kind)) for kind in (CModel, CLayer, CMlp))
    return f"{fingerprint}:{sizes}:abi-{ABI_VERSION}:content-{_CONTENT}"
