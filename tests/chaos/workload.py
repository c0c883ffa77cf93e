"""Load with a memory: clients that submit, read, cancel and come back after every error, and write down what they saw.

Invariants and semantics: every question has a nonce of its own. A submission whose effect is not known is repeated
under the same request id and content; a reader that loses its stream opens it again behind the last event it saw. The
run is bounded in requests and in time. When the time is up nothing new is submitted, and every accepted request is
read to its end, for at most ``settle_s``; what is still missing then, the checker calls lost.

Not here: the judgement (``checker``), faults.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from uuid import UUID

from common.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    KevError,
    QueueFullError,
    RequestConflictError,
    RequestNotFoundError,
)
from common.types import Result, StreamEvent
from kev.gateway.backend import Backend
from tests.chaos.history import (
    Cancelled,
    Closed,
    History,
    Opened,
    Outcome,
    Phase,
    Seen,
    Submitted,
    make_nonce,
)

_NO_EFFECT = (QueueFullError, DrainingError, InvalidRequestError, RequestConflictError)
"""Errors after which certainly nothing was accepted by that call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """How much of what."""

    seed: int = 0
    num_clients: int = 4
    num_requests: int = 100
    """In all; a request that is refused for good counts."""
    duration_s: float = 30.0
    """Nothing new is submitted after so long."""
    settle_s: float = 30.0
    """How long a request may take to end after that."""
    max_questions: int = 4
    """Most questions of one request."""
    filler_chars: tuple[int, int] = (0, 40)
    """Shortest and longest text beside the nonce; an engine that echoes takes a token per byte."""
    stream_share: float = 0.5
    """Requests that are read as a stream; the others are waited for."""
    attach_share: float = 0.2
    """Streams that are read by a second reader, too."""
    cancel_share: float = 0.05
    deadline_share: float = 0.05
    """Requests with ``short_timeout_ms``."""
    timeout_ms: int = 30_000
    short_timeout_ms: int = 20
    max_tokens: int = 200
    wait_s: float = 2.0
    """Longest single wait; then the client asks again."""
    pause_s: float = 0.1
    """Longest pause before a call is repeated, unless the server asks for more."""
    longest_pause_s: float = 0.5
    """Longest pause after a refusal, however much more the server asks for."""
    num_tries: int = 200
    """How often a client repeats one call before it gives up."""


@dataclass(frozen=True, slots=True)
class _Request:
    request_id: str
    nonces: tuple[str, ...]
    texts: tuple[str, ...]
    timeout_ms: int


