"""Connections to Redis: start-up check, scripts with retries, blocking reads, calls that are never cut in half.

Invariants and semantics: a script is sent again after a lost connection, a time-out, or a server that loads, fails over
or is read-only, with full-jitter backoff, until ``patience_s`` has passed; scripts are made for that. Scripts that run
at the same time share a round trip. A caller that is cancelled leaves no connection behind with a reply still to come:
what was sent is waited for (at most ``_CANCEL_GRACE_S``; then it ends by itself, in the background), nothing is sent
any more, and only then the cancellation goes on. Blocking reads take nothing and have a client of their own, whose
socket waits longer than they do.

The only file that imports redis. Not here: what is read or run (``redis_scripts*``), what goes together
(``redis_batches``), what to wait for (``redis_listener``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis import exceptions as failures
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.errors import ConfigError, InvariantError, StoreUnavailableError
from common.outage_log import OutageLog
from common.redis_batches import Batches, Command
from common.redis_keys import RedisKeys
from common.redis_scripts import Argument, Script
from common.redis_scripts_results import EventEntry, event_entry
from common.redis_settings import LinkSettings
from common.types import Durability

_MIN_VERSION = (7, 0)
_FIRST_BACKOFF_S = 0.02
_MAX_BACKOFF_S = 1.0
_CANCEL_GRACE_S = 1.0
_LANES = 2

_REFUSED = (failures.AuthenticationError, failures.AuthorizationError, failures.NoPermissionError)
_PASSING = (
    failures.ConnectionError,
    failures.TimeoutError,
    failures.ReadOnlyError,
    failures.ClusterDownError,
    failures.TryAgainError,
    OSError,
)
_PASSING_CODES = ("BUSY", "LOADING", "MASTERDOWN", "READONLY", "UNKILLABLE", "UNBLOCKED", "NOREPLICAS", "MISCONF")
"""What a server answers that will soon be well again, where redis-py has no class for it."""

_log = logging.getLogger("kev.redis")

T = TypeVar("T")


class StoreFullError(StoreUnavailableError):
    """The server has no memory left: it takes only what frees room."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a public method; ``abandoned`` is set when its caller was cancelled."""

    abandoned: asyncio.Event


_current_call: ContextVar[_Call | None] = ContextVar("kev_redis_call", default=None)


