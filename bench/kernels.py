"""How fast the native linears are, beside torch's own, on this machine.

    python -m bench.kernels [--threads 2] [--rows 1 8 32 256] [--seconds 1] [--variant avx2] [--json out.json]

Shapes are those of Gemma-3-270M: its widest layers, and the head with its search for the best token. Weights are taken
from a pile larger than the caches, as in a real step. How time is taken: ``duel``. Rates are Kev's per second of
processor time, so of one core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from bench.duel import Reading, Run, fight, parser_of, report, ring
from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import Library, Pool
from inference_svc.kernels.packed import PackedWeight
from inference_svc.kernels.quantized import int8_linear, quantize_rows

SHAPES = {"qkv": (1536, 640), "gate and up": (4096, 640), "down": (640, 2048), "head": (262_144, 640)}
PILE_BYTES = 96 << 20
MOST_HEAD_ROWS = 64
"""More rows of the head are never asked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Reading):
    """One linear at one number of rows; the bytes are those of its weights."""

    shape: str
    precision: str
    rows: int

    @property
    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        return self.shape, self.precision, str(self.rows), *self.duel.columns


class Rivals:
    """One shape and precision: Kev's kernels and torch's over the same weights."""

    def __init__(self, library: Library, pool: Pool, shape: tuple[int, int], precision: Precision) -> None:
        self._calls, self._pool, self._precision = library.calls, pool, precision
        self.n, self.k = shape
        self.num_bytes = int(self._calls.kev_packed_bytes(precision, self.n, self.k))
        weight = torch.randn(self.n, self.k) * 0.05
        count = max(1, PILE_BYTES // self.num_bytes)
        self._packed = [PackedWeight.pack(weight, precision, library) for _ in range(count)]
        self._plain = self._plain_copies(weight, count)

    def kev(self, rows: int, argmax: bool) -> Iterator[Run]:
        """Calls of Kev's kernel, each on the next weight."""
        x, y = torch.randn(rows, self.k), torch.empty(1 if argmax else rows, self.n)
        scratch = torch.empty(self._calls.kev_linear_scratch_bytes(self._precision, rows, self.k), dtype=torch.uint8)
        index, value = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        descriptions = [packed.described() for packed in self._packed]

        def call(place: int) -> object:
            weight = ctypes.byref(descriptions[place])
            given = (self._pool.address, weight, x.data_ptr(), rows, self.k, None)
            if argmax:
                found = (0.0, index.data_ptr(), value.data_ptr(), scratch.data_ptr())
                return self._calls.kev_linear_argmax(*given, *found)
            return self._calls.kev_linear(*given, y.data_ptr(), self.n, scratch.data_ptr())

        for place in cycle(range(len(descriptions))):
            yield partial(call, place)

    def plain(self, rows: int, argmax: bool) -> Iterator[Run]:
        """The same with torch's linear, or the int8 fall-back."""
        x = torch.randn(rows, self.k)
        if self._precision is Precision.BF16:
            x = x.bfloat16()

        def call(weight: torch.Tensor, scale: torch.Tensor | None) -> object:
            y = torch.nn.functional.linear(x, weight) if scale is None else int8_linear(x, weight, scale)
            return y.argmax(dim=1) if argmax else y

        for weight, scale in cycle(self._plain):
            yield partial(call, weight, scale)

    def _plain_copies(self, weight: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        if self._precision is Precision.I8:
            integers, scale = quantize_rows(weight)
            return [(integers.clone(), scale) for _ in range(count)]
        dtype = torch.bfloat16 if self._precision is Precision.BF16 else torch.float32
        return [(weight.to(dtype, copy=True), None) for _ in range(count)]


def measure(rivals: Rivals, shape: str, precision: Precision, rows: int, seconds: float) -> Speed:
    """Alternate both for a while."""
    argmax = shape == "head"
    ops = 2.0 * rows * rivals.n * rivals.k
    contestants = (rivals.kev(rows, argmax), rivals.plain(rows, argmax))
    duel = fight(*contestants, seconds=seconds, num_bytes=rivals.num_bytes, ops=ops)
    return Speed(shape=shape, precision=precision.name.lower(), rows=rows, duel=duel)


def main() -> None:
    """Measure, show, save."""
    parser = parser_of(__doc__, ("f32", "bf16", "i8"), seconds=1.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    arguments = parser.parse_args()
    speeds = []
    with ring(arguments.threads, arguments.variant) as (library, pool):
        for precision in (Precision[name.upper()] for name in arguments.precisions):
            for shape, size in SHAPES.items():
                rivals = Rivals(library, pool, size, precision)
                for rows in arguments.rows:
                    if shape != "head" or rows <= MOST_HEAD_ROWS:
                        speeds.append(measure(rivals, shape, precision, rows, arguments.seconds))
    report(f"linears, {arguments.threads} threads", ("shape", "precision", "rows"), speeds, arguments.json)


if __name__ == "__main__":
    main()
