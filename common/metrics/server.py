"""The port on which a service can be asked for its metrics.

Invariants and semantics: ``GET /metrics`` answers in Prometheus' text format, everything else 404. The port is the
process's own, apart from its calls: it answers while the service drains and stops with the process. No key is asked
for; who may reach it is the network's business.

Not here: the values (``registry``), the gateway's own route (``kev.gateway``).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from common.errors import ConfigError
from common.metrics.registry import CONTENT_TYPE, Metrics

_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _QuietServer(uvicorn.Server):
    """Uvicorn, which leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


@contextlib.asynccontextmanager
async def serve_metrics(metrics: Metrics, host: str, port: int) -> AsyncIterator[int]:
    """Answer on ``host:port`` for as long as the context is open; yields the port (0 picked a free one).

    Raises:
        ConfigError: the address cannot be bound.
    """
    with contextlib.closing(_bind(host, port)) as listener:
        server = _QuietServer(
            uvicorn.Config(
                _app(metrics),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=16,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="kev-metrics")
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0)
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


def _app(metrics: Metrics) -> Callable[..., Awaitable[None]]:
    async def answer(scope: MutableMapping[str, Any], _: object, send: _Send) -> None:
        found = scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD")
        body = await metrics.render() if found else b"see GET /metrics\n"
        content_type = CONTENT_TYPE if found else "text/plain; charset=utf-8"
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200 if found else 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return answer


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port} for metrics ({reason}); choose another observability.metrics_port"
        ) from None
