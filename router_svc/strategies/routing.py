"""What every strategy is, what it may know of a question, and what it decides.

Invariants and semantics: ``key`` looks at the question alone and is asked once per question; ``pick`` turns a key into
a channel for the loads of the moment and may be asked again while the question waits; ``explain`` says in words what
``pick`` would do and changes nothing. None of them keeps anything of a question. All digests are keyed and stable: the
same configuration routes the same question to the same bucket in every process and after a restart.

Not here: room on a channel, the breaker and the overflow queue (``channels``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router_svc.embedding import Projection
from router_svc.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingView:
    """What a strategy may know of a question."""

    text: str
    """Normalized."""
    num_tokens: int
    """Prompt tokens after the last common prefix."""
    category: str = ""
    """As the caller gave it; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A strategy's decision."""

    channel_id: int
    hash_bucket: int
    """Bucket of the strategy's hash; for strategies without one, the channel id."""
    may_divert: bool = True
    """Whether the breaker may send the question elsewhere."""
    lane: range | None = None
    """Channels among which the breaker may choose; None: all of them."""


class RoutingStrategy(Protocol):
    """Picks channels. ``key`` may run on any thread; ``pick`` takes microseconds."""

    def key(self, view: RoutingView) -> int:
        """What of the question decides: a bucket, a turn, a tier."""
        ...

    def pick(self, key: int, loads: Sequence[int]) -> Pick:
        """The channel for a key.

        Args:
            key: from ``key``.
            loads: outstanding questions per channel, index = channel id.
        """
        ...

    def explain(self, view: RoutingView, key: int, loads: Sequence[int]) -> str:
        """Why ``pick(key, loads)`` is as it is, in one sentence without a full stop.

        Args:
            view: the question that ``key`` was asked for.
            key: what it answered.
            loads: as for ``pick``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy bound to a question's key. Equal choices pick the same channel for the same loads."""

    strategy: RoutingStrategy
    key: int

    def __call__(self, loads: Sequence[int]) -> Pick:
        """The channel for the loads of the moment."""
        return self.strategy.pick(self.key, loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a strategy may be built from."""

    settings: RouterSettings
    encode: Callable[[str], Sequence[int]]
    """Token ids of a text without template and prefix."""
    projection: Projection
    """Turns token ids into a semantic bucket."""
