"""Mask summaries: what every forward's rows could see, as one line of JSON, and the digests behind the receipts.

Invariants and semantics: a segment's digest is taken over its own positions and the extents it reads, so it is equal
alone and in company; the summary of a forward also counts overlaps between questions, which must be 0.

Not here: building masks (``attention``).
"""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from common.errors import InvariantError
from inference_svc.plan import Segment, StepPlan
from inference_svc.slots import KVLedger

_LOG = logging.getLogger("kev.forward")


def segment_digest(segment: Segment) -> bytes:
    """SHA-256 over what the segment's rows can see: positions ``[0, end)`` of its own question, nothing else.

    Raises:
        InvariantError: the extents it reads do not hold exactly its own positions.
    """
    visible = sum(end - start for start, end in segment.kv.ranges(0, segment.end))
    if visible != segment.end:
        message = f"segment of sequence {segment.sequence_id} reads {visible} positions for {segment.end} of its own"
        raise InvariantError(message)
    return sha256(f"{segment.position}:{segment.num_rows}:{visible}".encode()).digest()


def check_segment(segment: Segment, ledger: KVLedger) -> None:
    """Confirm with the ledger that the question owns what the segment reads and writes.

    Raises:
        InvariantError: a stale, foreign or too small extent, or a write into a read-only prefix.
    """
    kv = segment.kv
    ledger.check(kv.private, segment.owner, 0, max(0, segment.end - kv.num_prefix))
    if kv.prefix is not None:
        ledger.check(kv.prefix, kv.prefix.owner, 0, min(segment.end, kv.num_prefix))
    inside = kv.prefix is not None and segment.end <= kv.num_prefix
    if segment.writes_prefix != inside or (not inside and segment.position < kv.num_prefix):
        raise InvariantError(f"sequence {segment.sequence_id} would write into the read-only prefix {kv.prefix}")


def overlapping(plan: StepPlan) -> dict[int, int]:
    """Sequences whose written positions or private extents touch another's: sequence id -> the other's id."""
    ranges: list[tuple[int, int, int]] = []
    for segment in plan.segments:
        private = segment.kv.private
        ranges.append((private.start, private.end, segment.sequence_id))
        if segment.writes_prefix and segment.kv.prefix is not None:
            ranges.append((segment.kv.prefix.start, segment.kv.prefix.end, segment.sequence_id))
    found: dict[int, int] = {}
    reach, holder = -1, -1
    for start, end, one in sorted(ranges):
        if start < reach and one != holder:
            found[one], found[holder] = holder, one
        if end > reach:
            reach, holder = end, one
    return found


def cross_visible_pairs(plan: StepPlan) -> int:
    """(row, position) pairs in which a question's row could see a position that another question writes now."""
    num_pairs = 0
    for one in plan.segments:
        for other in plan.segments:
            if one.sequence_id != other.sequence_id:
                written = other.kv.ranges(other.position, other.end)
                seen = one.kv.ranges(0, one.end)
                num_pairs += one.num_rows * sum(_shared(a, b) for a in seen for b in written)
    return num_pairs


def _shared(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


class ForwardLog:
    """Writes one summary line per forward to the ``kev.forward`` logger (debug) and, if asked, to a file."""

    def __init__(self, path: str = "") -> None:
        """Open the log.

        Args:
            path: file to append to; empty for none.
        """
        self._file: TextIO | None = Path(path).open("a", encoding="utf-8", buffering=1) if path else None

    def write(self, plan: StepPlan) -> None:
        """Log a forward."""
        if self._file is None and not _LOG.isEnabledFor(logging.DEBUG):
            return
        line = json.dumps(summary(plan), separators=(",", ":"))
        _LOG.debug("%s", line)
        if self._file is not None:
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def summary(plan: StepPlan) -> dict[str, object]:
    """One forward as JSON-able values."""
    channels = [
        {
            "sequence": segment.sequence_id,
            "slot": segment.slot,
            "rows": [segment.row, segment.row + segment.num_rows],
            "positions": [segment.position, segment.end],
            "kv": [list(piece) for piece in segment.kv.ranges(0, segment.end)],
            "prefix_tokens": segment.kv.num_prefix,
            "truncated_tokens": segment.num_truncated,
        }
        for segment in plan.segments
    ]
    digest = sha256(b"".join(segment_digest(segment) for segment in plan.segments)).hexdigest()
    return {
        "step": plan.step_index,
        "kind": plan.kind.value,
        "rows": plan.num_rows,
        "used_rows": plan.num_used,
        "cross_visible_pairs": cross_visible_pairs(plan),
        "overlaps": len(overlapping(plan)),
        "truncations": sum(1 for segment in plan.segments if segment.num_truncated),
        "channels": channels,
        "digest": digest,
    }
