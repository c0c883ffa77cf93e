"""What each process of a cluster is started as.

Invariants and semantics: ``kev up``, docker-compose, Kubernetes and the tests start the same argument lists; a test
compares the deployment files with this module.

Not here: in which order and with which environment (``kev.up.plan``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from common.types import Durability


class Role(StrEnum):
    """What a process does in a cluster."""

    STORE = "store"
    """Valkey or Redis."""
    AGGREGATOR = "aggregator"
    INFERENCE = "inference"
    ROUTER = "router"
    GATEWAY = "gateway"
    """HTTP."""


STORE_OPTIONS = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction")
"""Every write in a file that is synced each second, and no key ever thrown away for room."""
SYNC_ALWAYS = ("--appendfsync", "always")
"""Overrides the former for ``cluster.durability: durable``."""

HEALTH_SERVICES: Mapping[Role, str] = MappingProxyType(
    {
        Role.AGGREGATOR: "kev.v1.AggregatorService",
        Role.INFERENCE: "kev.v1.InferenceService",
        Role.ROUTER: "kev.v1.RouterService",
    }
)
"""Names that the gRPC health service answers for; the empty name says that the process lives, whatever else is away."""


def commands(config_path: str, python: str = "python") -> dict[Role, tuple[str, ...]]:
    """Argument lists of Kev's own processes.

    Args:
        config_path: the ``kev.yaml`` that all of them read.
        python: the interpreter.
    """
    return {
        Role.AGGREGATOR: (python, "-m", "aggregator_svc", "--config", config_path),
        Role.INFERENCE: (python, "-m", "inference_svc", "--config", config_path),
        Role.ROUTER: (python, "-m", "router_svc", "--config", config_path),
        Role.GATEWAY: (python, "-m", "kev.cli", "serve", "--config", config_path),
    }


def store_command(binary: str, folder: str, port: int, durability: Durability = Durability.MEMORY) -> tuple[str, ...]:
    """Argument list of a store for this machine only.

    Args:
        binary: ``valkey-server`` or ``redis-server``.
        folder: where it keeps its data; must exist.
        port: on the loopback interface.
        durability: what it must keep at least; it keeps all but the last second or two anyway.
    """
    where = ("--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--loglevel", "notice")
    return (binary, *where, *STORE_OPTIONS, *(SYNC_ALWAYS if durability is Durability.DURABLE else ()))
