"""The worker: leases work items, feeds the engine, reports progress, commits outcomes.

Invariants and semantics: it never holds more leases than the engine has slots, so it leases nothing it cannot start.
Every lease it holds ends in an outcome, a hand-back or the loss of the lease. A channel has one question in the engine
at a time: its next one is added after an order to end the former. Events of the engine are reported in the order in
which they happened, one call at a time: the first leave at once, what happens meanwhile goes out together in the next.
Leaving ``run`` (cancellation) is the drain's end: unstarted leases go back.

Not here: the forward (``engine_core``), what piles up (``pile``), who gets the results (``aggregator_svc``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from common.errors import EngineDeadError, IsolationUnavailableError, KevError
from common.ports import Clock, Lease, Report, ReportState, WorkStreams
from common.types import ChannelEvent, ChannelResult, FinishReason, IsolationLevel
from inference_svc.answer import AnswerText, IncrementalDetokenizer
from inference_svc.engine_core import EngineThread
from inference_svc.pile import Pile
from inference_svc.sequence import Sequence as RunningQuestion

_LOG = logging.getLogger("kev.worker")

_LEASE_WAIT_S = 5.0
_MISMATCH_PAUSE_S = 1.0
_RETRY_PAUSE_S = 0.5
_FULL_PAUSE_S = 0.05
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker must know."""

    node_id: str
    max_slots: int
    fingerprint: str
    """Model and tokenizer of this node; items for another one are handed back."""
    eos_ids: frozenset[int]
    lease_timeout_s: float = 15.0
    max_attempts: int = 3
    """Deliveries of a question; the last one runs alone on its node."""
    strict_refusal: str = ""
    """Why this node cannot keep level strict; empty when it can. Such questions end with an error, never unverified."""
    others_take_over: Callable[[], bool] = lambda: False
    """Whether others answer what is left when this node's engine has ended by itself."""


