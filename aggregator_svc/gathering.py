"""Feeds events to the requests that are kept, and tells listeners of outcomes.

Invariants and semantics: each outcome that is placed reaches every listener once, before waiters and readers see it.
What makes no sense is counted and dropped, whoever sent it: one broken node stops nobody. One event loop.

Not here: where events come from (``service``, ``takeover``), what an event does to a request (``collector``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from aggregator_svc.store import RequestStore, StoredRequest
from common.ports import Clock
from common.types import ChannelDelta, ChannelEvent, ChannelResult, ChannelStarted, ErrorInfo
from common.wakeup import WakeUp

_log = logging.getLogger(__name__)


class Gathering:
    """The requests of one aggregator and what happens to them.

    Attributes:
        store: the requests that are kept.
        due_sooner: a request was added that is due before all others.
        num_outcomes: terminal outcomes, placeholders included.
        num_late: outcomes that came after the first one of their question.
        num_malformed: events that made no sense and were dropped.
    """

    def __init__(self, store: RequestStore, clock: Clock) -> None:
        self.store = store
        self.due_sooner = WakeUp()
        self.num_outcomes = 0
        self.num_late = 0
        self.num_malformed = 0
        self._clock = clock
        self._listeners: list[Callable[[ChannelResult], None]] = []

    def add_listener(self, listener: Callable[[ChannelResult], None]) -> None:
        """Call ``listener`` once per question, at its terminal outcome; what it raises is logged only."""
        self._listeners.append(listener)

    def now(self) -> Moment:
        """This instant."""
        return Moment(monotonic_s=self._clock.monotonic(), unix_s=self._clock.time())

    def drop_expired(self) -> Moment:
        """Forget finished requests whose time is over; the instant."""
        now = self.now()
        self.store.drop_expired(now.monotonic_s)
        return now

    def keep(self, collector: Collector, now: Moment) -> StoredRequest:
        """Keep a new, unfinished request.

        Raises:
            QueueFullError: every kept request is still running.
            InvariantError: the id is taken.
        """
        next_due_s = self.store.next_due_s()
        stored = StoredRequest(collector)
        self.store.add(stored, now.monotonic_s)
        if next_due_s is None or (collector.next_deadline_s or next_due_s) < next_due_s:
            self.due_sooner.wake_all()
        return stored

    def feed(self, stored: StoredRequest, event: ChannelEvent, now: Moment) -> None:
        """Let an event happen to its request."""
        try:
            self._feed(stored.collector, event, now)
            self._finish(stored)
        except Exception:
            self.drop(event)

    def drop(self, event: object) -> None:
        """Count what is no event, or makes no sense; its text is never logged."""
        self.num_malformed += 1
        _log.error("dropped a malformed %s event", type(event).__name__, exc_info=True)

    def end(self, stored: StoredRequest, error: ErrorInfo | None = None) -> None:
        """Cancel what is open, without asking anybody."""
        now = self.now()
        for outcome in stored.collector.cancelled(now, error):
            self.feed(stored, outcome, now)

    def forget(self, request_id: str) -> None:
        """Cancel what is open of a request and keep it no longer: its id is free."""
        stored = self.store.find(request_id)
        if stored is not None:
            self.end(stored)
            self.store.remove(request_id)

    def _feed(self, collector: Collector, event: ChannelEvent, now: Moment) -> None:
        match event:
            case ChannelStarted():
                collector.start(event, now)
            case ChannelDelta():
                collector.append(event, now)
            case ChannelResult():
                if collector.place(event, now):
                    self._tell(event)
                elif event not in collector.outcomes():
                    self.num_late += 1

    def _tell(self, outcome: ChannelResult) -> None:
        self.num_outcomes += 1
        for listener in self._listeners:
            try:
                listener(outcome)
            except Exception:
                _log.exception("a listener failed on question %d", outcome.question_index)

    def _finish(self, stored: StoredRequest) -> None:
        if stored.collector.done and not stored.finished.is_set():
            self.store.finish(stored, self.now().monotonic_s)
            stored.finished.set()
        stored.progressed.wake_all()
