"""Weights packed for the native kernels.

Invariants and semantics: a packed weight is the only copy that the kernels need. The packed bytes are the same for
every variant, number of threads and cut into pieces: blocks of rows that are packed by themselves make, one after the
other, the bytes of the whole. int8 keeps one scale per output (``kernels.h``).

Not here: what is computed with it (``ops``, the native forward).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch

from common.errors import InvariantError
from inference_svc.kernels.layout import CWeight, Precision
from inference_svc.kernels.library import Library, Pool

_SOURCES = {torch.float32: Precision.F32, torch.bfloat16: Precision.BF16}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[num_outputs, width]`` in panels of 16 outputs."""

    library: Library
    precision: Precision
    num_outputs: int
    width: int
    data: torch.Tensor
    """``uint8``, starts on a cache line."""
    scale: torch.Tensor | None
    """int8: ``[num_outputs]`` float32."""
    sums: torch.Tensor | None
    """int8: ``[num_outputs]`` int32, sums of the quantized rows."""

    @classmethod
    def pack(cls, weight: torch.Tensor, precision: Precision, library: Library, pool: Pool | None = None) -> Self:
        """Pack ``[N, K]`` of any float dtype, with the help of a pool's threads."""
        packed = cls.empty(weight.shape[0], weight.shape[1], precision, library)
        packed.fill(0, weight, pool)
        return packed

    @classmethod
    def empty(cls, num_outputs: int, width: int, precision: Precision, library: Library) -> Self:
        """Memory for a weight that is filled later.

        Raises:
            InvariantError: no weight of this shape can be packed.
        """
        num_bytes = packed_bytes(num_outputs, width, precision, library)
        data = torch.empty(num_bytes, dtype=torch.uint8)
        library.calls.kev_prefer_huge_pages(data.data_ptr(), num_bytes)
        quantized = precision is Precision.I8
        return cls(
            library=library,
            precision=precision,
            num_outputs=num_outputs,
            width=width,
            data=data,
            scale=torch.empty(num_outputs) if quantized else None,
            sums=torch.empty(num_outputs, dtype=torch.int32) if quantized else None,
        )

    def fill(self, first: int, rows: torch.Tensor, pool: Pool | None = None) -> None:
        """Pack ``rows`` ``[n, width]`` as rows ``first`` on.

        Args:
            first: a multiple of 16.
            rows: a multiple of 16 rows, except at the end of the weight.
            pool: threads that help.

        Raises:
            InvariantError: the rows do not fit there.
        """
        if rows.dim() != 2 or rows.shape[1] != self.width:
            raise InvariantError(f"rows of shape {list(rows.shape)} packed into a weight of width {self.width}")
        source = rows.detach().cpu()
        if source.dtype not in _SOURCES:
            source = source.float()
        if source.stride(1) != 1:
            source = source.contiguous()
        stride = max(source.stride(0), self.width)
        status = self.library.calls.kev_pack_rows(
            None if pool is None else pool.address,
            self.precision,
            source.data_ptr(),
            _SOURCES[source.dtype],
            stride,
            first,
            source.shape[0],
            self.num_outputs,
            self.width,
            self.data.data_ptr(),
            None if self.scale is None else self.scale.data_ptr(),
            None if self.sums is None else self.sums.data_ptr(),
        )
        self.library.check(status)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows ``[first, last)`` as float32 ``[last - first, width]``; int8 rows times their scale."""
        made = torch.empty(last - first, self.width)
        weight = ctypes.byref(self.described())
        self.library.check(
            self.library.calls.kev_unpack_rows(None, weight, first, last - first, made.data_ptr(), self.width)
        )
        return made

    def described(self) -> CWeight:
        """As the C ABI takes it; valid while this object lives."""
        return CWeight(
            n=self.num_outputs,
            k=self.width,
            data=self.data.data_ptr(),
            scale=None if self.scale is None else self.scale.data_ptr(),
            sums=None if self.sums is None else self.sums.data_ptr(),
            precision=self.precision,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        parts = (self.data, self.scale, self.sums)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def packed_blocks(blocks: Iterable[torch.Tensor], precision: Precision, library: Library) -> Iterator[PackedWeight]:
    """Blocks of rows ``[n_i, K]``, each packed as it comes; all but the last have a multiple of 16 rows."""
    with Pool(library, torch.get_num_threads()) as pool:
        for rows in blocks:
            yield PackedWeight.pack(rows, precision, library, pool)


def packed_bytes(num_outputs: int, width: int, precision: Precision, library: Library) -> int:
    """Bytes of a packed weight's data.

    Raises:
        InvariantError: no weight of this shape can be packed.
    """
    num_bytes: int = library.calls.kev_packed_bytes(precision, num_outputs, width)
    if num_bytes < 0:
        raise InvariantError(f"a weight of {num_outputs} x {width} cannot be packed as {precision.name}")
    return num_bytes
