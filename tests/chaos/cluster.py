"""A whole cluster of real processes on loopback, with a fault proxy at every joint.

Invariants and semantics: one ``kev.yaml`` for all; processes of one kind differ by environment variables only, and
are started by the commands that ``kev up`` and the deployment files use. With ``proxied`` each process reaches Redis
through a proxy of its own (``links``), and clients reach routers and aggregators through ``doors``; bytes then pass
through the test's event loop, so figures are measured without. Nodes answer from a script: each answer is its question.

Not here: what is done to it (the tests), what is asked (``workload``).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from common.codec import open_envelope
from common.redis_keys import EVENTS, RedisKeys
from common.types import ChannelResult, ChannelStarted, Durability
from kev.client import AsyncClient
from kev.testing import EOS_ID, VOCAB_SIZE, save_byte_tokenizer
from kev.up.commands import HEALTH_SERVICES, Role, commands
from tests.chaos.checker import ANSWERS
from tests.chaos.history import Committed, Granted, History
from tests.chaos.processes import ServiceProcess, grpc_serving, http_ready
from tests.chaos.proxy import FaultProxy
from tests.chaos.redis_server import RedisServer
from tests.ports import free_port

_PORTS = {Role.ROUTER: "ROUTER_PORT", Role.AGGREGATOR: "AGGREGATOR_PORT", Role.INFERENCE: "INFERENCE_PORT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What the cluster consists of."""

    num_nodes: int = 2
    num_routers: int = 1
    num_aggregators: int = 1
    gateway: bool = False
    proxied: bool = True
    redis: str = "valkey"
    durability: Durability = Durability.AOF
    """What Redis keeps when it is killed; ``aof`` may lose a second or two when the disk is busy."""
    name: str = "chaos"
    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of ``kev.yaml``, over the ones below."""

    def config(self) -> dict[str, dict[str, object]]:
        """Sections of ``kev.yaml``, addresses left out: short leases, small pool, no model."""
        sections: dict[str, dict[str, object]] = {
            "deploy": {"mode": "distributed", "workers": self.num_nodes},
            "router": {"max_parallel_queries": 8, "channel_pool_size": 16, "normalize": "off"},
            "core": {"max_tokens": 256, "prompt_template": "{question}", "prompt_stop": []},
            "aggregator": {"timeout_ms": 30_000, "result_ttl_s": 600, "max_requests": 100_000},
            "cluster": {
                "name": self.name,
                "durability": self.durability.value,
                "node_engine": "scripted",
                "lease_timeout_s": 2.0,
                "max_attempts": 3,
                "drain_grace_s": 10.0,
            },
            "debug": {"log_level": "info"},
        }
        for name, values in self.sections.items():
            sections[name] = sections.get(name, {}) | dict(values)
        return sections


class Cluster:
    """One deployment; use it as a context manager.

    Attributes:
        redis: the server.
        routers: processes, by number.
        aggregators: processes, by number.
        nodes: processes, by number.
        gateway: the HTTP process, if there is one.
        links: proxies between a process and Redis, by the process's name; empty when not ``proxied``.
        doors: proxies between clients and a router or aggregator, by its name; empty when not ``proxied``.
    """

    def __init__(self, folder: Path, settings: ClusterSettings | None = None) -> None:
        self.settings = settings or ClusterSettings()
        self.redis = RedisServer(folder, self.settings.redis, durability=self.settings.durability)
        self.routers: list[ServiceProcess] = []
        self.aggregators: list[ServiceProcess] = []
        self.nodes: list[ServiceProcess] = []
        self.gateway: ServiceProcess | None = None
        self.links: dict[str, FaultProxy] = {}
        self.doors: dict[str, FaultProxy] = {}
        self._folder = folder
        self._ports: dict[str, int] = {}
        self._stack = AsyncExitStack()
        self._config_path = folder / "kev.yaml"

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self.redis)
            await self._lay_out()
            # Side by side: most of a start is imports.
            await asyncio.gather(*(self._stack.enter_async_context(process) for process in self.services))
            if self.gateway is not None:
                await self._stack.enter_async_context(self.gateway)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def services(self) -> list[ServiceProcess]:
        """Every process of Kev's three tiers."""
        return [*self.aggregators, *self.routers, *self.nodes]

    @property
    def gateway_url(self) -> str:
        """Where HTTP listens."""
        return f"http://127.0.0.1:{self._ports['gateway-0']}"

    @asynccontextmanager
    async def client(self, *, patience_s: float = 10.0) -> AsyncIterator[AsyncClient]:
        """A client of all routers and all aggregators, as of a name with several addresses."""
        routers, aggregators = (self._addresses(services) for services in (self.routers, self.aggregators))
        async with AsyncClient(routers, aggregators, patience_s=patience_s) as client:
            yield client

    def _addresses(self, services: list[ServiceProcess]) -> str:
        return "ipv4:" + ",".join(self.address(service.name) for service in services)

    async def note_attempts(self, history: History, request_ids: Iterable[str] | None = None) -> None:
        """Add what the store's own record says about attempts and commits of some requests; None: of all it knows."""
        keys = RedisKeys(self.settings.name)
        async with self.redis.client() as client:
            if request_ids is None:
                streams = [key async for key in client.scan_iter(match=keys.name(EVENTS, "*"))]
            else:
                streams = [keys.name(EVENTS, request_id).encode() for request_id in sorted(request_ids)]
            for stream in streams:
                for _, fields in await client.xrange(stream):
                    self._note_attempt(history, fields.get(b"e", b""))

    def _note_attempt(self, history: History, envelope: bytes) -> None:
        event, _ = open_envelope(envelope)
        if isinstance(event, ChannelStarted):
            history.add(
                Granted(request_id=event.request_id, question_index=event.question_index, attempt=event.attempt)
            )
        elif isinstance(event, ChannelResult) and event.finish_reason in ANSWERS:
            history.add(
                Committed(
                    request_id=event.request_id,
                    question_index=event.question_index,
                    attempt=event.attempt,
                    text=event.text,
                )
            )

    async def until_idle(self, timeout_s: float = 20.0) -> None:
        """Return when no channel, no node and no lease holds anything.

        Raises:
            AssertionError: something is still held: a slot, a place or a lease has leaked.
        """
        async with self.client() as client:
            await until(lambda: self._is_idle(client), timeout_s, "the cluster to be idle")

    async def _is_idle(self, client: AsyncClient) -> bool:
        stats = await client.stats()
        queued = sum(channel.num_queued for channel in await client.channels())
        return not any((queued, stats.router.num_overflow, stats.node.num_running, stats.node.num_waiting))

    def address(self, name: str) -> str:
        """Where clients reach a router or aggregator."""
        return f"127.0.0.1:{self._door(name)}"

    def _door(self, name: str) -> int:
        return self.doors[name].port if name in self.doors else self._ports[name]

    async def _lay_out(self) -> None:
        settings = self.settings
        model = self._folder / "model"
        model.mkdir()
        save_byte_tokenizer(model)
        (model / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "vocab_size": VOCAB_SIZE}))
        counts = {
            Role.AGGREGATOR: settings.num_aggregators,
            Role.ROUTER: settings.num_routers,
            Role.INFERENCE: settings.num_nodes,
            Role.GATEWAY: int(settings.gateway),
        }
        for role, number in counts.items():
            self._ports.update({f"{role}-{i}": free_port() for i in range(number)})
        if settings.proxied:
            await self._set_up_proxies()
        self._write_config()
        self.aggregators = self._processes(Role.AGGREGATOR, counts)
        self.routers = self._processes(Role.ROUTER, counts)
        self.nodes = self._processes(Role.INFERENCE, counts)
        self.gateway = next(iter(self._processes(Role.GATEWAY, counts)), None)

    async def _set_up_proxies(self) -> None:
        for name, port in self._ports.items():
            if not name.startswith(Role.GATEWAY):
                self.links[name] = await self._stack.enter_async_context(FaultProxy(self.redis.port))
            if name.startswith((Role.ROUTER, Role.AGGREGATOR)):
                self.doors[name] = await self._stack.enter_async_context(FaultProxy(port))

    def _write_config(self) -> None:
        sections = self.settings.config()
        sections["core"] |= {"model_path": str(self._folder / "model")}
        sections["cluster"] |= {
            "redis_url": self.redis.url,
            "router_address": f"127.0.0.1:{self._ports['router-0']}",
            "aggregator_address": f"127.0.0.1:{self._ports['aggregator-0']}",
        }
        self._config_path.write_text(yaml.safe_dump({"kev": sections}), encoding="utf-8")

    def _processes(self, role: Role, counts: Mapping[Role, int]) -> list[ServiceProcess]:
        return [self._process(role, f"{role}-{number}") for number in range(counts[role])]

    def _process(self, role: Role, name: str) -> ServiceProcess:
        port = self._ports[name]
        env = {"KEV__SERVER__PORT": str(port)} if role is Role.GATEWAY else {f"KEV__CLUSTER__{_PORTS[role]}": str(port)}
        if name in self.links:
            env["KEV__CLUSTER__REDIS_URL"] = f"redis://127.0.0.1:{self.links[name].port}/0"
        health = http_ready(port) if role is Role.GATEWAY else grpc_serving(port, HEALTH_SERVICES[role])
        command = commands(str(self._config_path), sys.executable)[role]
        root = str(Path(__file__).resolve().parents[2])
        return ServiceProcess(name, command, self._folder, health, env | {"PYTHONPATH": root})


async def until(condition: Callable[[], Awaitable[object]], timeout_s: float, what: str) -> float:
    """Wait until the condition holds; the seconds that it took.

    Raises:
        AssertionError: it does not hold in time.
    """
    begin_s = time.monotonic()
    while not await condition():
        if time.monotonic() - begin_s > timeout_s:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - begin_s
