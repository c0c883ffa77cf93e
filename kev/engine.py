"""The embedded form as callers use it: router, engine cores and aggregator in one process.

Invariants and semantics: an ``AsyncEngine`` belongs to the event loop that first uses it; ``Engine`` runs one on a loop
of its own and may be used from any thread, from notebooks and at import time. If a tier stops by itself, or the last
engine core, every call from then on raises ``EngineDeadError``: nothing hangs. Process death loses what was in flight.

Not here: what the tiers are made of (``kev.tiers``), HTTP (``kev.gateway``).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from common.api_keys import ApiKeys
from common.clock import SystemClock
from common.config import Config, load_config
from common.errors import EngineDeadError, InvariantError, IsolationUnavailableError
from common.ports import Clock
from common.request import RequestRules, parse_request
from common.types import (
    ChannelSnapshot,
    EngineStats,
    IsolationLevel,
    IsolationReport,
    NodeStats,
    RequestView,
    Result,
    StreamEvent,
    Verdict,
)
from kev.blocking import Blocking, close_events, next_event
from kev.parts import EngineParts, load_parts
from kev.tiers import Tiers

if TYPE_CHECKING:
    from common.telemetry import Telemetry

_LOG = logging.getLogger("kev.engine")
_T = TypeVar("_T")

Source = str | os.PathLike[str] | Mapping[str, object] | None
"""Where a configuration comes from: a path, a mapping, or None for the defaults."""


class AsyncEngine:
    """Kev in this process, for asyncio. Methods must be called on the event loop that first used the engine."""

    def __init__(
        self, config: Config, parts: EngineParts, clock: Clock | None = None, telemetry: Telemetry | None = None
    ) -> None:
        """Compose an engine; ``from_config`` is the usual way.

        Args:
            config: the configuration.
            parts: tokenizer and nodes.
            clock: None for the system's.
            telemetry: is told of everything that happens; None tells nobody.

        Raises:
            ConfigError: the configuration is for another form, or its file of API keys cannot be read.
        """
        config.require_embedded()
        self._config = config
        self._tenant_weights = ApiKeys.from_file(config.cluster.api_keys_file).tenant_weights
        self._parts = parts
        self._clock: Clock = clock or SystemClock()
        self._telemetry = telemetry
        self._rules = RequestRules.for_model(
            config,
            vocab_size=parts.tokenizer.vocab_size,
            uses_chat_template=parts.tokenizer.uses_chat_template,
            max_context=parts.max_context_under(config),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tiers: Tiers | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def from_config(
        cls,
        source: Source = None,
        *,
        progress: Callable[[str], None] = _LOG.info,
        telemetry: Telemetry | None = None,
    ) -> Self:
        """Load configuration and model; blocks until the machine is probed.

        Args:
            source: path of a ``kev.yaml``, a mapping with the same content, or None for the defaults.
            progress: told in words what takes long.
            telemetry: where metrics and traces go (``kev serve``); None for nowhere.

        Raises:
            ConfigError: the configuration is wrong.
            ModelError: the model cannot be found, read or isolated.
            IsolationUnavailableError: the configured level cannot be kept here.
        """
        config = load_config(source)
        config.require_embedded()
        ApiKeys.from_file(config.cluster.api_keys_file)  # a mistake in it is told before the model is loaded
        return cls(config, load_parts(config, SystemClock(), progress), telemetry=telemetry)

    async def __aenter__(self) -> Self:
        self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(self, queries: Any, /, **options: Any) -> str:
        """Accept independent questions; returns the request id at once unless ``overflow_policy: wait`` holds it back.

        Args:
            queries: list of texts, ``Question`` values or mappings with the fields of ``Question``.
            **options: ``isolation``, ``strategy``, ``mode``, ``max_parallel``, ``request_id`` (idempotency key),
                ``system_prompt``, ``tenant``, and any field of ``Question`` but ``text`` as default of all questions.

        Raises:
            InvalidRequestError: a field is wrong; names field and index; nothing was started.
            QueueFullError: no room now; carries ``retry_after_s``.
            RequestConflictError: the id belongs to a request with other content.
            IsolationUnavailableError: ``strict`` was asked for and cannot be kept here.
            DrainingError: the engine is closing.
            EngineDeadError: the engine has ended.
        """
        tiers = self._started()
        if options.get("request_id") is None:
            self._check_alive()
            tiers.cores.check_hope()
            tenant = options.get("tenant")
            tiers.entrance.check_room(tenant if isinstance(tenant, str) else "")
        spec = parse_request(queries, options, self._rules)
        _require_level(self._parts.report, spec.isolation)
        await self._guard(tiers.entrance.accept(spec))
        return spec.request_id

    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        """All results in the order of the request's mode.

        Args:
            request_id: from ``submit``.
            timeout: seconds to wait at most; None waits until every question has its outcome.

        Raises:
            RequestNotFoundError: unknown or expired.
            DeadlineExceededError: the wait ended first; the request goes on.
            EngineDeadError: the engine has ended.
        """
        view = await self._guard(self._started().aggregator.wait(request_id, timeout))
        return list(view.results)

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands.

        Raises:
            RequestNotFoundError: unknown or expired.
        """
        return await self._guard(self._started().aggregator.poll(request_id))

    async def ask(self, queries: Any, /, **options: Any) -> list[Result]:
        """Submit and wait; a cancelled call withdraws its questions. Arguments and errors as ``submit``."""
        request_id = await self.submit(queries, **options)
        try:
            return await self.wait(request_id)
        except asyncio.CancelledError:
            await self._started().aggregator.cancel(request_id)
            raise

    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        """Events of a request from an index on: deltas, one ``result`` per question, then ``done``.

        Raises:
            RequestNotFoundError: unknown or expired.
            EngineDeadError: the engine has ended.
        """
        events = self._started().aggregator.stream(request_id, from_event_index)
        try:
            while True:
                try:
                    yield await self._guard(next_event(events))
                except StopAsyncIteration:
                    return
        finally:
            await close_events(events)

    async def cancel(self, request_id: str) -> int:
        """Withdraw the questions without an outcome; returns how many.

        Raises:
            RequestNotFoundError: unknown or expired.
        """
        return await self._guard(self._started().aggregator.cancel(request_id))

    async def isolation(self) -> IsolationReport:
        """What isolation this process can promise, and on what grounds."""
        return self._parts.report

    async def channels(self) -> list[ChannelSnapshot]:
        """The channel pool."""
        return self._started().router.channels()

    async def stats(self) -> EngineStats:
        """Counters since start."""
        tiers = self._started()
        nodes = tuple(tiers.cores.stats())
        return EngineStats(router=tiers.router.stats(), node=NodeStats.together(nodes), nodes=nodes)

    async def ready(self) -> None:
        """Return if requests would be answered now.

        Raises:
            EngineDeadError: the engine has ended, or none of its cores runs at this moment.
        """
        tiers = self._started()
        await asyncio.sleep(0)
        self._check_alive()
        tiers.cores.check_ready()

    async def close(self) -> None:
        """Stop; questions still running get an error outcome. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._tiers is not None:
            self._tiers.begin_drain()
        if self._task is not None and not self._task.done():  # its loop may be gone
            self._task.cancel()
            await asyncio.wait({self._task})
        await asyncio.gather(*(asyncio.to_thread(node.close) for node in self._parts.nodes))

    def _started(self) -> Tiers:
        """The tiers, started on the running loop at the first use."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineDeadError("the engine is closed; open a new one")
        if self._tiers is None:
            self._loop = loop
            self._tiers = Tiers(self._config, self._parts, self._clock, self._telemetry, self._tenant_weights)
            self._task = loop.create_task(self._tiers.run(), name="kev-tiers")
            self._task.add_done_callback(_log_end)
        elif self._loop is not loop:
            raise EngineDeadError(
                "this AsyncEngine belongs to another event loop; use kev.Engine or one engine per loop"
            )
        return self._tiers

    def _check_alive(self) -> None:
        task = self._task
        if task is not None and task.done():
            raise EngineDeadError("the engine has ended after an internal error; the log has the details; restart Kev")

    async def _guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await a tier's answer in the caller's own task, where a cancellation meets it, or raise if the tiers end."""
        tiers, waiting = self._task, True
        if tiers is None or tiers.done():
            work.close()
            self._check_alive()
            raise InvariantError("the engine was used before it was started")

        def interrupt(_: object) -> None:
            if waiting:
                scope.reschedule(0.0)

        tiers.add_done_callback(interrupt)
        try:
            async with asyncio.timeout(None) as scope:
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            waiting = False
            tiers.remove_done_callback(interrupt)
        if self._closed:
            raise EngineDeadError("the engine was closed")
        self._check_alive()
        raise EngineDeadError("the engine has ended")


def _log_end(tiers: asyncio.Task[None]) -> None:
    cause = None if tiers.cancelled() else tiers.exception()
    if cause is not None:
        _LOG.error("a tier of the engine ended", exc_info=cause)


def _require_level(report: IsolationReport, level: IsolationLevel) -> None:
    """Fail closed: an answer at level strict is bitwise isolated or is not given."""
    if level is IsolationLevel.STRICT and dict(report.levels)[level] is not Verdict.BITWISE:
        raise IsolationUnavailableError(f"isolation strict cannot be kept here: {report.reason}")


class Engine(Blocking):
    """Kev in this process, for ordinary code: the methods of ``AsyncEngine``, blocking.

    May be used from any thread and inside notebooks. Use it as a context manager, or call ``close``.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Run an engine on a loop of its own; ``from_config`` is the usual way."""
        super().__init__(engine)
        self._call(engine.ready())

    @classmethod
    def from_config(cls, source: Source = None, *, progress: Callable[[str], None] = _LOG.info) -> Self:
        """Load configuration and model; arguments and errors as ``AsyncEngine.from_config``."""
        return cls(AsyncEngine.from_config(source, progress=progress))
