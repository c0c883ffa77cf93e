"""The step plan: what one forward will do, as a value.

Invariants and semantics: a plan has ``num_rows`` rows, of which the first ``num_used`` carry tokens; with fixed shapes
their number depends on the kind of the forward alone, with ragged ones there are as many as there is to do. Each
segment is one question's run of consecutive tokens and owns its rows alone. A question's segments are always cut at
the same places in its own positions, whatever its neighbours do, so the library kernels see the same shapes alone and
in company.

Not here: how a plan is made (``scheduler``) or run (``model_runner``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.errors import KevError
from common.types import SamplingParams
from inference_svc.sampled import SampledToken
from inference_svc.slots import Extent

ROW_BLOCK = 8
"""Measured: stock float32 kernels gave a row other bits in another place at 5 rows, never at multiples of 4."""


RAGGED_MULTIPLE = 4
"""Rows of ragged forwards cost only when there are tokens for them: they take this many times ``core.prefill_rows``.
Measured on two Zen 4 cores with 270 million parameters in int8: 1,970 prompt tokens/s at 128 rows, 2,450 at 512."""


class StepKind(StrEnum):
    """What the rows of a forward are."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Both; only where rows are ragged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShapes:
    """How many rows a forward has, and where prefill is cut.

    Stock float kernels give a row the same bits whatever the other rows hold, but only for one row count at a time;
    there the row count of a forward may not depend on what there is to do. Row-invariant kernels may run ragged.
    """

    decode_rows: int
    prefill_rows: int
    """Rows for prompts; ragged: at most."""
    segment_tokens: int
    """Most tokens of one segment; at most ``prefill_rows``."""
    ragged: bool = False
    """Prefill and decode share a forward, which has no rows but the used ones."""

    @classmethod
    def of(cls, max_slots: int, prefill_rows: int, segment_tokens: int, *, ragged: bool = False) -> ForwardShapes:
        """Shapes for an engine, rounded up to whole blocks of ``ROW_BLOCK`` rows."""
        rows = _whole_blocks(max(prefill_rows, segment_tokens)) * (RAGGED_MULTIPLE if ragged else 1)
        decode_rows = _whole_blocks(max_slots)
        return cls(decode_rows=decode_rows, prefill_rows=rows, segment_tokens=segment_tokens, ragged=ragged)

    def prompt_rows(self, num_prompts: int, num_decoding: int) -> int:
        """Most rows for prompts in the next forward.

        Where decoding questions share it, which get one token from it, rows follow the share of questions that wait
        for their prompts, down to half.
        """
        if not self.ragged or not num_decoding:
            return self.prefill_rows
        share = self.prefill_rows * num_prompts // (num_prompts + num_decoding)
        return max(self.segment_tokens, self.prefill_rows // 2, share)

    @property
    def max_rows(self) -> int:
        """Most rows of any forward."""
        return self.decode_rows + self.prefill_rows if self.ragged else max(self.decode_rows, self.prefill_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """Where one question's positions live: a prefix part that may be shared, then the private part."""

    private: Extent
    prefix: Extent | None = None
    num_prefix: int = 0
    """Positions ``[0, num_prefix)`` live in ``prefix``, the others in ``private``."""

    def arena_position(self, position: int) -> int:
        """Arena row of one of the question's positions."""
        if self.prefix is not None and position < self.num_prefix:
            return self.prefix.start + position
        return self.private.start + position - self.num_prefix

    def ranges(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Arena ranges ``[start, end)`` that hold positions ``[first, last)``, in order of position."""
        parts: list[tuple[int, int]] = []
        if self.prefix is not None and first < self.num_prefix:
            parts.append((self.prefix.start + first, self.prefix.start + min(last, self.num_prefix)))
        if last > self.num_prefix:
            offset = self.private.start - self.num_prefix
            parts.append((offset + max(first, self.num_prefix), offset + last))
        return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One question's rows in a forward."""

    sequence_id: int
    slot: int
    row: int
    """First row of the forward that belongs to it."""
    position: int
    """Position of its first token in the question."""
    token_ids: tuple[int, ...]
    kv: KVView
    owner: str
    """Owner of the private extent in the ledger."""
    writes_prefix: bool = False
    """Its tokens go into the prefix extent, which it alone may write now."""
    sampling: SamplingParams | None = None
    """Set when the last row's logits are wanted."""
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    num_truncated: int = 0
    """Tokens cut off its question before it came here; shown in the mask summary."""

    @property
    def num_rows(self) -> int:
        """Rows it takes."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.position + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward."""

    step_index: int
    kind: StepKind
    num_rows: int
    segments: tuple[Segment, ...]
    retired: tuple[int, ...] = ()
    """Sequences that ended since the last plan: the runner may forget them."""

    @property
    def num_used(self) -> int:
        """Rows that carry a token."""
        return sum(segment.num_rows for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a forward produced, by sequence id."""

    tokens: dict[int, SampledToken] = field(default_factory=dict)
    errors: dict[int, KevError] = field(default_factory=dict)
    """Questions that failed in this forward; their neighbours did not."""


def _whole_blocks(num_rows: int) -> int:
    return -(-num_rows // ROW_BLOCK) * ROW_BLOCK
