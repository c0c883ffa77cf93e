"""How much one tenant may have in flight: questions and tokens.

Invariants and semantics: a question is in flight from the moment it is taken until it is given back, and it counts for
one tenant. What is taken is given back exactly once: giving back a second time, or what was never taken, does nothing.
A tenant's limits are those of the configuration times its weight; 0 is no limit. Nothing is kept of a tenant without
questions in flight. A limit is asked before anything of a request is taken; what must be taken again after a loss
(``take`` alone) may pass it.

Not here: the budget of one question or request (``tokens``), which errors callers get (``service``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from common.errors import InvariantError

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class InFlight:
    """What a tenant has in flight."""

    num_questions: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Why something more does not fit."""

    unit: Literal["questions", "tokens"]
    asked: int
    in_flight: int
    limit: int

    @property
    def is_final(self) -> bool:
        """Whether it would not fit even with nothing in flight."""
        return self.asked > self.limit

    @property
    def num_excess(self) -> int:
        """By how much it does not fit, at least 1."""
        return self.in_flight + self.asked - self.limit


class TenantBudgets(Generic[KeyT]):
    """Owned by one event loop."""

    def __init__(self, *, max_questions: int, max_tokens: int, weights: Mapping[str, float] | None = None) -> None:
        """Nothing is in flight.

        Args:
            max_questions: of a tenant of weight 1; 0 sets no limit.
            max_tokens: of a tenant of weight 1; 0 sets no limit.
            weights: of tenants, above 0; a tenant that is not named has weight 1.
        """
        self._max_questions = max_questions
        self._max_tokens = max_tokens
        self._weights = dict(weights or {})
        self._is_limited = bool(max_questions or max_tokens)
        self._taken: dict[KeyT, tuple[str, int]] = {}
        self._in_flight: dict[str, InFlight] = {}

    def in_flight(self, tenant: str) -> InFlight:
        """What a tenant has in flight; nothing is counted where there are no limits."""
        return self._in_flight.get(tenant, InFlight())

    def lack(self, tenant: str, num_questions: int, num_tokens: int) -> Lack | None:
        """What keeps a tenant from having so much more in flight; None: nothing does."""
        now, weight = self.in_flight(tenant), self._weights.get(tenant, 1.0)
        if self._max_questions:
            limit = max(1, math.floor(self._max_questions * weight))
            if now.num_questions + num_questions > limit:
                return Lack(unit="questions", asked=num_questions, in_flight=now.num_questions, limit=limit)
        if self._max_tokens:
            limit = max(1, math.floor(self._max_tokens * weight))
            if now.num_tokens + num_tokens > limit:
                return Lack(unit="tokens", asked=num_tokens, in_flight=now.num_tokens, limit=limit)
        return None

    def take(self, key: KeyT, tenant: str, num_tokens: int) -> None:
        """A question is in flight.

        Raises:
            InvariantError: it is already.
        """
        if not self._is_limited:
            return
        if key in self._taken:
            raise InvariantError(f"the budget of question {key} is taken already")
        self._taken[key] = tenant, num_tokens
        now = self.in_flight(tenant)
        self._in_flight[tenant] = InFlight(now.num_questions + 1, now.num_tokens + num_tokens)

    def give_back(self, key: KeyT) -> None:
        """A question is in flight no more; it may never have been."""
        taken = self._taken.pop(key, None)
        if taken is None:
            return
        tenant, num_tokens = taken
        now = self._in_flight[tenant]
        if now.num_questions == 1:
            del self._in_flight[tenant]
        else:
            self._in_flight[tenant] = InFlight(now.num_questions - 1, now.num_tokens - num_tokens)

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            InvariantError: the sums are not those of the questions in flight.
        """
        counted: dict[str, InFlight] = {}
        for tenant, num_tokens in self._taken.values():
            before = counted.get(tenant, InFlight())
            counted[tenant] = InFlight(before.num_questions + 1, before.num_tokens + num_tokens)
        if counted != self._in_flight:
            raise InvariantError(f"in flight are {self._in_flight}, counted {counted}")