class RedisLink:
    """Runs scripts and blocking reads for one deployment; shared by its transport and registry."""

    def __init__(self, settings: LinkSettings) -> None:
        """Set up the clients; nothing is connected before the first call.

        Raises:
            ConfigError: the URL or the deployment's name is not valid.
        """
        self.settings = settings
        self.keys = RedisKeys(settings.deployment)
        try:
            self._client = _make_client(settings, settings.socket_timeout_s, settings.max_connections)
            self._blocking = _make_client(settings, settings.block_s + settings.socket_timeout_s, 4)
            self._scripts = _make_client(settings, None, _LANES)
        except ValueError as error:
            raise ConfigError(f"the URL of Redis is not valid: {error}") from None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batches = Batches(self._exchange, num_lanes=_LANES)
        self._idle: list[Any] = []
        """Connections for scripts that are not in use."""
        self._random = random.Random()
        self._outage = OutageLog(_log)

    @classmethod
    async def connect(cls, settings: LinkSettings) -> RedisLink:
        """A link to a server that was found fit.

        Raises:
            ConfigError: the server is too old, evicts keys, or refuses the credentials.
            StoreUnavailableError: it cannot be reached within ``patience_s``, or is a replica.
        """
        link = cls(settings)
        try:
            await link.check_server()
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        """End what still runs and close every connection; closing again does nothing."""
        for task in list(self._tasks):
            task.cancel()
        await self._batches.close()
        await self._disconnect_idle()
        for client in (self._client, self._blocking, self._scripts):
            await client.aclose()
            await client.connection_pool.disconnect()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CANCEL_GRACE_S)

    async def check_server(self) -> None:
        """Look whether the server can keep the guarantees; also the readiness check.

        Raises:
            ConfigError: older than 7.0, an eviction policy other than ``noeviction``, less durable than the settings
                ask for, or refused credentials.
            StoreUnavailableError: away, or a replica.
        """
        look = self._persist(lambda: self._client.info("server", "memory", "replication", "persistence"))
        info: Mapping[str, Any] = await self.interruptible(look)
        version = str(info.get("redis_version", ""))
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < _MIN_VERSION:
            raise ConfigError(f"the Redis server has version {version or 'unknown'}; Kev needs 7.0 or newer")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"the Redis server may evict keys (maxmemory-policy {policy}) and so lose accepted questions; "
                "set maxmemory-policy noeviction"
            )
        if info.get("role") == "slave":
            raise StoreUnavailableError("the Redis server is a read-only replica; connect to its primary")
        if self.settings.durability is not Durability.MEMORY:
            await self._check_durability(has_aof=info.get("aof_enabled") == 1)

    async def _check_durability(self, *, has_aof: bool) -> None:
        asked = f"and cluster.durability is {self.settings.durability}"
        if not has_aof:
            raise ConfigError(f"the Redis server keeps nothing when it crashes, {asked}; set its appendonly to yes")
        if self.settings.durability is Durability.AOF:
            return
        look = self._persist(lambda: self._client.config_get("appendfsync"))
        try:
            sync = (await self.interruptible(look)).get("appendfsync", "")
        except InvariantError:
            raise ConfigError(
                f"the Redis server does not say when it syncs its file, {asked}; allow CONFIG GET, or ask for aof"
            ) from None
        if sync != "always":
            raise ConfigError(
                f"the Redis server may lose its last writes when it crashes (appendfsync {sync}), {asked}; "
                "set its appendfsync to always, or ask for aof"
            )

    # ---- calls

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """Run a script, again while the store is away; see ``ScriptRunner``.

        Raises:
            StoreUnavailableError: away for ``patience_s``, or out of memory.
            ConfigError: the credentials are refused.
        """
        return await self._persist(lambda: self._evaluate(script, arguments))

    async def unbroken(self, call: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]] | None = None) -> T:
        """Await a call that a cancellation must not cut in half.

        Args:
            call: runs as a task of its own; after a cancellation it is waited for, and sends nothing more.
            undo: takes the result back when its caller was cancelled and will never see it.
        """
        mark = _Call(asyncio.Event())
        task = self._spawn(_marked(call, mark))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            mark.abandoned.set()
            rest = task if undo is None else self._spawn(_undone(task, undo))
            await asyncio.wait([rest], timeout=_CANCEL_GRACE_S)
            raise

    async def interruptible(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call that takes nothing; a cancellation does not wait for it.

        The call is cancelled too, but as a task of its own: redis-py may swallow a cancellation, and the caller must
        not live on because of that.
        """
        task = self._spawn(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    # ---- blocking reads

    async def last_ids(self, streams: list[str]) -> dict[str, str]:
        """The id of each stream's last entry.

        Raises:
            StoreUnavailableError: the store is away.
        """
        found = {}
        for stream in streams:
            last = await self._once(partial(self._blocking.xrevrange, stream, count=1))
            found[stream] = last[0][0].decode() if last else "0-0"
        return found

    async def wait_for_entries(self, positions: Mapping[str, str]) -> dict[str, str]:
        """Block until a stream has entries after its position; new positions of those that have.

        Raises:
            StoreUnavailableError: the store is away.
        """
        block_ms = int(self.settings.block_s * 1000)
        command: tuple[Argument, ...] = (
            "XREAD",
            "COUNT",
            1000,
            "BLOCK",
            block_ms,
            "STREAMS",
            *positions,
            *positions.values(),
        )
        reply = await self._once(lambda: _execute(self._blocking, *command))
        streams: list[tuple[bytes, list[Any]]] = list(reply.items() if isinstance(reply, dict) else reply or ())
        return {name.decode(): _last_id(entries) for name, entries in streams}

    async def entries_after(self, stream: str, position: str, max_entries: int, wait_s: float) -> list[EventEntry]:
        """The entries of an event stream after a position; blocks up to ``wait_s`` seconds for the first one.

        Raises:
            StoreUnavailableError: the store is away.
        """
        block_ms = max(1, int(min(wait_s, self.settings.block_s) * 1000))
        command = ("XREAD", "COUNT", max_entries, "BLOCK", block_ms, "STREAMS", stream, position)
        reply = await self._once(lambda: _execute(self._blocking, *command))
        streams: list[tuple[bytes, list[Any]]] = list(reply.items() if isinstance(reply, dict) else reply or ())
        return [event_entry(entry_id, fields or {}) for _, entries in streams for entry_id, fields in entries]

    # ---- inside

    async def _evaluate(self, script: Script, arguments: tuple[Argument, ...]) -> Any:
        prefix = self.keys.prefix
        try:
            return await self._batches.call(("EVALSHA", script.sha, 1, prefix, *arguments))
        except failures.NoScriptError:
            return await self._batches.call(("EVAL", script.source, 1, prefix, *arguments))

    async def _exchange(self, commands: Sequence[Command]) -> Sequence[object]:
        """Send commands over a connection of the lanes' own: no pool, no wrappers, one limit of time."""
        connection = self._idle.pop() if self._idle else self._new_connection()
        loop, limit_s = asyncio.get_running_loop(), self.settings.socket_timeout_s
        replies = []
        try:
            async with asyncio.timeout(limit_s) as scope:
                await connection.connect()  # does nothing when it is
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                for _ in commands:
                    scope.reschedule(loop.time() + limit_s)
                    replies.append(await _reply_of(connection))
        except BaseException:
            # Replies that are still to come must not become another call's.
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        return replies

    def _new_connection(self) -> Any:
        return self._scripts.connection_pool.make_connection()  # type: ignore[no-untyped-call]

    async def _disconnect_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def _once(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await attempt()
        except _REFUSED as error:
            raise ConfigError(f"the Redis server refuses Kev's credentials: {error}") from error
        except failures.OutOfMemoryError as error:
            raise StoreFullError("the Redis server has no memory left; try again later") from error
        except _PASSING as error:
            if isinstance(error, failures.ReadOnlyError):
                # A connection to a former primary stays read-only; a new one may reach its successor.
                await self._client.connection_pool.disconnect(inuse_connections=False)
                await self._disconnect_idle()
            raise StoreUnavailableError(f"the Redis server cannot be used now ({type(error).__name__})") from error
        except failures.ResponseError as error:
            if str(error).startswith(_PASSING_CODES):
                raise StoreUnavailableError(f"the Redis server cannot be used now ({error})") from error
            raise InvariantError(f"Redis refused a command of Kev's own: {error}") from error

    async def _persist(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        call = _current_call.get()
        gives_up_at_s = loop.time() + self.settings.patience_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                reply = await self._once(attempt)
                self._outage.worked()
                return reply
            except StoreUnavailableError as error:
                left_s = gives_up_at_s - loop.time()
                if left_s <= 0 or isinstance(error, StoreFullError) or _is_abandoned(call):
                    raise
                self._outage.failed(f"{error}; trying again")
                await _pause(min(self._random.uniform(0, backoff_s), left_s), call)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                if _is_abandoned(call):
                    raise

    def _spawn(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Its caller may be gone; then nobody else looks at it.


def _make_client(settings: LinkSettings, socket_timeout_s: float | None, max_connections: int) -> aioredis.Redis:
    pool = BlockingConnectionPool.from_url(
        settings.url,
        max_connections=max_connections,
        timeout=settings.patience_s,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=min(2.0, settings.socket_timeout_s),
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        protocol=2,
    )
    return aioredis.Redis.from_pool(pool)


async def _execute(client: aioredis.Redis, *command: Argument) -> Any:
    return await client.execute_command(*command)  # type: ignore[no-untyped-call]


async def _reply_of(connection: Any) -> object:
    try:
        return await connection.read_response()
    except failures.ResponseError as error:
        return error


async def _marked(call: Coroutine[Any, Any, T], mark: _Call) -> T:
    _current_call.set(mark)
    return await call


async def _undone(task: asyncio.Task[T], undo: Callable[[T], Awaitable[object]]) -> None:
    try:
        result = await task
    except StoreUnavailableError:
        return
    await undo(result)


def _is_abandoned(call: _Call | None) -> bool:
    return call is not None and call.abandoned.is_set()


async def _pause(pause_s: float, call: _Call | None) -> None:
    if call is None:
        await asyncio.sleep(pause_s)
        return
    try:
        async with asyncio.timeout(pause_s):
            await call.abandoned.wait()
    except TimeoutError:
        pass


def _last_id(entries: list[Any]) -> str:
    entry_id: bytes = entries[-1][0]
    return entry_id.decode()