class Worker:
    """One node's loop between the work streams and the engine. Lives on the event loop."""

    def __init__(
        self,
        work: WorkStreams,
        clock: Clock,
        settings: WorkerSettings,
        make_detokenizer: Callable[[], IncrementalDetokenizer],
    ) -> None:
        self._work = work
        self._clock = clock
        self._settings = settings
        self._make_detokenizer = make_detokenizer
        self._held: dict[tuple[str, int], Lease] = {}
        self._pile = Pile()
        self._arrived: deque[list[ChannelEvent]] = deque()
        """Filled by the engine's thread, which wakes the loop only while somebody waits for it."""
        self._waits_for_events = False
        self._has_events = asyncio.Event()
        self._slot_freed = asyncio.Event()
        self._lost: set[tuple[str, int]] = set()
        """Questions stopped here because their lease was lost, not because anybody withdrew them."""
        self._sequence_ids = count(1)
        self._draining = False

    @property
    def num_held(self) -> int:
        """Leases held now."""
        return len(self._held)

    def begin_drain(self) -> None:
        """Lease nothing new; what is running goes on."""
        self._draining = True

    def events_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[list[ChannelEvent]], None]:
        """The callback for the engine thread: hands events to this worker on its loop."""

        def deliver(events: list[ChannelEvent]) -> None:
            self._arrived.append(events)
            if self._waits_for_events and not loop.is_closed():
                loop.call_soon_threadsafe(self._has_events.set)

        return deliver

    async def run(self, engine: EngineThread) -> None:
        """Work until cancelled.

        Raises:
            ExceptionGroup: with the ``EngineDeadError`` of an engine thread that has ended by itself; every question
                it had has an error outcome by then, or is left to others.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease_loop(engine), name="kev-lease")
                group.create_task(self._report_loop(engine), name="kev-report")
                group.create_task(self._renew_loop(engine), name="kev-renew")
                group.create_task(self._cancel_loop(engine), name="kev-cancel")
        finally:
            await self._work.hand_back(list(self._held.values()))
            self._held.clear()

    async def _lease_loop(self, engine: EngineThread) -> None:
        while True:
            free = self._settings.max_slots - len(self._held)
            if free <= 0 or self._draining or not engine.alive:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            leases = await self._patiently(partial(self._work.lease, free, _LEASE_WAIT_S))
            suspect = next((lease for lease in leases if lease.attempt >= self._settings.max_attempts), None)
            if suspect is not None:
                await self._take_alone(suspect, [lease for lease in leases if lease is not suspect], engine)
                continue
            for lease in leases:
                await self._take(lease, engine)

    async def _take_alone(self, suspect: Lease, others: list[Lease], engine: EngineThread) -> None:
        """Give a question its last try without company: one that kills its node then takes nobody along."""
        await self._patiently(partial(self._work.hand_back, others))
        self._held[suspect.item.key] = suspect  # renewed while it waits for the others to end
        await self._until_only(suspect)
        self._held.pop(suspect.item.key, None)
        await self._take(suspect, engine)
        await self._until_only(None)

    async def _until_only(self, lease: Lease | None) -> None:
        """Wait until nothing else is held."""
        while any(held is not lease for held in self._held.values()):
            self._slot_freed.clear()
            await self._slot_freed.wait()

    async def _take(self, lease: Lease, engine: EngineThread) -> None:
        if lease.item.fingerprint != self._settings.fingerprint:
            _LOG.warning("request %s is for another model; handed back", lease.item.request_id)
            await self._work.hand_back([lease])
            await asyncio.sleep(_MISMATCH_PAUSE_S)
            return
        if self._settings.strict_refusal and lease.item.isolation is IsolationLevel.STRICT:
            self._held[lease.item.key] = lease
            reason = f"isolation strict cannot be kept here: {self._settings.strict_refusal}"
            await self._report([self._failed(lease, IsolationUnavailableError(reason))], engine)
            return
        while lease.item.key in self._held:
            # Withdrawn and published anew: events of the former must not pass for those of this one.
            engine.cancel(*lease.item.key)
            self._slot_freed.clear()
            await self._slot_freed.wait()
        for held in [held for held in self._held.values() if held.item.channel_id == lease.item.channel_id]:
            # One of a channel is granted at a time: the former was withdrawn or lost, and word of it comes later.
            self._lose(held, engine)
        self._held[lease.item.key] = lease
        started = RunningQuestion(
            sequence_id=next(self._sequence_ids),
            item=lease.item,
            attempt=lease.attempt,
            published_s=self._clock.monotonic() - lease.age_ms / 1000,
            answer=AnswerText(self._make_detokenizer(), lease.item.sampling),
            eos_ids=self._settings.eos_ids,
        )
        try:
            engine.add(started)
        except EngineDeadError as error:
            await self._leave([lease], error, engine)

    def _failed(self, lease: Lease, error: KevError) -> Report:
        return failed(lease, error, self._clock.time(), self._settings.node_id)

    async def _report_loop(self, engine: EngineThread) -> None:
        """Report what there is, one call at a time; what found no room goes again with what has come since."""
        had_room = True
        while True:
            if had_room:
                await self._until_events()
            else:
                await asyncio.sleep(_FULL_PAUSE_S)
            while self._arrived:
                self._pile.add(self._arrived.popleft())
            had_room = await self._report(self._without_lost(self._pile.take(self._held)), engine)
            if engine.failure is not None and not self._arrived:
                await self._leave(list(self._held.values()), engine.failure, engine)
                raise engine.failure

    async def _leave(self, leases: Sequence[Lease], failure: EngineDeadError, engine: EngineThread) -> None:
        """The engine has ended: what others may try again stays leased until they take it over, the rest has failed."""
        limit = self._settings.max_attempts if self._settings.others_take_over() else 0
        await self._report([self._failed(lease, failure) for lease in leases if lease.attempt >= limit], engine)
        for lease in leases:
            self._held.pop(lease.item.key, None)

    async def _until_events(self) -> None:
        self._has_events.clear()
        self._waits_for_events = True
        if not self._arrived:  # looked at after the flag is set, so that the engine's thread sees one of both
            await self._has_events.wait()
        self._waits_for_events = False

    async def _report(self, reports: Sequence[Report], engine: EngineThread) -> bool:
        """Report, in one call. False: some progress found no room and is back on the pile."""
        states = await self._patiently(partial(self._work.report, reports)) if reports else []
        for report, state in zip(reports, states, strict=True):
            if report.outcome is not None:
                self._finish(report.outcome, state)
            elif state is ReportState.FULL:
                self._pile.put_back(report)
            elif state is not ReportState.HELD:
                self._lose(report.lease, engine)
        return ReportState.FULL not in states

    def _without_lost(self, reports: Sequence[Report]) -> list[Report]:
        """The reports that are anybody's business: that a question was stopped after its lease was lost is not.

        Nobody cancelled it. Whoever has it now, or the store once it has it back, will tell its outcome.
        """
        kept: list[Report] = []
        for report in reports:
            key, outcome = report.lease.item.key, report.outcome
            if key in self._lost and outcome is not None and outcome.finish_reason is FinishReason.CANCELLED:
                self._let_go(key)
            else:
                kept.append(report)
        return kept

    def _finish(self, result: ChannelResult, state: ReportState) -> None:
        if state is ReportState.STALE:
            _LOG.warning("outcome of %s[%d] came too late", result.request_id, result.question_index)
        self._let_go(result.key)

    def _let_go(self, key: tuple[str, int]) -> None:
        self._held.pop(key, None)
        self._lost.discard(key)
        self._pile.forget(key)
        self._slot_freed.set()

    def _lose(self, lease: Lease, engine: EngineThread) -> None:
        """Stop working on a question that belongs to somebody else now."""
        self._lost.add(lease.item.key)
        engine.cancel(*lease.item.key)

    async def _renew_loop(self, engine: EngineThread) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_timeout_s / 4)
            leases = list(self._held.values())
            try:
                renewed = await self._work.renew(leases)
            except KevError as error:
                _LOG.warning("leases could not be renewed; trying again: %s", error)
                continue
            for lease, is_held in zip(leases, renewed, strict=True):
                if not is_held:
                    self._lose(lease, engine)

    async def _cancel_loop(self, engine: EngineThread) -> None:
        while True:
            for request_id, question_index in await self._patiently(partial(self._work.cancellations, _LEASE_WAIT_S)):
                self._lost.discard((request_id, question_index))
                engine.cancel(request_id, question_index)

    async def _patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a call while the store is away; everything else is the caller's."""
        while True:
            try:
                return await call()
            except KevError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the work streams cannot be reached; trying again: %s", error)
                await asyncio.sleep(_RETRY_PAUSE_S)


def failed(lease: Lease, error: KevError, at_s: float, node_id: str) -> Report:
    """The report that a question ended with an error before it gave anything."""
    item = lease.item
    result = ChannelResult(
        request_id=item.request_id,
        question_index=item.question_index,
        channel_id=item.channel_id,
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=len(item.prompt.ids),
        finished_at=at_s,
        attempt=lease.attempt,
        node_id=node_id,
        error=error.info,
    )
    return Report(lease=lease, events=(result,))
