"""The text of one question as its readers have it, across attempts.

Invariants and semantics: readers hold exactly ``delivered``. A change is either DELTA (append its text) or
ATTEMPT_CHANGED (replace everything by its text), so a reader that does both in order always holds ``delivered``, and
after ``settle`` the final text. Within an attempt deltas count in the order of ``seq``, without gaps: one that comes
early is kept back, one that comes twice is dropped. A newer attempt starts the text again inside: its deltas stay
silent until they pass what was delivered (greedy and seeded attempts repeat themselves); where it writes something
else, one ATTEMPT_CHANGED carries the whole new text. Nothing is taken back silently.

Not here: numbering of events and outcomes (``collector``).
"""

from __future__ import annotations

from common.errors import InvariantError
from common.types import StreamEventType

Change = tuple[StreamEventType, str]
"""DELTA with text to append, or ATTEMPT_CHANGED with the text that replaces all of it."""

_MAX_EARLY_DELTAS = 1024


class Transcript:
    """What has been delivered of one question's text, and by which attempt.

    Attributes:
        attempt: the newest attempt heard of; 0 before the first sign of work.
        delivered: the text readers hold.
        num_tokens: tokens that the newest attempt has reported.
    """

    __slots__ = ("_early", "_next_seq", "_written", "attempt", "delivered", "num_tokens")

    def __init__(self) -> None:
        self.attempt = 0
        self.delivered = ""
        self.num_tokens = 0
        self._restart()

    def _restart(self) -> None:
        self._written = ""
        self._next_seq = 0
        self._early: dict[int, str] = {}

    def begin(self, attempt: int) -> bool:
        """Note a sign of work by this attempt. True: it is newer than what was known.

        Raises:
            InvariantError: attempts count from 1.
        """
        if attempt < 1:
            raise InvariantError(f"attempt {attempt} is not a number from 1 on")
        if attempt <= self.attempt:
            return False
        self.attempt = attempt
        self.num_tokens = 0
        self._restart()
        return True

    def add(self, seq: int, text: str, num_tokens: int) -> Change | None:
        """Take a delta of the newest attempt; returns what readers must be told, if anything."""
        if seq < self._next_seq or (seq > self._next_seq and len(self._early) >= _MAX_EARLY_DELTAS):
            return None
        self._early[seq] = text
        written = self._written
        while self._next_seq in self._early:
            written += self._early.pop(self._next_seq)
            self._next_seq += 1
        self._written = written
        self.num_tokens = max(self.num_tokens, num_tokens)
        if self.delivered.startswith(written):
            return None
        return self._deliver(written)

    def final_text(self, text: str, *, is_answer: bool) -> str:
        """The text that the outcome will carry.

        An answer's text stands as it is. An outcome that is no answer (timeout, error, cancellation) keeps what
        readers already have, unless its own text continues it.
        """
        return text if is_answer or text.startswith(self.delivered) else self.delivered

    def settle(self, text: str) -> Change | None:
        """Bring readers to the final text; returns what they must be told, if anything."""
        return None if text == self.delivered else self._deliver(text)

    def _deliver(self, text: str) -> Change:
        before, self.delivered = self.delivered, text
        if text.startswith(before):
            return StreamEventType.DELTA, text[len(before) :]
        return StreamEventType.ATTEMPT_CHANGED, text
