"""The worker: leases work items, feeds the engine, reports progress, commits outcomes.

Invariants and semantics: it never holds more leases than the engine has slots, so it leases nothing it cannot start.
Every lease it holds ends in a commit, a hand-back or the loss of the lease. Events of the engine are reported in the
order in which they happened. Leaving ``run`` (cancellation) is the drain's end: unstarted leases go back.

Not here: the forward (``engine_core``), who gets the results (``aggregator_svc``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TypeVar

from common.errors import EngineDeadError, IsolationUnavailableError, KevError
from common.ports import Clock, CommitState, Lease, WorkStreams
from common.types import ChannelDelta, ChannelEvent, ChannelResult, ChannelStarted, FinishReason, IsolationLevel
from inference_svc.answer import AnswerText, IncrementalDetokenizer
from inference_svc.engine_core import EngineThread
from inference_svc.sequence import Sequence

_LOG = logging.getLogger("kev.worker")

_LEASE_WAIT_S = 5.0
_MISMATCH_PAUSE_S = 1.0
_RETRY_PAUSE_S = 0.5
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
        self._num_deltas: dict[tuple[str, int], int] = {}
        """Number of the last delta that was reported of each question."""
        self._events: asyncio.Queue[list[ChannelEvent]] = asyncio.Queue()
        self._slot_freed = asyncio.Event()
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
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._events.put_nowait, events)

        return deliver

    async def run(self, engine: EngineThread) -> None:
        """Work until cancelled.

        Raises:
            ExceptionGroup: with the ``EngineDeadError`` of an engine thread that has ended by itself; every question
                it had has an error outcome by then.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease_loop(engine), name="kev-lease")
                group.create_task(self._report_loop(engine), name="kev-report")
                group.create_task(self._renew_loop(engine), name="kev-renew")
                group.create_task(self._cancel_loop(engine), name="kev-cancel")
        finally:
            for lease in list(self._held.values()):
                await self._work.hand_back(lease)
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
        for lease in others:
            await self._patiently(partial(self._work.hand_back, lease))
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
            await self._work.hand_back(lease)
            await asyncio.sleep(_MISMATCH_PAUSE_S)
            return
        if self._settings.strict_refusal and lease.item.isolation is IsolationLevel.STRICT:
            self._held[lease.item.key] = lease
            reason = f"isolation strict cannot be kept here: {self._settings.strict_refusal}"
            await self._commit_error(lease, IsolationUnavailableError(reason))
            return
        while lease.item.key in self._held:
            # Withdrawn and published anew: events of the former must not pass for those of this one.
            engine.cancel(*lease.item.key)
            self._slot_freed.clear()
            await self._slot_freed.wait()
        self._held[lease.item.key] = lease
        sequence = Sequence(
            sequence_id=next(self._sequence_ids),
            item=lease.item,
            attempt=lease.attempt,
            published_s=self._clock.monotonic() - lease.age_ms / 1000,
            answer=AnswerText(self._make_detokenizer(), lease.item.sampling),
            eos_ids=self._settings.eos_ids,
        )
        try:
            engine.add(sequence)
        except EngineDeadError as error:
            await self._commit_error(lease, error)

    async def _commit_error(self, lease: Lease, error: KevError) -> None:
        item = lease.item
        result = ChannelResult(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            finish_reason=FinishReason.ERROR,
            num_prompt_tokens=len(item.prompt.ids),
            finished_at=self._clock.time(),
            attempt=lease.attempt,
            node_id=self._settings.node_id,
            error=error.info,
        )
        await self._finish(lease, result)

    async def _report_loop(self, engine: EngineThread) -> None:
        """Report what there is, question beside question; text that has piled up goes out in one delta."""
        while True:
            events = await self._events.get()
            while not self._events.empty():
                events += self._events.get_nowait()
            by_question: dict[tuple[str, int], list[ChannelEvent]] = {}
            for event in events:
                by_question.setdefault((event.request_id, event.question_index), []).append(event)
            await asyncio.gather(*(self._report(key, own) for key, own in by_question.items()))
            if engine.failure is not None:
                for lease in list(self._held.values()):
                    await self._commit_error(lease, engine.failure)
                raise engine.failure

    async def _report(self, key: tuple[str, int], events: list[ChannelEvent]) -> None:
        lease = self._held.get(key)
        if lease is None:
            return
        for event in joined_deltas([event for event in events if event.attempt == lease.attempt]):
            if isinstance(event, ChannelResult):
                await self._finish(lease, event)
            elif isinstance(event, ChannelDelta):
                seq = self._num_deltas[key] = self._num_deltas.get(key, -1) + 1
                await self._emit(lease, replace(event, seq=seq))
            else:
                await self._emit(lease, event)

    async def _finish(self, lease: Lease, result: ChannelResult) -> None:
        state = await self._patiently(partial(self._work.commit, lease, result))
        if state is CommitState.STALE:
            _LOG.warning("outcome of %s[%d] came too late", result.request_id, result.question_index)
        self._held.pop(lease.item.key, None)
        self._num_deltas.pop(lease.item.key, None)
        self._slot_freed.set()

    async def _renew_loop(self, engine: EngineThread) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_timeout_s / 4)
            for lease in list(self._held.values()):
                try:
                    renewed = await self._work.renew(lease)
                except KevError as error:
                    _LOG.warning("a lease could not be renewed; trying again: %s", error)
                    continue
                if not renewed:
                    engine.cancel(*lease.item.key)  # it belongs to somebody else now

    async def _cancel_loop(self, engine: EngineThread) -> None:
        while True:
            for request_id, question_index in await self._patiently(partial(self._work.cancellations, _LEASE_WAIT_S)):
                engine.cancel(request_id, question_index)

    async def _emit(self, lease: Lease, event: ChannelStarted | ChannelDelta) -> None:
        """Report progress; what is lost while the store is away comes with the outcome."""
        try:
            await self._work.emit(lease, event)
        except KevError as error:
            _LOG.warning("progress of a question could not be reported: %s", error)

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


def joined_deltas(events: list[ChannelEvent]) -> list[ChannelEvent]:
    """The events of one question with neighbouring deltas made into one; their ``seq`` is to be given anew."""
    joined: list[ChannelEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ChannelDelta) and isinstance(last, ChannelDelta):
            joined[-1] = replace(event, text=last.text + event.text)
        else:
            joined.append(event)
    return joined
