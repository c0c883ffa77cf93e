"""What the leader of a spread model tells the other processes, as bytes: numbers only.

Invariants and semantics: a message is a header of kind and length, then signed 64-bit little-endian integers. Plans
carry what a forward needs and nothing of a question but its token ids. A message that is cut short or makes no sense
raises ``InvariantError``: both ends are of one build.

Not here: who sends and who obeys (``tensor_parallel``, ``tensor_parallel_follower``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

from common.errors import InvariantError
from inference_svc.plan import ForwardShapes, KVView, Segment, StepKind, StepPlan
from inference_svc.slots import Extent

_HEADER = struct.Struct("<II")
_KINDS = (StepKind.PREFILL, StepKind.DECODE)
_NO_PREFIX = -1


class _Code(IntEnum):
    OPEN = 1
    RUN = 2
    ROWS = 3


@dataclass(frozen=True, slots=True)
class Open:
    """Lay out an arena and a forward over it."""

    forward_id: int
    num_positions: int
    shapes: ForwardShapes


@dataclass(frozen=True, slots=True)
class Fill:
    """Set a range of the arena."""

    start: int
    end: int
    poisoned: bool
    """To NaN, which shows who reads it; else to zero."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run one forward."""

    forward_id: int
    fills: tuple[Fill, ...]
    """Before it, in order."""
    plan: StepPlan
    wanted: tuple[int, ...]
    """Indexes of the segments whose logits are wanted, in order."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Take part in reading rows of the embedding."""

    first: int
    last: int


Message = Open | Run | Rows


def encode(message: Message) -> bytes:
    """A message with its header."""
    match message:
        case Open(forward_id, num_positions, shapes):
            code = _Code.OPEN
            numbers = [forward_id, num_positions, shapes.decode_rows, shapes.prefill_rows, shapes.segment_tokens]
        case Run():
            code, numbers = _Code.RUN, _run_numbers(message)
        case Rows(first, last):
            code, numbers = _Code.ROWS, [first, last]
    return _HEADER.pack(code, len(numbers)) + struct.pack(f"<{len(numbers)}q", *numbers)


def read(stream: BinaryIO) -> Message | None:
    """The next message; None at the end of the stream.

    Raises:
        InvariantError: the stream ends inside a message, or makes no sense.
    """
    header = stream.read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise InvariantError("a message to a part of the model was cut short")
    code, count = _HEADER.unpack(header)
    body = stream.read(8 * count)
    if len(body) < 8 * count:
        raise InvariantError("a message to a part of the model was cut short")
    numbers = _Numbers(struct.unpack(f"<{count}q", body))
    match code:
        case _Code.OPEN:
            forward_id, num_positions, decode_rows, prefill_rows, segment_tokens = numbers.take(5)
            shapes = ForwardShapes(decode_rows=decode_rows, prefill_rows=prefill_rows, segment_tokens=segment_tokens)
            return Open(forward_id, num_positions, shapes)
        case _Code.RUN:
            return _run_of(numbers)
        case _Code.ROWS:
            return Rows(*numbers.take(2))
    raise InvariantError(f"a message to a part of the model has the unknown kind {code}")


class _Numbers:
    """Numbers that are taken one after the other."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        taken = tuple(self._values[self._next : self._next + count])
        if len(taken) < count:
            raise InvariantError("a message to a part of the model has too few numbers")
        self._next += count
        return taken

    def one(self) -> int:
        return self.take(1)[0]

    def listed(self) -> tuple[int, ...]:
        """As many as the next number says."""
        return self.take(self.one())


def _listed(values: Iterable[int]) -> list[int]:
    held = list(values)
    return [len(held), *held]


def _run_numbers(run: Run) -> list[int]:
    plan = run.plan
    numbers = [run.forward_id, _KINDS.index(plan.kind), plan.step_index, plan.num_rows, len(plan.segments)]
    numbers += _listed(number for fill in run.fills for number in (fill.start, fill.end, fill.poisoned))
    numbers += _listed(run.wanted)
    for segment in plan.segments:
        kv = segment.kv
        prefix = (_NO_PREFIX, 0) if kv.prefix is None else (kv.prefix.start, kv.prefix.length)
        numbers += [segment.row, segment.position, kv.private.start, kv.private.length, *prefix, kv.num_prefix]
        numbers += _listed(segment.token_ids)
    return numbers


def _run_of(numbers: _Numbers) -> Run:
    forward_id, kind, step_index, num_rows, num_segments = numbers.take(5)
    places = numbers.listed()
    filled = zip(places[::3], places[1::3], places[2::3], strict=True)
    fills = tuple(Fill(start, end, poisoned=bool(poisoned)) for start, end, poisoned in filled)
    wanted = numbers.listed()
    segments = tuple(_segment_of(index, numbers) for index in range(num_segments))
    plan = StepPlan(step_index=step_index, kind=_KINDS[kind], num_rows=num_rows, segments=segments)
    return Run(forward_id, fills, plan, wanted)


def _segment_of(index: int, numbers: _Numbers) -> Segment:
    row, position, start, length, prefix_start, prefix_length, num_prefix = numbers.take(7)
    prefix = None if prefix_start == _NO_PREFIX else Extent(prefix_start, prefix_length, 0, "")
    return Segment(
        sequence_id=index,
        slot=index,
        row=row,
        position=position,
        token_ids=numbers.listed(),
        kv=KVView(private=Extent(start, length, 0, ""), prefix=prefix, num_prefix=num_prefix),
        owner="",
    )
