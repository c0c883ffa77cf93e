"""How fast native attention is, beside torch's own, on this machine.

    python -m bench.attention_kernels [--threads 2] [--precisions bf16 f32] [--variant avx2] [--json out.json]

Shapes are those of Gemma-3-270M (4 query heads, 1 key-value head of 256 numbers) and of two other kinds. Kev computes
all questions in one call; torch's scaled_dot_product_attention one question after the other, as a batch would pad. Keys
and values are taken from a pile larger than the caches, as in a real step. Of what questions share, torch has a copy
for each. How time is taken: ``duel``. Rates are Kev's per second of processor time, so of one core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from bench.duel import Reading, Run, fight, parser_of, report, ring
from inference_svc.kernels.attention_calls import CAttention
from inference_svc.kernels.layout import CSegment, Precision
from inference_svc.kernels.library import Library, Pool

PILE_BYTES = 128 << 20
MOST_LAYERS = 18
DTYPES = {Precision.F32: torch.float32, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Questions of one length, the last ``num_rows`` rows of each asked for."""

    name: str
    num_questions: int
    num_rows: int
    context: int
    num_shared: int = 0
    """Positions of the context, its first, that all questions have in common."""
    num_heads: int = 4
    num_kv_heads: int = 1
    head_size: int = 256
    window: int = 0

    @property
    def flops(self) -> float:
        """Multiplications and additions of what is visible."""
        positions = range(self.context - self.num_rows, self.context)
        visible = sum(min(p + 1, self.window or p + 1) for p in positions)
        return 4.0 * self.num_questions * visible * self.num_heads * self.head_size

    def kv_bytes(self, precision: Precision) -> int:
        """Keys and values that are seen by any row; what is shared counts once."""
        seen = min(self.context, self.window + self.num_rows - 1) if self.window else self.context
        together = max(0, seen - (self.context - self.num_shared))
        places = together + self.num_questions * (seen - together)
        return 2 * places * self.num_kv_heads * self.head_size * DTYPES[precision].itemsize


