"""What happened in a run, as its clients and observers saw it: an append-only list of small records.

Invariants and semantics: a record is added when something was seen and never changed. A call has a record before
(INVOKE) and one after: OK, it took effect; FAIL, it certainly did not; INFO, nobody knows. Records of one client or
reader are in the order in which that one saw them; nothing is said about the order between two.

Not here: what is right or wrong (``checker``), who does the calls (``workload``).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from common.types import FinishReason, StreamEventType

NONCE = re.compile(r"<[0-9a-f]{10}>")
"""What a nonce looks like; stands in no other text of a run."""


def make_nonce(numbers: random.Random) -> str:
    """A text that comes back in the answer to its own question, and nowhere else."""
    return f"<{numbers.getrandbits(40):010x}>"


class Phase(StrEnum):
    """Where a call stands."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    """It certainly had no effect."""
    INFO = "info"
    """Whether it had an effect is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submission. The same id may be submitted again, with the same nonces."""

    client: str
    phase: Phase
    request_id: str
    nonces: tuple[str, ...] = ()
    """One per question; in INVOKE."""
    reason: str = ""
    """Of the error; in FAIL and INFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A cancellation of a whole request."""

    client: str
    phase: Phase
    request_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A reader asks for a request; a stream reader that lost its stream opens again where it stood."""

    reader: str
    request_id: str
    from_event_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A reader got a stream event."""

    reader: str
    request_id: str
    event_index: int
    kind: StreamEventType
    question_index: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reader got the terminal outcome of a question."""

    reader: str
    request_id: str
    question_index: int
    finish_reason: FinishReason
    attempt: int = 1
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A reader's call ended: OK with everything, FAIL or INFO with an error."""

    reader: str
    phase: Phase
    request_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """An attempt of a question began, by the store's own record."""

    request_id: str
    question_index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A node's outcome was accepted, by the store's own record. Placeholders are nobody's commit."""

    request_id: str
    question_index: int
    attempt: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A fault was put in; ``num_fired`` says how often it has really happened."""

    fault: str
    num_fired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The run took away whatever kept this request, and nobody waited for it: it may fail, loudly."""

    request_id: str


Record = Submitted | Cancelled | Opened | Seen | Outcome | Closed | Granted | Committed | Broken | Forgotten


class History(Sequence[Record]):
    """The records of one run, in the order in which they were added."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._records = list(records)

    def add(self, record: Record) -> None:
        """Append; nothing is ever taken back."""
        self._records.append(record)

    def request_ids(self) -> set[str]:
        """Requests that were submitted, whatever came of it."""
        return {record.request_id for record in self._records if isinstance(record, Submitted)}

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def write(self, path: Path) -> None:
        """One JSON object per record, for reading after a failure."""
        with path.open("w", encoding="utf-8") as file:
            for record in self._records:
                file.write(json.dumps({"record": type(record).__name__} | asdict(record), ensure_ascii=False) + "\n")
