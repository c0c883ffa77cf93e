"""How a question ended, in so few words that they lie beside its outcome: all that a router learns of answers.

Invariants and semantics: ``Ending.read(Ending.of(result).mark)`` is ``Ending.of(result)``. What an older version did
not write, or a newer one wrote with words that are not known here, is an ending without a finish reason.

Not here: the outcome itself (``common.types.ChannelResult``), what an ending says of a channel
(``router_svc.question_pool``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from common.types import ChannelResult, FinishReason

_MARK = re.compile(r"([a-z_]+)(?: ([A-Z_]{1,64}))?", re.ASCII)
_REASONS = {reason.value: reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class Ending:
    """Of one question."""

    finish_reason: FinishReason | None = None
    """None: not known."""
    error_reason: str = ""
    """Of an error, from ``common.errors``."""

    @classmethod
    def of(cls, result: ChannelResult) -> Self:
        """How a question with this outcome ended."""
        return cls(result.finish_reason, "" if result.error is None else result.error.reason)

    @property
    def mark(self) -> str:
        """As it is written down; empty when nothing is known."""
        return f"{self.finish_reason or ''} {self.error_reason}".strip()

    @classmethod
    def read(cls, mark: str) -> Self:
        """What was written down."""
        found = _MARK.fullmatch(mark)
        reason = None if found is None else _REASONS.get(found[1])
        return cls() if found is None or reason is None else cls(reason, found[2] or "")