WORKS = (
    Work(name="prefill", num_questions=2, num_rows=1500, context=1500),
    Work(name="prefill, window 512", num_questions=2, num_rows=1500, context=1500, window=512),
    Work(name="prefill, shared", num_questions=8, num_rows=22, context=1922, num_shared=1900),
    Work(name="prefill", num_questions=1, num_rows=1024, context=1024, num_heads=16, num_kv_heads=8, head_size=128),
    Work(name="prefill", num_questions=4, num_rows=512, context=512, num_heads=9, num_kv_heads=3, head_size=64),
    Work(name="decode", num_questions=8, num_rows=1, context=50),
    Work(name="decode", num_questions=8, num_rows=1, context=500),
    Work(name="decode", num_questions=8, num_rows=1, context=4000),
    Work(name="decode, shared", num_questions=8, num_rows=1, context=1922, num_shared=1900),
    Work(name="decode, shared, window 512", num_questions=8, num_rows=1, context=1922, num_shared=1900, window=512),
    Work(name="decode", num_questions=8, num_rows=1, context=1000, num_heads=16, num_kv_heads=8, head_size=128),
    Work(name="decode", num_questions=8, num_rows=1, context=1000, num_heads=12, num_kv_heads=12, head_size=64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Reading):
    """One work with keys and values of one precision; the bytes are theirs."""

    work: Work
    precision: str

    @property
    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        work = self.work
        size = f"{work.num_questions} x {work.context}"
        heads = f"{work.num_heads}/{work.num_kv_heads} x {work.head_size}"
        return work.name, size, heads, self.precision, *self.duel.columns


class Rivals:
    """One work: Kev's attention and torch's over the same numbers."""

    def __init__(self, library: Library, pool: Pool, work: Work, precision: Precision) -> None:
        self._library, self._pool, self._work, self._precision = library, pool, work, precision
        kv = (self._places(work.num_questions), work.num_kv_heads, work.head_size)
        count = max(1, min(MOST_LAYERS, PILE_BYTES // work.kv_bytes(precision)))
        self._layers = [tuple(torch.randn(kv).to(DTYPES[precision]) for _ in range(2)) for _ in range(count)]
        self._queries = torch.randn(work.num_questions * work.num_rows, work.num_heads, work.head_size)

    def kev(self) -> Iterator[Run]:
        """Calls of Kev's kernel, each on the next layer."""
        work, calls, out = self._work, self._library.calls, torch.empty_like(self._queries)
        threads = calls.kev_pool_threads(self._pool.address)
        num_bytes = calls.kev_attention_scratch_bytes(threads, work.context, work.head_size, work.num_heads)
        scratch = torch.empty(num_bytes, dtype=torch.uint8)
        segments = (CSegment * work.num_questions)(
            *(
                CSegment(
                    i * work.num_rows, work.num_rows, work.context - work.num_rows, 0, work.num_shared, self._places(i)
                )
                for i in range(work.num_questions)
            )
        )
        described = [self._described(keys, values, out) for keys, values in self._layers]

        def call(layer: CAttention) -> None:
            given = (ctypes.byref(layer), segments, len(segments), scratch.data_ptr())
            self._library.check(calls.kev_attention(self._pool.address, *given))

        for layer in cycle(described):
            yield partial(call, layer)

    def plain(self) -> Iterator[Run]:
        """The same with torch, one question after the other."""
        work = self._work
        positions = torch.arange(work.context)
        rows = positions[work.context - work.num_rows :, None]
        mask = (positions <= rows) & (positions > rows - (work.window or work.context))
        causal = work.num_rows == work.context and not work.window
        queries = self._queries.to(DTYPES[self._precision]).view(-1, work.num_rows, work.num_heads, work.head_size)

        def copied(arena: torch.Tensor) -> torch.Tensor:
            apart = arena[work.num_shared :].view(work.num_questions, -1, work.num_kv_heads, work.head_size)
            together = arena[: work.num_shared].expand(work.num_questions, -1, -1, -1)
            return torch.cat((together, apart), dim=1) if work.num_shared else apart

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            for q, k, v in zip(queries, keys, values, strict=True):
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=None if causal or work.num_rows == 1 else mask, is_causal=causal, enable_gqa=True
                )

        for keys, values in cycle([(copied(keys), copied(values)) for keys, values in self._layers]):
            yield partial(call, keys, values)

    def _places(self, count: int) -> int:
        """Of the arena, that the shared positions and so many questions take."""
        return self._work.num_shared + count * (self._work.context - self._work.num_shared)

    def _described(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> CAttention:
        work = self._work
        width = work.num_heads * work.head_size
        return CAttention(
            self._queries.data_ptr(),
            width,
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            width,
            work.num_heads,
            work.num_kv_heads,
            work.head_size,
            work.window,
            work.head_size**-0.5,
            0.0,
            int(self._precision),
        )


def measure(rivals: Rivals, work: Work, precision: Precision, seconds: float) -> Speed:
    """Alternate both for a while."""
    contestants = (rivals.kev(), rivals.plain())
    duel = fight(*contestants, seconds=seconds, num_bytes=work.kv_bytes(precision), ops=work.flops)
    return Speed(work=work, precision=precision.name.lower(), duel=duel)


def main() -> None:
    """Measure, show, save."""
    arguments = parser_of(__doc__, ("f32", "bf16"), seconds=2.0).parse_args()
    speeds = []
    with ring(arguments.threads, arguments.variant) as (library, pool):
        for precision in (Precision[name.upper()] for name in arguments.precisions):
            for work in WORKS:
                rivals = Rivals(library, pool, work, precision)
                speeds.append(measure(rivals, work, precision, arguments.seconds))
    heads = ("work", "questions x context", "heads", "type")
    report(f"attention, {arguments.threads} threads", heads, speeds, arguments.json)


if __name__ == "__main__":
    main()
