"""A deployment of Kev at the other end of a network: the methods of ``AsyncEngine`` over gRPC.

Invariants and semantics: the same methods, the same answers and the same errors as ``kev.AsyncEngine``. Connections
are made by the first call, shared by all calls, spread over every address of a name, and made again when they break;
a stream then goes on where it stood, without gaps or repeats, and a submission that is sent again joins itself. A
call fails with ``ServiceUnavailableError`` when nobody answered for ``patience_s``. An ``AsyncClient`` belongs to the
event loop that first used it.

Not here: what is checked and what is answered (router and aggregator), the calls (``common.grpc_router``,
``common.grpc_aggregator``).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from common.api_keys import read_key
from common.config import Config
from common.errors import EngineDeadError, KevError, RequestNotFoundError
from common.grpc_aggregator import SERVICE as AGGREGATOR_SERVICE
from common.grpc_aggregator import AggregatorCalls
from common.grpc_calls import Peer, PeerSettings
from common.grpc_options import DEFAULT_MAX_MESSAGE_BYTES
from common.grpc_router import SERVICE as ROUTER_SERVICE
from common.grpc_router import RouterCalls
from common.tls_files import TlsFiles
from common.types import ChannelSnapshot, EngineStats, IsolationReport, RequestView, Result, StreamEvent
from kev.blocking import Blocking

_LAST_WORDS_S = 2.0
"""How long ``close`` waits for withdrawals that are on their way."""

_LATE_S = (0.3, 1.0)
"""A submission, cancelled on its way, may reach the router later than its withdrawal the aggregator; then once more."""

_log = logging.getLogger("kev.client")


@dataclass(frozen=True, slots=True)
class _Connections:
    router_peer: Peer
    aggregator_peer: Peer
    router: RouterCalls
    aggregator: AggregatorCalls


class AsyncClient:
    """A remote Kev, for asyncio."""

    def __init__(
        self,
        router: str,
        aggregator: str | None = None,
        *,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        patience_s: float = 10.0,
    ) -> None:
        """Remember where Kev is; nothing is connected before the first call.

        Args:
            router: ``host:port`` of the routers.
            aggregator: ``host:port`` of the aggregators; None when they are at the same address.
            api_key: what the deployment knows the caller by.
            tls: certificate files; None is plaintext.
            max_message_bytes: the deployment's ``cluster.max_message_bytes``.
            patience_s: how long a call is tried again while nobody answers.
        """
        settings = PeerSettings(
            target=router,
            api_key=api_key or "",
            tls=tls,
            max_message_bytes=max_message_bytes,
            patience_s=patience_s,
        )
        self._router_settings = settings
        self._aggregator_settings = replace(settings, target=aggregator or router)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: _Connections | None = None
        self._withdrawals: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(self, queries: Any, /, **options: Any) -> str:
        """Accept independent questions; returns the request id. Arguments and errors as ``AsyncEngine.submit``.

        Raises:
            ServiceUnavailableError: no router answers.
        """
        router, is_ours = self._connected().router, options.get("request_id") is None
        if is_ours:
            options["request_id"] = uuid.uuid4().hex
        try:
            return await router.submit(queries, options, has_new_id=is_ours)
        except asyncio.CancelledError:
            if is_ours:  # accepted, perhaps, with the answer on its way; under an id of the caller's, by others too
                self._withdraw(options["request_id"])
            raise

    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        """All results; waits at most ``timeout`` seconds. See ``AsyncEngine.wait``."""
        view = await self._connected().aggregator.wait(request_id, timeout)
        return list(view.results)

    async def poll(self, request_id: str) -> RequestView:
        """The request as it stands. See ``AsyncEngine.poll``."""
        return await self._connected().aggregator.poll(request_id)

    async def ask(self, queries: Any, /, **options: Any) -> list[Result]:
        """Submit and wait; a cancelled call withdraws its questions. See ``AsyncEngine.ask``."""
        request_id = options.get("request_id")
        try:
            request_id = await self.submit(queries, **options)
            return await self.wait(request_id)
        except asyncio.CancelledError:
            if request_id is not None:
                self._withdraw(request_id)
            raise

    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        """Events of a request from an index on; goes on by itself after a broken connection.

        See ``AsyncEngine.stream``.
        """
        events = self._connected().aggregator.stream(request_id, from_event_index)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def cancel(self, request_id: str) -> int:
        """Withdraw the questions without an outcome. See ``AsyncEngine.cancel``."""
        return await self._connected().aggregator.cancel(request_id)

    async def isolation(self) -> IsolationReport:
        """What isolation every node of the deployment can promise."""
        return await self._connected().router.isolation()

    async def channels(self) -> list[ChannelSnapshot]:
        """The channel pool of the router that answers."""
        return await self._connected().router.channels()

    async def stats(self) -> EngineStats:
        """Counters of the router that answers, and of all nodes together."""
        return await self._connected().router.stats()

    async def ready(self) -> None:
        """Return if requests would be answered now.

        Raises:
            DrainingError: a service starts or shuts down.
            ServiceUnavailableError: a service cannot be reached.
        """
        connections = self._connected()
        await connections.router_peer.check_serving(ROUTER_SERVICE)
        await connections.aggregator_peer.check_serving(AGGREGATOR_SERVICE)

    async def close(self) -> None:
        """Close the connections; requests go on. A second call does nothing."""
        if self._closed:
            return
        if self._withdrawals and self._loop is asyncio.get_running_loop():
            await asyncio.wait(self._withdrawals, timeout=_LAST_WORDS_S)
        self._closed = True
        if self._connections is not None and self._loop is asyncio.get_running_loop():
            await self._connections.router_peer.close()
            await self._connections.aggregator_peer.close()

    def _withdraw(self, request_id: str) -> None:
        """Cancel in a task of its own: the caller's is being cancelled, and may be once more."""
        if not self._closed:
            task = asyncio.create_task(self._cancel_quietly(request_id))
            self._withdrawals.add(task)
            task.add_done_callback(self._withdrawals.discard)

    async def _cancel_quietly(self, request_id: str) -> None:
        for pause_s in (0.0, *_LATE_S):
            await asyncio.sleep(pause_s)
            try:
                await self.cancel(request_id)
                return
            except RequestNotFoundError:
                # Never accepted, or its submission, which takes another way, arrives after this.
                continue
            except KevError as error:
                _log.debug("request %s could not be withdrawn: %s", request_id, error)
                return

    def _connected(self) -> _Connections:
        """The connections, prepared on the running loop at the first use."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineDeadError("the client is closed; open a new one")
        if self._connections is None:
            self._loop = loop
            router, aggregator = Peer(self._router_settings), Peer(self._aggregator_settings)
            self._connections = _Connections(router, aggregator, RouterCalls(router), AggregatorCalls(aggregator))
        elif self._loop is not loop:
            raise EngineDeadError(
                "this AsyncClient belongs to another event loop; use kev.Client or one client per loop"
            )
        return self._connections


class Client(Blocking):
    """A remote Kev, for ordinary code: the methods of ``AsyncClient``, blocking. May be used from any thread."""

    _kind = "client"

    def __init__(
        self,
        router: str,
        aggregator: str | None = None,
        *,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        patience_s: float = 10.0,
    ) -> None:
        """Remember where Kev is; arguments as ``AsyncClient``."""
        super().__init__(
            AsyncClient(
                router,
                aggregator,
                api_key=api_key,
                tls=tls,
                max_message_bytes=max_message_bytes,
                patience_s=patience_s,
            )
        )


def client_of(config: Config, *, patience_s: float = 10.0) -> AsyncClient:
    """The client of a deployment as its own gateway: addresses, key and certificates from ``kev.cluster``.

    Raises:
        ConfigError: a file cannot be read.
    """
    cluster = config.cluster
    files = TlsFiles(cert_file=cluster.tls_cert_file, key_file=cluster.tls_key_file, ca_file=cluster.tls_ca_file)
    return AsyncClient(
        cluster.router_address,
        cluster.aggregator_address,
        api_key=read_key(cluster.api_key_file),
        tls=files if cluster.tls_ca_file else None,
        max_message_bytes=cluster.max_message_bytes,
        patience_s=patience_s,
    )
