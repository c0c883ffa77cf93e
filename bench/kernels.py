"""How fast the native linears are, beside torch's own, on this machine.

    python -m bench.kernels [--threads 2] [--rows 1 8 32 256] [--seconds 1] [--variant avx2] [--json out.json]

Shapes are those of Gemma-3-270M: its widest layers, and the head with its search for the best token. Weights are taken
from a pile larger than the caches, as in a real step. Kev and torch take turns; medians are shown. Wall time says what
a user waits for; processor time what it costs, also on a machine that does other things (there, use one thread: torch's
wait for each other at full speed). Rates are Kev's per second of processor time, so of one core.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from inference_svc.kernels.layout import Precision
from inference_svc.kernels.library import VARIANTS, Library, Pool, kernels
from inference_svc.kernels.packed import PackedWeight
from inference_svc.kernels.quantized import int8_linear, quantize_rows

SHAPES = {"qkv": (1536, 640), "gate and up": (4096, 640), "down": (640, 2048), "head": (262_144, 640)}
PILE_BYTES = 96 << 20
MOST_HEAD_ROWS = 64
"""More rows of the head are never asked for at once."""

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One linear at one number of rows."""

    shape: str
    precision: str
    rows: int
    kev_wall_us: float
    kev_cpu_us: float
    torch_wall_us: float
    torch_cpu_us: float
    gigabytes_per_cpu_s: float
    """Weights read by Kev."""
    gigaops_per_cpu_s: float
    """Multiplications and additions by Kev."""


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
    contestants = (rivals.kev(rows, argmax), rivals.plain(rows, argmax))
    for contestant in contestants:
        next(contestant)()
    times: list[list[tuple[float, float]]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[1]) < 5:
        for contestant, found in zip(contestants, times, strict=True):
            call = next(contestant)
            cpu, wall = time.process_time(), time.perf_counter()
            call()
            found.append((time.perf_counter() - wall, time.process_time() - cpu))
    kev, other = ([statistics.median(column) for column in zip(*found, strict=True)] for found in times)
    return Speed(
        shape=shape,
        precision=precision.name.lower(),
        rows=rows,
        kev_wall_us=kev[0] * 1e6,
        kev_cpu_us=kev[1] * 1e6,
        torch_wall_us=other[0] * 1e6,
        torch_cpu_us=other[1] * 1e6,
        gigabytes_per_cpu_s=rivals.num_bytes / kev[1] / 1e9,
        gigaops_per_cpu_s=2 * rows * rivals.n * rivals.k / kev[1] / 1e9,
    )


def main() -> None:
    """Measure, show, save."""
    arguments = _arguments()
    library = kernels()
    if not isinstance(library, Library):
        raise SystemExit(f"there are no native kernels here: {library}")
    if arguments.variant:
        library.check(library.calls.kev_isa_select(arguments.variant.encode()))
    torch.set_num_threads(arguments.threads)
    speeds = []
    with Pool(library, arguments.threads) as pool, torch.inference_mode():
        for precision in (Precision[name.upper()] for name in arguments.precisions):
            for shape, size in SHAPES.items():
                rivals = Rivals(library, pool, size, precision)
                for rows in arguments.rows:
                    if shape != "head" or rows <= MOST_HEAD_ROWS:
                        speeds.append(measure(rivals, shape, precision, rows, arguments.seconds))
    Console().print(_table(speeds, library.calls.kev_isa_name().decode(), arguments.threads))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(speed) for speed in speeds], indent=1), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--precisions", nargs="+", choices=["f32", "bf16", "i8"], default=["bf16", "i8"])
    parser.add_argument("--seconds", type=float, default=1.0, help="per line of the table")
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _table(speeds: list[Speed], variant: str, threads: int) -> Table:
    table = Table(title=f"linears, {variant}, {threads} threads; microseconds, wall (processor)")
    for column in ("shape", "precision", "rows", "Kev", "torch", "torch / Kev", "GB/s", "GOP/s"):
        table.add_column(column, justify="left" if column in ("shape", "precision") else "right")
    for speed in speeds:
        table.add_row(
            speed.shape,
            speed.precision,
            str(speed.rows),
            f"{speed.kev_wall_us:.0f} ({speed.kev_cpu_us:.0f})",
            f"{speed.torch_wall_us:.0f} ({speed.torch_cpu_us:.0f})",
            f"{speed.torch_cpu_us / speed.kev_cpu_us:.2f}",
            f"{speed.gigabytes_per_cpu_s:.1f}",
            f"{speed.gigaops_per_cpu_s:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
