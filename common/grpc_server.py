"""One gRPC server with everything around the methods: health, reflection, errors, keys, TLS, limits, drain.

Invariants and semantics: the port is bound by ``start`` and health tells NOT_SERVING of every service until
``set_serving``; of the server as a whole (the empty name) it tells SERVING for as long as it can be asked: a process
that waits for others, or drains, is alive. ``drain`` is the way to stop: NOT_SERVING at once, new calls refused with
NODE_DRAINING, calls that run go on until they end or the grace period does. With API keys configured, reflection needs
one too.

Not here: what the services do (servicers), options of both ends (``common.grpc_options``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.api_keys import ApiKeys
from common.errors import ConfigError
from common.grpc_interceptors import Admission, CallGuard, CallWatcher
from common.grpc_options import DEFAULT_MAX_MESSAGE_BYTES, server_credentials, server_options
from common.tls_files import TlsFiles

_aio_health: Any = health.aio  # type: ignore[attr-defined]  # the stubs lack it

_FAREWELL_S = 1.0
"""After the grace period calls have this long to send their last status."""


class Servicer(Protocol):
    """A service that can be put on a server."""

    operators_only: bool
    """Whether keys of tenants do not reach it."""

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register the methods; returns the full name of the service."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcServerSettings:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    """Largest message in either direction."""
    max_connection_age_s: float = 300.0
    """Connections are renewed after this time, so that clients find new servers."""
    default_deadline_s: float = 600.0
    """Of calls that come without one."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    api_keys_file: str = ""
    """YAML mapping from key to tenant; empty: anybody may call."""
    reflection: bool = True
    """Whether clients may ask for services and messages."""


class GrpcServer:
    """A server for some servicers, for one event loop."""

    def __init__(
        self, settings: GrpcServerSettings, servicers: Sequence[Servicer], watcher: CallWatcher | None = None
    ) -> None:
        """Prepare the server; nothing listens before ``start``.

        Args:
            settings: where and how it listens.
            servicers: what it serves.
            watcher: is told of every call, health excepted.

        Raises:
            ConfigError: certificates or keys cannot be read.
        """
        self._settings = settings
        self._servicers = tuple(servicers)
        self._watcher = watcher
        self._keys = ApiKeys.from_file(settings.api_keys_file)
        self._credentials = server_credentials(settings.tls)
        self._admission = Admission()
        self._health = _aio_health.HealthServicer()
        self._names: tuple[str, ...] = ()
        self._draining = False
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Bind and listen, not serving yet; returns the port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        settings = self._settings
        operator_services: set[str] = set()
        server = grpc.aio.server(
            interceptors=[
                CallGuard(
                    keys=self._keys,
                    operator_services=operator_services,
                    admission=self._admission,
                    default_deadline_s=settings.default_deadline_s,
                    watcher=self._watcher,
                )
            ],
            options=server_options(settings.max_message_bytes, settings.max_connection_age_s),
        )
        names = []
        for servicer in self._servicers:
            names.append(servicer.add_to(server))
            if servicer.operators_only:
                operator_services.add(names[-1])
        self._names = tuple(names)
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if settings.reflection:
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        port = self._bind(server)
        await server.start()
        self._server = server
        return port

    async def set_serving(self, serving: bool) -> None:
        """Tell health whether calls would be answered now; without effect once the drain has begun."""
        status = health_pb2.HealthCheckResponse
        for name in () if self._draining else self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs end within ``grace_s`` seconds, stop."""
        if self._server is None:
            return
        await self.set_serving(False)
        self._draining = True
        self._admission.begin_drain()
        await self._admission.wait_idle(grace_s)
        await self._server.stop(_FAREWELL_S)

    async def kill(self) -> None:
        """Stop now; calls that run are cut off."""
        if self._server is not None:
            await self._server.stop(None)

    def _bind(self, server: grpc.aio.Server) -> int:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        address = f"{host}:{self._settings.port}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None
        if not port:
            raise ConfigError(f"cannot listen on {address}")
        return port
