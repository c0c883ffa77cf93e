"""Pointers inside the structures that the kernels read, as numbers of tensors and back.

Invariants and semantics: while a model is packed, and on disk, a pointer to a tensor is the tensor's number, from 1;
0 points nowhere. Pointers to other structures are nowhere too: they are set when the model gets a place.

Not here: who fills the structures (``native_model``), the file (``native_image``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
_Kind = Any
"""A ctypes structure or an array of them, as a type."""


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


def pointed(kind: _Kind, numbered: bytes, addresses: Sequence[int]) -> _Kind:
    """Structures from their bytes, with addresses in the place of numbers.

    Args:
        kind: their type.
        numbered: their bytes.
        addresses: of the tensors, in the order of their numbers.

    Raises:
        ValueError: a number names no tensor, or the size is wrong.
    """
    image = bytearray(numbered)
    if len(image) != ctypes.sizeof(kind):
        raise ValueError(f"{kind.__name__} has {len(image)} bytes, not {ctypes.sizeof(kind)}")
    for offset in pointer_offsets(kind):
        number = int.from_bytes(image[offset : offset + _WORD_BYTES], "little")
        if number > len(addresses):
            raise ValueError(f"a pointer to tensor {number} of {len(addresses)}")
        address = addresses[number - 1] if number else 0
        image[offset : offset + _WORD_BYTES] = address.to_bytes(_WORD_BYTES, "little")
    return kind.from_buffer_copy(image)
