"""The contracts between rooms: what a transport, a registry and a clock must do.

Invariants and semantics: delivery is at least once, effect is exactly once. A published item is leased by one
consumer at a time; at most one item of a channel is leased at any moment through one consumer, so a hot channel
holds up only itself. The first terminal outcome of a question wins, whoever commits it.

Not here: implementations (``common.memory``; Redis streams in the distributed form).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from common.errors import KevError
from common.types import ChannelDelta, ChannelEvent, ChannelResult, ChannelStarted, RequestRecord, WorkItem


class Clock(Protocol):
    """The only source of time for code that decides."""

    def monotonic(self) -> float:
        """Seconds that never run backwards; for durations and deadlines inside one process."""
        ...

    def time(self) -> float:
        """Unix seconds, UTC; for audit stamps only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to work on one item until it expires."""

    lease_id: str
    """Identifies the entry inside the transport."""
    item: WorkItem
    attempt: int
    """1 for the first delivery; fences commits."""
    age_ms: float
    """Time since the item was published, by the transport's clock, at the moment of the lease."""
    trace: str = ""
    """W3C traceparent under which the item was published; empty without one."""


class CommitState(StrEnum):
    """What became of a commit."""

    COMMITTED = "committed"
    ALREADY_COMMITTED = "already_committed"
    """This attempt (after a lost reply) or an earlier outcome is already there; the entry is gone."""
    STALE = "stale"
    """The lease belongs to somebody else now; the outcome was dropped."""


class WorkStreams(Protocol):
    """Router to nodes: one stream of work items per channel, leased, renewed and committed.

    Order: first in, first out per channel, redelivered items first. Nothing is ordered across channels.
    """

    async def publish(self, item: WorkItem) -> None:
        """Append the item to its channel's stream. Publishing a question that is already there does nothing.

        A transport that keeps outcomes reports the outcome again instead of running the same question twice.

        Raises:
            QueueFullError: the channel's stream is at its limit of entries.
            InvalidRequestError: the channel does not exist.
        """
        ...

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        """Take up to ``max_items`` items, at most one per channel, oldest channel head first.

        Waits up to ``wait_s`` seconds for the first item; returns an empty list when none came. Items of cancelled
        questions are never returned. Expired leases of other consumers come first, with a higher attempt.
        """
        ...

    async def renew(self, lease: Lease) -> bool:
        """Extend the lease. False: another consumer owns the item or it is gone; stop working on it."""
        ...

    async def emit(self, lease: Lease, event: ChannelStarted | ChannelDelta) -> bool:
        """Report progress to the aggregator. False: the lease is lost; stop working on it."""
        ...

    async def commit(self, lease: Lease, result: ChannelResult) -> CommitState:
        """Report the outcome and remove the item, in one atomic act, if the lease is still held."""
        ...

    async def hand_back(self, lease: Lease) -> bool:
        """Return an unstarted item at once to the head of its channel; it does not count as an attempt."""
        ...

    async def dead_letter(self, lease: Lease, error: KevError) -> bool:
        """Set the item aside for an operator and report an error outcome for its question."""
        ...

    async def cancel(self, request_id: str, question_indexes: Sequence[int] | None = None) -> None:
        """Withdraw questions of a request (None: all): unleased items vanish, holders of leases are told."""
        ...

    async def cancellations(self, wait_s: float) -> list[tuple[str, int]]:
        """(request_id, question_index) of leased questions withdrawn since the last call, waiting up to ``wait_s``."""
        ...

    async def depths(self) -> list[int]:
        """Items per channel that are waiting or leased, index = channel id."""
        ...

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Which of these published (request_id, question_index) without an outcome the transport has lost.

        Their publisher publishes them again. Always empty in a transport that loses nothing.
        """
        ...


class ResultStream(Protocol):
    """Nodes to aggregator: events of all questions, in the order in which each node reported them.

    One reader. A read acknowledges what the previous one returned; what was returned and not acknowledged comes again
    after a crash, so the reader takes an event that it knows already for the same one.
    """

    async def read(self, max_events: int, wait_s: float) -> list[ChannelEvent]:
        """Take up to ``max_events`` events; waits up to ``wait_s`` seconds for the first one."""
        ...


class RequestRegistry(Protocol):
    """Router to aggregator: a request is registered before any of its questions is published."""

    async def register(self, record: RequestRecord) -> bool:
        """True: newly registered. False: the same request (same digest) is already there; publish nothing.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
            QueueFullError: the registry is full of unfinished requests.
            DrainingError: the aggregator accepts nothing new.
        """
        ...

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        """True: exactly this request is registered. False: the id is free.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
        """
        ...

    async def withdraw(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRequest:
    """A request as a registry knows it."""

    record: RequestRecord
    age_ms: int
    """Since its registration, by the registry's clock."""


class RequestSource(Protocol):
    """Registry to aggregator: what an aggregator needs to take over requests that it did not see arrive."""

    async def find(self, request_id: str) -> RegisteredRequest | None:
        """The request; None: never registered, withdrawn or expired."""
        ...

    async def history(self, request_id: str) -> list[ChannelEvent]:
        """All events of the request so far, in order."""
        ...

    async def overdue(self) -> list[str]:
        """Ids of the requests of which a question has run out of time without an outcome."""
        ...

    async def complete(self, request_id: str) -> None:
        """Every question has its outcome: the request may be forgotten after its retention. May be repeated."""
        ...


class OutcomeBoard(Protocol):
    """What a router asks about the questions it has published, where outcomes do not come to it by themselves."""

    async def settled(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Which of these (request_id, question_index) have their outcome."""
        ...

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Which of these have neither an outcome nor an item any more; their publisher publishes them again."""
        ...
