"""The contracts between rooms: what a transport, a registry and a clock must do.

Invariants and semantics: delivery is at least once, effect is exactly once. A published item is leased by one
consumer at a time; at most one item of a channel is leased at any moment through one consumer, so a hot channel
holds up only itself. The first terminal outcome of a question wins, whoever commits it.

Not here: implementations (``common.memory``; Redis streams in the distributed form).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from common.ending import Ending
from common.errors import InvariantError, KevError, QueueFullError
from common.types import ChannelEvent, ChannelResult, RequestRecord, WorkItem


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is reported of one leased question in one call: progress, the outcome, or both."""

    lease: Lease
    events: tuple[ChannelEvent, ...]
    """In the order in which they happened; the outcome, if it is there, comes last."""

    def __post_init__(self) -> None:
        """Look whether lease and events belong together.

        Raises:
            InvariantError: no events, events after the outcome, or about another question or attempt than the lease's.
        """
        subject = (*self.lease.item.key, self.lease.attempt)
        for event in self.events:
            reported = (event.request_id, event.question_index, event.attempt)
            if reported != subject:
                raise InvariantError(f"an event about {reported} was to be reported under the lease of {subject}")
        if not self.events or any(isinstance(event, ChannelResult) for event in self.events[:-1]):
            raise InvariantError(f"a report about {subject} needs events, the outcome last")

    @property
    def outcome(self) -> ChannelResult | None:
        """The outcome, if it is reported."""
        last = self.events[-1]
        return last if isinstance(last, ChannelResult) else None


class ReportState(StrEnum):
    """What became of a report."""

    HELD = "held"
    """Progress was reported; the lease holds."""
    FULL = "full"
    """There is no room for progress now and nothing was reported; report it again later. Outcomes always have room."""
    COMMITTED = "committed"
    """Outcome and progress were reported, the item is gone."""
    ALREADY_COMMITTED = "already_committed"
    """This attempt (after a lost reply) or an earlier outcome is already there; the entry is gone."""
    STALE = "stale"
    """The lease is lost; nothing was reported. Stop working on the question."""


class WorkStreams(Protocol):
    """Router to nodes: one stream of work items per channel, leased, renewed and reported on.

    Order: first in, first out per channel, redelivered items first. Nothing is ordered across channels. Whoever has
    several items or leases at hand passes them in one call: its answers are in their order, and each stands for
    itself, as if it had been the only one.
    """

    async def publish(self, items: Sequence[WorkItem]) -> list[QueueFullError | None]:
        """Append items to their channels' streams; for each ``None``, or why it was not appended.

        Publishing a question that is already there does nothing. A transport that keeps outcomes reports the outcome
        again instead of running the same question twice. A channel is full at its limit of entries or of bytes.

        Raises:
            InvalidRequestError: a channel does not exist; nothing was appended.
        """
        ...

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        """Take up to ``max_items`` items, at most one per channel: the channel whose first item came first, and so on.

        Each step of an item's priority counts as if it had come ``priority_step_ms`` earlier; within a channel items
        keep their order. So the first item of a channel waits for none that came later than itself by more than the
        difference of their priorities is worth, whatever comes.

        Waits up to ``wait_s`` seconds for the first item; returns an empty list when none came. Items of cancelled
        questions are never returned. Expired leases of other consumers come first, with a higher attempt.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Extend leases. False: another consumer owns the item or it is gone; stop working on it."""
        ...

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        """Tell the aggregator what happened, question by question in the order given.

        An outcome is reported and its item removed in one atomic act, if the lease is still held. Never waits for the
        reader.
        """
        ...

    async def hand_back(self, leases: Sequence[Lease]) -> list[bool]:
        """Return unstarted items at once to the heads of their channels; that does not count as an attempt.

        False: the lease was lost before.
        """
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
        """Which of these published (request_id, question_index) have neither an item nor an outcome any more.

        Their publisher publishes them again. Always empty in a transport that loses nothing.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """A request was withdrawn and is unknown from here on; later events under its id belong to another request."""

    request_id: str


class ResultStream(Protocol):
    """Nodes to aggregators: events of all questions, in the order in which each node reported them.

    Every reader is given every event. One that was away for too long may have missed some, which is counted; what it
    missed is in ``RequestSource``. An event may come twice, so a reader takes one that it knows already for the same.
    """

    @property
    def num_gaps(self) -> int:
        """How often ``read`` may have missed events so far; always 0 in a stream that loses nothing."""
        ...

    async def read(self, max_events: int, wait_s: float) -> Sequence[ChannelEvent | Withdrawn]:
        """Take up to ``max_events`` events; waits up to ``wait_s`` seconds for the first one.

        A read acknowledges what the previous one returned.
        """
        ...

    async def settle(self, outcomes: Sequence[ChannelResult]) -> list[int]:
        """Give questions of one request these outcomes, unless they have one, and withdraw their work; in one act.

        What a node commits and what is settled here compete for the same place: the first one stands. The event of an
        outcome that stands comes by ``read``, to every reader. Whoever has read a question's outcome does not ask.

        Returns:
            Indexes of the questions for which these outcomes stand; the others had one before.
        """
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

    async def unregistered(self, request_ids: Sequence[str]) -> list[str]:
        """Which of these registered requests are not known any more. Always empty where nothing is lost."""
        ...

    async def restore(self, record: RequestRecord, age_ms: int) -> None:
        """Register a request that was lost again, as of ``age_ms`` ago; what is known of its questions stays.

        Raises:
            RequestConflictError: the id was taken meanwhile by a request with other content.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEvent:
    """An event of a request and when it happened."""

    event: ChannelEvent
    at_ms: int
    """Since the registration of the request, by the registry's clock."""


class Intake(Protocol):
    """The router's first step with a request: it is registered, and what has a channel is published."""

    async def accept(self, record: RequestRecord, items: Sequence[WorkItem]) -> list[KevError | None] | None:
        """Register a request and then publish items of it, in one atomic act where the store can.

        Returns:
            For each item ``None``, or why it was not published; it may be published later. ``None`` for all: the same
            request is there, and nothing was published.

        Raises:
            RequestConflictError: the id is taken by a request with other content.
            QueueFullError: the registry is full of unfinished requests.
            DrainingError: the aggregator accepts nothing new.
            StoreUnavailableError: whether the request is registered is not known.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRequest:
    """A request as a registry knows it."""

    record: RequestRecord
    age_ms: int
    """Since its registration, by the registry's clock."""
    events: tuple[PastEvent, ...] = ()
    """All its events so far, in the order in which every reader is given them."""


class RequestSource(Protocol):
    """Registry to aggregator: what an aggregator needs to answer for requests that it did not see arrive."""

    async def find(self, request_id: str) -> RegisteredRequest | None:
        """The request with all that has happened to it; None: never registered, withdrawn or expired.

        Raises:
            StoreUnavailableError: unknown, but what is known was lost a moment ago, and the request's router may be
                about to register it again.
        """
        ...

    async def overdue(self) -> list[str]:
        """Ids of the requests of which a question has run out of time without an outcome."""
        ...

    async def complete(self, request_id: str) -> None:
        """Nobody needs to look after the request any more; it is forgotten after its retention. May be repeated."""
        ...


class OutcomeBoard(Protocol):
    """What a router asks about the questions it has published, where outcomes do not come to it by themselves."""

    async def settled(self, questions: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Ending]:
        """Which of these (request_id, question_index) have their outcome, and how they ended."""
        ...

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Which of these have neither an outcome nor an item any more; their publisher publishes them again."""
        ...
