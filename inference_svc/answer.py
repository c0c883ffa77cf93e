"""The text of one answer while it grows: detokenization, then stop strings.

Invariants and semantics: joined deltas equal the final text; the text ends right before the earliest stop string, and
stops are looked for only from ``min_tokens`` on.

Not here: token-level ends such as end-of-sequence ids (``sequence``).
"""

from __future__ import annotations

from typing import Protocol

from common.types import SamplingParams
from inference_svc.stopping import StopMatcher


class IncrementalDetokenizer(Protocol):
    """Turns token ids into text piece by piece (``common.tokenization.Detokenizer``)."""

    def push(self, token_id: int) -> str:
        """New text that cannot change any more."""
        ...

    def flush(self) -> str:
        """Text held back so far."""
        ...


class NoText:
    """A detokenizer for runs whose text nobody reads."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class AnswerText:
    """Text of one answer."""

    def __init__(self, detokenizer: IncrementalDetokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """A stop string was met; nothing more is added."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Add a generated token; returns the new text."""
        self._num_tokens += 1
        return self._add(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """End the answer; returns text that was held back."""
        if self._stopped:
            return ""
        tail = self._add(self._detokenizer.flush())
        if not self._stopped:
            held = self._matcher.flush()
            self._pieces.append(held)
            tail += held
        return tail

    def _add(self, text: str) -> str:
        if self._num_tokens >= self._min_tokens:
            text, self._stopped = self._matcher.push(text)
        self._pieces.append(text)
        return text
