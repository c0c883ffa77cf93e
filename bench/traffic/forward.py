"""How long answers take when questions share a forward: a fluid picture of the engine's steps.

Invariants and semantics: a slot's question first has its prompt computed, then its answer, a token per step. While only
answers are computed each of them gets a token every ``step_s``, however many they are. While prompts are computed too,
both take turns as in ``inference_svc.scheduler``: ``prefill_rows`` prompt tokens, shared evenly by those who wait for
theirs, then one answer token for everybody else; so a long prompt slows its neighbours while it lasts. Between two
changes all rates are constant, and the time of the next change is exact. Without prompts it is a plain server per slot.

Not here: who gets a slot (``node``), time (it is passed in).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import InvariantError

_DONE_TOKENS = 1e-6
"""Less than this is left of a question only by rounding."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What tokens cost.

    Defaults from bench/RESULTS.md, demo model in int8 on 2 cores: 1,900 prompt tokens/s, 14.4 ms a step of 8 rows.
    """

    prefill_s: float = 1 / 1_900
    """A prompt token, whoever shares the forward."""
    step_s: float = 0.0144
    """An answer token of every running question."""
    prefill_rows: int = 128
    """Prompt tokens between two steps."""


@dataclass(slots=True, eq=False)
class _Row:
    prompt_left: float
    answer_left: float


class SharedForward(Generic[KeyT]):
    """The questions that are in slots."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._rows: dict[KeyT, _Row] = {}
        self._now_s = 0.0
        self.done_tokens = 0.0
        """Prompt and answer tokens computed so far."""
        self.slot_s = 0.0
        """Slot-seconds taken so far."""
        self.busy_s = 0.0
        """Seconds in which anything was computed."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: KeyT, prompt_tokens: float, answer_tokens: float, now_s: float) -> None:
        """Begin a question.

        Args:
            key: not running.
            prompt_tokens: to be computed before the answer; no work at all where prompts cost nothing.
            answer_tokens: infinite for a question that never ends.
            now_s: not before the last call's.

        Raises:
            InvariantError: it runs already.
        """
        self._move_to(now_s)
        if key in self._rows:
            raise InvariantError(f"{key} runs already")
        self._rows[key] = _Row(prompt_tokens if self._speed.prefill_s else 0.0, answer_tokens)

    def remove(self, key: KeyT, now_s: float) -> None:
        """Stop a question."""
        self._move_to(now_s)
        del self._rows[key]

    def take_ended(self, now_s: float) -> list[KeyT]:
        """Questions whose last token has been computed, in the order in which they began."""
        self._move_to(now_s)
        ended = [key for key, row in self._rows.items() if not row.answer_left]
        for key in ended:
            del self._rows[key]
        return ended

    def next_change_s(self) -> float:
        """When a prompt or an answer will be complete if nobody comes or goes; infinite if none ever will."""
        prompt_rate, answer_rate = self._rates()
        waits_s = [
            row.prompt_left / prompt_rate if row.prompt_left else row.answer_left / answer_rate
            for row in self._rows.values()
            if row.answer_left
        ]
        return self._now_s + min(waits_s, default=math.inf)

    def _rates(self) -> tuple[float, float]:
        """Tokens per second of each question whose prompt, and of each whose answer is being computed."""
        speed = self._speed
        num_prompts = sum(row.prompt_left > 0 for row in self._rows.values())
        if not num_prompts:
            return 0.0, 1 / speed.step_s
        turn_s = speed.prefill_rows * speed.prefill_s
        if num_prompts < len(self._rows):
            turn_s += speed.step_s
        return speed.prefill_rows / turn_s / num_prompts, 1 / turn_s

    def _move_to(self, now_s: float) -> None:
        """Let time pass, from change to change."""
        if now_s < self._now_s:
            raise InvariantError(f"the forward is at {self._now_s} s and cannot go back to {now_s} s")
        while self._now_s < now_s:
            until_s = min(now_s, self.next_change_s())
            self._pass(until_s - self._now_s)
            self._now_s = until_s

    def _pass(self, seconds: float) -> None:
        prompt_rate, answer_rate = self._rates()
        self.slot_s += seconds * len(self._rows)
        self.busy_s += seconds * bool(self._rows)
        for row in self._rows.values():
            if row.prompt_left:
                row.prompt_left, done = _less(row.prompt_left, seconds * prompt_rate)
            else:
                row.answer_left, done = _less(row.answer_left, seconds * answer_rate)
            self.done_tokens += done


def _less(left: float, done: float) -> tuple[float, float]:
    """What is left, and what was done; a remainder that only rounding leaves is done."""
    rest = left - done
    return (0.0, left) if rest <= _DONE_TOKENS else (rest, done)