class Workload:
    """One run of the load against one backend, or several that share their state.

    Attributes:
        history: what was seen so far.
        latencies_s: from the first submission of a request to its last outcome, of requests that ended.
        num_ended: questions of requests that ended.
        num_ended_in_time: those of them that ended before the time was up.
    """

    def __init__(
        self, backends: Backend | list[Backend], settings: WorkloadSettings, history: History | None = None
    ) -> None:
        """A load over ``backends``; each call takes another one, so that a failing one is left at once."""
        self.history = History() if history is None else history
        self.latencies_s: list[float] = []
        self.num_ended = 0
        self.num_ended_in_time = 0
        self._backends = backends if isinstance(backends, list) else [backends]
        self._settings = settings
        self._numbers = random.Random(settings.seed)
        self._left = settings.num_requests
        self._num_calls = 0
        self._stopping = False
        self._ends_at_s = 0.0

    def stop(self) -> None:
        """Submit nothing new; what was accepted is read to its end."""
        self._stopping = True

    async def run(self) -> History:
        """Run to the end."""
        self._ends_at_s = time.monotonic() + self._settings.duration_s
        async with asyncio.TaskGroup() as group:
            for number in range(self._settings.num_clients):
                group.create_task(self._client(f"client-{number}"))
        return self.history

    # ---- one client

    async def _client(self, client: str) -> None:
        while self._left > 0 and not self._stopping and time.monotonic() < self._ends_at_s:
            self._left -= 1
            request = self._next_request()
            begin_s = time.monotonic()
            if not await self._submit(client, request):
                continue
            if await self._follow(client, request):
                self.latencies_s.append(time.monotonic() - begin_s)
                self.num_ended += len(request.nonces)
                self.num_ended_in_time += len(request.nonces) * (time.monotonic() <= self._ends_at_s)

    def _next_request(self) -> _Request:
        numbers, settings = self._numbers, self._settings
        nonces = tuple(make_nonce(numbers) for _ in range(numbers.randint(1, settings.max_questions)))
        short = numbers.random() < settings.deadline_share
        return _Request(
            request_id=str(UUID(int=numbers.getrandbits(128), version=4)),
            nonces=nonces,
            texts=tuple(nonce + "." * numbers.randint(*settings.filler_chars) for nonce in nonces),
            timeout_ms=settings.short_timeout_ms if short else settings.timeout_ms,
        )

    @property
    def _backend(self) -> Backend:
        self._num_calls += 1
        return self._backends[self._num_calls % len(self._backends)]

    async def _submit(self, client: str, request: _Request) -> bool:
        """Submit until it is known what became of it. False: it was not accepted, or nobody knows."""
        known = {"client": client, "request_id": request.request_id}
        for _ in range(self._settings.num_tries):
            self.history.add(Submitted(**known, phase=Phase.INVOKE, nonces=request.nonces))
            try:
                await self._backend.submit(
                    list(request.texts),
                    request_id=request.request_id,
                    timeout_ms=request.timeout_ms,
                    max_tokens=self._settings.max_tokens,
                )
            except KevError as error:
                phase = Phase.FAIL if isinstance(error, _NO_EFFECT) else Phase.INFO
                self.history.add(Submitted(**known, phase=phase, reason=error.reason))
                is_over = self._stopping or time.monotonic() > self._ends_at_s + self._settings.settle_s
                if isinstance(error, InvalidRequestError | RequestConflictError) or is_over:
                    return False
                await asyncio.sleep(self._pause_s(error))
            else:
                self.history.add(Submitted(**known, phase=Phase.OK))
                return True
        return False

    def _pause_s(self, error: KevError) -> float:
        """Full jitter below what the server asked for, or a short time."""
        longest_s = (
            min(error.retry_after_s, self._settings.longest_pause_s)
            if isinstance(error, QueueFullError)
            else self._settings.pause_s
        )
        return self._numbers.uniform(0, longest_s)

    async def _follow(self, client: str, request: _Request) -> bool:
        """Read a request to its end, maybe cancelling it. False: its end was not seen."""
        settings, numbers = self._settings, self._numbers
        until_s = time.monotonic() + request.timeout_ms / 1000 + settings.settle_s
        read = self._stream if numbers.random() < settings.stream_share else self._wait
        readers: list[Callable[[str, str, float], object]] = [read]
        if numbers.random() < settings.attach_share:
            readers.append(self._stream)
        cancels = numbers.random() < settings.cancel_share
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(read(f"{client}/{request.request_id}/{n}", request.request_id, until_s))  # type: ignore[arg-type]
                for n, read in enumerate(readers)
            ]
            if cancels:
                group.create_task(self._cancel(client, request.request_id, numbers.uniform(0, 0.05)))
        return all(task.result() for task in tasks)

    async def _cancel(self, client: str, request_id: str, after_s: float) -> None:
        known = {"client": client, "request_id": request_id}
        await asyncio.sleep(after_s)
        self.history.add(Cancelled(**known, phase=Phase.INVOKE))
        try:
            await self._backend.cancel(request_id)
        except KevError as error:
            self.history.add(Cancelled(**known, phase=Phase.INFO, reason=error.reason))
        else:
            self.history.add(Cancelled(**known, phase=Phase.OK))

    # ---- readers

    async def _wait(self, reader: str, request_id: str, until_s: float) -> bool:
        self.history.add(Opened(reader=reader, request_id=request_id))
        while True:
            try:
                results = await self._backend.wait(request_id, self._settings.wait_s)
            except KevError as error:
                if not await self._goes_on(reader, request_id, error, until_s):
                    return False
                continue
            for result in results:
                self._note(reader, result)
            self.history.add(Closed(reader=reader, request_id=request_id, phase=Phase.OK))
            return True

    async def _stream(self, reader: str, request_id: str, until_s: float) -> bool:
        next_index = 0
        while True:
            self.history.add(Opened(reader=reader, request_id=request_id, from_event_index=next_index))
            try:
                async with (
                    asyncio.timeout(max(0.0, until_s - time.monotonic())),
                    aclosing(self._backend.stream(request_id, next_index)) as events,  # type: ignore[type-var]
                ):
                    async for event in events:
                        next_index = event.event_index + 1
                        self._note_event(reader, event)
            except TimeoutError:
                self.history.add(Closed(reader=reader, request_id=request_id, phase=Phase.INFO, reason="NO_END_SEEN"))
                return False
            except KevError as error:
                if not await self._goes_on(reader, request_id, error, until_s):
                    return False
                continue
            self.history.add(Closed(reader=reader, request_id=request_id, phase=Phase.OK))
            return True

    async def _goes_on(self, reader: str, request_id: str, error: KevError, until_s: float) -> bool:
        """Whether the reader asks again after an error; pauses if so."""
        if isinstance(error, DeadlineExceededError) and time.monotonic() < until_s:
            return True  # only the wait was over
        is_over = time.monotonic() >= until_s or isinstance(error, RequestNotFoundError)
        phase = Phase.FAIL if isinstance(error, RequestNotFoundError) else Phase.INFO
        self.history.add(Closed(reader=reader, request_id=request_id, phase=phase, reason=error.reason))
        if not is_over:
            await asyncio.sleep(self._numbers.uniform(0, self._settings.pause_s))
        return not is_over

    def _note_event(self, reader: str, event: StreamEvent) -> None:
        self.history.add(
            Seen(
                reader=reader,
                request_id=event.request_id,
                event_index=event.event_index,
                kind=event.type,
                question_index=event.question_index,
                text=event.text,
            )
        )
        if event.result is not None:
            self._note(reader, event.result)

    def _note(self, reader: str, result: Result) -> None:
        self.history.add(
            Outcome(
                reader=reader,
                request_id=result.request_id,
                question_index=result.question_index,
                finish_reason=result.finish_reason,
                attempt=result.attempt,
                text=result.text,
                error="" if result.error is None else f"{result.error.reason}: {result.error.message}",
            )
        )
