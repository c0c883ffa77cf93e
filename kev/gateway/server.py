"""Running the gateway: listen, load, drain, close.

Invariants and semantics: the port answers from the start; ``/ready`` turns 200 when the backend is there. On the order
to stop the gateway is not ready at once and refuses new requests, goes on listening (so liveness stays green) until
the open exchanges have ended or the grace period is over, ends what is left with an error, and closes the backend.
Background requests that nobody waits for end with the process.

Not here: routes (``gateway.app``), which backend it is (the caller's ``open_backend``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from common.errors import ConfigError
from common.telemetry import Telemetry
from kev.gateway.app import Gateway
from kev.gateway.backend import Backend
from kev.gateway.settings import GatewaySettings

_FAREWELL_S = 2
"""After the grace period, exchanges have this long to send their last words."""
_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """What the caller wants to be told, and how it tells the server to stop."""

    on_listening: Callable[[str], None] = lambda url: None
    """The port answers; called with the URL."""
    on_ready: Callable[[], None] = lambda: None
    """Requests are answered."""
    on_draining: Callable[[], None] = lambda: None
    """The order to stop has come."""
    stop: asyncio.Event | None = None
    """Set it to stop. None: SIGTERM and SIGINT stop, a second one ends the grace period."""


class _QuietServer(uvicorn.Server):
    """Uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


async def serve(
    open_backend: Callable[[], Awaitable[Backend]],
    host: str,
    port: int,
    settings: GatewaySettings | None = None,
    lifecycle: Lifecycle | None = None,
    telemetry: Telemetry | None = None,
) -> None:
    """Serve until told to stop; port 0 picks a free one.

    Raises:
        ConfigError: the address cannot be bound.
        KevError: whatever ``open_backend`` raises; the server has stopped by then.
    """
    settings = settings or GatewaySettings()
    lifecycle = lifecycle or Lifecycle()
    gateway = Gateway(settings, telemetry)
    with contextlib.closing(_bind(host, port)) as listener:
        async with _listening(gateway, listener) as server, _stop_event(lifecycle.stop) as stop:
            lifecycle.on_listening(_url(listener))
            opening = asyncio.ensure_future(open_backend())
            try:
                if await _first(opening, stop):
                    gateway.attach(opening.result())
                    lifecycle.on_ready()
                    await stop.wait()
                lifecycle.on_draining()
                await _drain(gateway, server, settings.drain_grace_s, stop)
            finally:
                await _close(opening)


async def _first(opening: asyncio.Future[Backend], stop: asyncio.Event) -> bool:
    """True when the backend is open (or failed to), False when the order to stop came first."""
    stopping = asyncio.create_task(stop.wait())
    watched: set[asyncio.Future[Any]] = {opening, stopping}
    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return opening.done()


async def _drain(gateway: Gateway, server: uvicorn.Server, grace_s: float, stop: asyncio.Event) -> None:
    gateway.begin_drain()
    stop.clear()  # a second order ends the grace period
    try:
        async with asyncio.timeout(grace_s):
            while server.server_state.tasks and not stop.is_set():
                await asyncio.sleep(_TICK_S)
    except TimeoutError:
        pass
    gateway.stop.set()


async def _close(opening: asyncio.Future[Backend]) -> None:
    if not opening.done():
        opening.cancel()
        await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()


@contextlib.asynccontextmanager
async def _listening(gateway: Gateway, listener: socket.socket) -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(
        gateway.build_app(),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_FAREWELL_S,
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0)
        yield server
    finally:
        gateway.stop.set()
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def _stop_event(given: asyncio.Event | None) -> AsyncIterator[asyncio.Event]:
    if given is not None:
        yield given
        return
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port") from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
