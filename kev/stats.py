"""``kev stats``: channels, queues, breakers and heat of a running Kev, once or again and again.

Invariants and semantics: reads only, over the same surfaces as everybody: HTTP (``/v1/channels``, ``/v1/stats``) or
the router's gRPC. What an older server does not tell is shown as nothing. While watching, a server that is away for a
moment is said so and asked again.

Not here: the picture (``kev.stats_view``), the numbers themselves (the router).
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from common.config import Config
from common.config_sections import DeployMode
from common.errors import InvalidRequestError, KevError, ServiceUnavailableError
from common.types import ChannelSnapshot, EngineStats

_HTTP_TIMEOUT_S = 10.0
_PATIENCE_S = 2.0

_CHANNELS = TypeAdapter(list[ChannelSnapshot])
_STATS = TypeAdapter(EngineStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A running Kev at one moment."""

    channels: list[ChannelSnapshot]
    stats: EngineStats


class Source(Protocol):
    """Where pictures come from."""

    async def read(self) -> Picture:
        """Kev as it is now.

        Raises:
            KevError: it cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Close what is open."""
        ...


class HttpSource:
    """A gateway, or ``kev serve``."""

    def __init__(self, url: str) -> None:
        """``url`` is scheme and address, as of ``kev serve``."""
        self._url = url.rstrip("/")

    async def read(self) -> Picture:
        """Kev as it is now; see ``Source``."""
        channels, stats = await asyncio.gather(self._get("/v1/channels"), self._get("/v1/stats"))
        try:
            return Picture(channels=_CHANNELS.validate_json(channels), stats=_STATS.validate_python(_by_pairs(stats)))
        except (ValidationError, ValueError, LookupError, TypeError):
            raise ServiceUnavailableError(f"what answers at {self._url} is not Kev, or another version of it") from None

    async def close(self) -> None:
        """Nothing is open."""

    async def _get(self, path: str) -> bytes:
        return await asyncio.to_thread(self._fetch, self._url + path)

    def _fetch(self, url: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            raise ServiceUnavailableError(f"{url} answers {error.code}: {_message(error.read())}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServiceUnavailableError(
                f"nobody answers at {self._url} ({reason}); start kev serve, or name where Kev is: "
                "kev stats http://HOST:PORT, or HOST:PORT of a router"
            ) from None


class GrpcSource:
    """A deployment's router."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    async def read(self) -> Picture:
        """Kev as it is now; see ``Source``."""
        channels, stats = await asyncio.gather(self._client.channels(), self._client.stats())
        return Picture(channels=channels, stats=stats)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class _Client(Protocol):
    async def channels(self) -> list[ChannelSnapshot]: ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


def open_source(target: str, config: Config) -> Source:
    """Where to ask.

    Args:
        target: URL of a gateway, ``host:port`` of a router, or empty for what the configuration says.
        config: says where Kev is, and with which key its router is asked.

    Raises:
        InvalidRequestError: the target is neither.
        ConfigError: a file with a key cannot be read.
    """
    if target.startswith(("http://", "https://")):
        return HttpSource(target)
    if target:
        if not urlsplit(f"//{target}").hostname or ":" not in target or "/" in target:
            raise InvalidRequestError.of("target", f"must be http://HOST:PORT or HOST:PORT of a router, got {target!r}")
        cluster = config.cluster.model_copy(update={"router_address": target})
        return _grpc_source(config.model_copy(update={"cluster": cluster}))
    if config.deploy.mode is DeployMode.DISTRIBUTED:
        return _grpc_source(config)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.server.host, config.server.host)
    return HttpSource(f"http://{host}:{config.server.port}")


async def follow(source: Source, show: Callable[[Picture | KevError], None], every_s: float | None) -> None:
    """Show Kev once, or every so many seconds until cancelled.

    Raises:
        KevError: it could not be asked the first time.
    """
    try:
        show(await source.read())
        while every_s is not None:
            await asyncio.sleep(every_s)
            try:
                show(await source.read())
            except KevError as error:
                show(error)
    finally:
        await source.close()


def _grpc_source(config: Config) -> Source:
    from kev.client import client_of  # loads grpc, which a look over HTTP does not need

    return GrpcSource(client_of(config, patience_s=_PATIENCE_S))


def _by_pairs(stats: bytes) -> dict[str, object]:
    """``/v1/stats`` with the counts of buckets as ``EngineStats`` has them."""
    told: dict[str, dict[str, object]] = json.loads(stats)
    counts = told["router"]["bucket_counts"]
    if isinstance(counts, list):
        told["router"]["bucket_counts"] = [(count["hash_bucket"], count["questions"]) for count in counts]
    return dict(told)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "without saying why"
