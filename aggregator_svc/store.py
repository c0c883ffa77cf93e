"""Keeps the requests of one aggregator in memory: the running ones, and the finished ones for a while.

Invariants and semantics: at most ``max_requests`` requests. A running request is never dropped; a finished one is kept
for ``result_ttl_s`` after its last outcome, less when room is needed (oldest finished first). What is dropped leaves
no trace, its id is free again. A request's event log lives and goes with it; readers that already hold the request
can read on. No clock: ``now_s`` is monotonic and passed in.

Not here: outcomes (``collector``), who is told about them (``service``).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from common.errors import InvariantError, QueueFullError, RequestConflictError
from common.types import ChannelResult
from common.wakeup import WakeUp

_MIN_RETRY_AFTER_S = 0.1
_HEAP_SLACK = 64


@dataclass(slots=True, eq=False)
class StoredRequest:
    """A request with what its waiters and stream readers wait on."""

    collector: Collector
    progressed: WakeUp = field(default_factory=WakeUp)
    """The event log has grown."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Every question has its outcome."""

    @property
    def request_id(self) -> str:
        """Its id."""
        return self.collector.record.request_id


class RequestStore:
    """Requests by id, with their deadlines and expiries."""

    def __init__(self, *, max_requests: int, result_ttl_s: float) -> None:
        """Create an empty store.

        Args:
            max_requests: most requests kept, running and finished.
            result_ttl_s: seconds a finished request is kept.
        """
        self._max_requests = max_requests
        self._result_ttl_s = result_ttl_s
        self._running: dict[str, StoredRequest] = {}
        # In the order of finishing, which is the order of expiry too.
        self._finished: OrderedDict[str, tuple[float, StoredRequest]] = OrderedDict()
        # (deadline_s, request_id): one per running request, never later than its next deadline; those of finished
        # requests are dropped when they come up or outnumber the rest.
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Requests kept now."""
        return len(self._running) + len(self._finished)

    def find(self, request_id: str) -> StoredRequest | None:
        """The request, running or finished; ``None`` when unknown."""
        if request_id in self._finished:
            return self._finished[request_id][1]
        return self._running.get(request_id)

    def holds(self, request_id: str, content_digest: str) -> bool:
        """Whether exactly this request is kept.

        Raises:
            RequestConflictError: the id belongs to a request with other content.
        """
        stored = self.find(request_id)
        if stored is None:
            return False
        if stored.collector.record.content_digest != content_digest:
            raise RequestConflictError(
                f"request id {request_id!r} is already used by a request with other content; choose another id"
            )
        return True

    def add(self, stored: StoredRequest, now_s: float) -> None:
        """Keep a new, unfinished request; evicts the oldest finished one when there is no room.

        Raises:
            QueueFullError: every kept request is still running.
            InvariantError: the id is taken.
        """
        if self.find(stored.request_id) is not None:
            raise InvariantError(f"request {stored.request_id!r} was added twice")
        if len(self) >= self._max_requests:
            self._evict(now_s)
        self._running[stored.request_id] = stored
        self._push_deadline(stored)

    def finish(self, stored: StoredRequest, now_s: float) -> None:
        """The request has all its outcomes; keep it until its time is over.

        Raises:
            InvariantError: it is not running.
        """
        if self._running.pop(stored.request_id, None) is not stored:
            raise InvariantError(f"request {stored.request_id!r} was finished but is not running")
        self._finished[stored.request_id] = now_s + self._result_ttl_s, stored

    def remove(self, request_id: str) -> None:
        """Forget a finished request at once; its id is free."""
        self._finished.pop(request_id, None)

    def running(self) -> list[StoredRequest]:
        """All requests with open questions."""
        return list(self._running.values())

    def due(self, now: Moment, *, again_after_s: float) -> list[tuple[StoredRequest, tuple[ChannelResult, ...]]]:
        """Placeholders of every question that is due, by request; see ``Collector.due``."""
        due: list[tuple[StoredRequest, tuple[ChannelResult, ...]]] = []
        while self._deadlines and self._deadlines[0][0] <= now.monotonic_s:
            stored = self._running.get(heapq.heappop(self._deadlines)[1])
            if stored is None:
                continue
            placeholders = stored.collector.due(now, again_after_s=again_after_s)
            self._push_deadline(stored)
            if placeholders:
                due.append((stored, placeholders))
        return due

    def drop_expired(self, now_s: float) -> None:
        """Forget finished requests whose time is over."""
        while self._finished and next(iter(self._finished.values()))[0] <= now_s:
            self._finished.popitem(last=False)

    def next_due_s(self) -> float | None:
        """Monotonic seconds at which a question or a result expires next, or earlier; ``None`` when none will."""
        due_s = [self._deadlines[0][0]] if self._deadlines else []
        if self._finished:
            due_s.append(next(iter(self._finished.values()))[0])
        return min(due_s, default=None)

    def _evict(self, now_s: float) -> None:
        if self._finished:
            self._finished.popitem(last=False)
            return
        next_due_s = self.next_due_s()
        raise QueueFullError(
            f"all {self._max_requests} requests that can be kept are still running; try again later",
            retry_after_s=max(_MIN_RETRY_AFTER_S, (next_due_s or now_s) - now_s),
        )

    def _push_deadline(self, stored: StoredRequest) -> None:
        deadline_s = stored.collector.next_deadline_s
        if deadline_s is None:
            return
        heapq.heappush(self._deadlines, (deadline_s, stored.request_id))
        if len(self._deadlines) > 2 * len(self._running) + _HEAP_SLACK:
            self._deadlines = [
                (running.collector.next_deadline_s or deadline_s, request_id)
                for request_id, running in self._running.items()
            ]
            heapq.heapify(self._deadlines)
