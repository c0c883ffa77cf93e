"""Stop strings of one question, found across token borders.

Invariants and semantics: the earliest match is the one that is complete first; of several complete at the same
character it is the longest. So the answer does not depend on how the text was split into tokens, and generation ends
with the token that completes a match. Text that may still become a match is held back. Only the answer is searched.

Not here: end tokens and min_tokens (the sequence decides), empty stop strings (``common.request`` refuses them).
"""

from __future__ import annotations


class StopMatcher:
    """Cuts a stream of text exactly before the earliest stop string.

    Source: one automaton per stop string (Knuth, Morris & Pratt 1977, sec. 2), so the cost per character is constant.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple((stop, _failure_table(stop)) for stop in stops)
        self._matched_lengths = [0] * len(stops)
        """Per stop: longest beginning of it that ends the text so far."""
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns what may be shown now and whether a stop string was found.

        After a match nothing more is shown, whatever is pushed.
        """
        if self._done:
            return "", True
        if not self._stops:
            return text, False
        seen = self._held + text
        for position in range(len(self._held), len(seen)):
            num_cut = self._advance(seen[position])
            if num_cut:
                self._done, self._held = True, ""
                return seen[: position + 1 - num_cut], True
        num_shown = len(seen) - max(self._matched_lengths)
        self._held = seen[num_shown:]
        return seen[:num_shown], False

    def flush(self) -> str:
        """End of the answer: the text that was held back and did not become a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; returns the length of the longest stop string that it completes, or 0."""
        num_cut = 0
        for i, (stop, failures) in enumerate(self._stops):
            length = self._matched_lengths[i]
            while length and stop[length] != character:
                length = failures[length]
            if stop[length] == character:
                length += 1
            self._matched_lengths[i] = length
            if length == len(stop):
                num_cut = max(num_cut, length)
        return num_cut


def _failure_table(stop: str) -> list[int]:
    """Entry n: length of the longest proper beginning of ``stop[:n]`` that also ends it."""
    table = [0] * len(stop)
    length = 0
    for n in range(1, len(stop)):
        table[n] = length
        while length and stop[n] != stop[length]:
            length = table[length]
        if stop[n] == stop[length]:
            length += 1
    return table
