"""Which processes a local cluster has, in which order they start, and the configuration they share.

Invariants and semantics: pure; the same input gives the same plan. Stages start one after the other, each when all of
the one before is healthy, and stop in the reverse order. All processes read one complete ``kev.yaml``; what differs
between inference nodes comes by environment variable.

Not here: finding free ports and the store's program (``kev.up.run``), starting anything (``kev.up.child``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config import Config, load_config
from common.tls_files import TlsFiles
from kev.up.commands import HEALTH_SERVICES, Role, commands, store_command

HOST = "127.0.0.1"
_STAGES = (Role.STORE, Role.AGGREGATOR, Role.INFERENCE, Role.ROUTER, Role.GATEWAY)
"""A request needs all that stands before its entry; stopping in reverse lets it finish."""
_STOP_MARGIN_S = 10.0
"""Beyond the grace period of a drain, for closing connections and a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """TCP ports of the cluster, on the loopback interface."""

    store: int
    aggregator: int
    router: int
    gateway: int
    inference: tuple[int, ...]
    """One per node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How to ask a process whether it is healthy; see ``common.health_check``."""

    target: str
    service: str = ""
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to run."""

    name: str
    role: Role
    stage: int
    argv: tuple[str, ...]
    port: int
    health: Health
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the environment that all processes get."""
    stop_timeout_s: float
    """After SIGTERM; then it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Everything to be run."""

    config_path: Path
    config_text: str
    processes: tuple[ProcessSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the machine offers."""

    folder: Path
    """Where the configuration, the store's data and the logs go."""
    store_binary: str
    python: str
    num_cpus: int


def plan_cluster(config: Config, ports: Ports, surroundings: Surroundings, *, no_model: bool) -> ClusterPlan:
    """The plan of a cluster with as many inference nodes as there are ports for them.

    Args:
        config: what the operator set; addresses, ports and the form of deployment are replaced.
        ports: free ones.
        surroundings: what the machine offers.
        no_model: nodes answer from a script.

    Raises:
        ConfigError: the configuration cannot be used for a cluster.
    """
    shared = _cluster_config(config, ports, surroundings, no_model=no_model)
    path = surroundings.folder / "kev.yaml"
    store = store_command(
        surroundings.store_binary, str(surroundings.folder / "store"), ports.store, config.cluster.durability
    )
    argv = {Role.STORE: store, **commands(str(path), surroundings.python)}
    specs: list[ProcessSpec] = []
    for stage, role in enumerate(_STAGES):
        role_ports = ports.inference if role is Role.INFERENCE else (_port(ports, role),)
        for index, port in enumerate(role_ports):
            is_node = role is Role.INFERENCE
            spec = ProcessSpec(
                name=f"{role}-{index}" if is_node else role.value,
                role=role,
                stage=stage,
                argv=argv[role],
                port=port,
                health=_health(shared, role, port),
                env=_own_env(shared, role, port, num_services=sum(spec.role in HEALTH_SERVICES for spec in specs)),
                stop_timeout_s=shared.cluster.drain_grace_s + _STOP_MARGIN_S,
            )
            specs.append(spec)
    return ClusterPlan(config_path=path, config_text=shared.to_yaml(), processes=tuple(specs))


def _own_env(config: Config, role: Role, port: int, num_services: int) -> dict[str, str]:
    """What differs between processes: the port of a node, and each service's own port for metrics.

    Args:
        config: what all of them read.
        role: what the process does.
        port: where it listens.
        num_services: how many services come before it.
    """
    env = {"KEV__CLUSTER__INFERENCE_PORT": str(port)} if role is Role.INFERENCE else {}
    if config.observability.metrics_port and role in HEALTH_SERVICES:
        env["KEV__OBSERVABILITY__METRICS_PORT"] = str(config.observability.metrics_port + num_services)
    return env


def _cluster_config(config: Config, ports: Ports, surroundings: Surroundings, *, no_model: bool) -> Config:
    sections = config.model_dump(mode="json")
    num_nodes = len(ports.inference)
    sections["deploy"] |= {"mode": "distributed", "workers": num_nodes}
    sections["server"] |= {"port": ports.gateway}
    sections["core"]["num_threads"] = config.core.num_threads or max(1, surroundings.num_cpus // num_nodes)
    sections["cluster"] |= {
        "redis_url": f"redis://{HOST}:{ports.store}/0",
        "bind_host": HOST,
        "router_address": f"{HOST}:{ports.router}",
        "router_port": ports.router,
        "aggregator_address": f"{HOST}:{ports.aggregator}",
        "aggregator_port": ports.aggregator,
        "inference_port": ports.inference[0],
    }
    if no_model:
        sections["cluster"]["node_engine"] = "scripted"
    return load_config({"kev": sections}, env={})


def _port(ports: Ports, role: Role) -> int:
    return {
        Role.STORE: ports.store,
        Role.AGGREGATOR: ports.aggregator,
        Role.ROUTER: ports.router,
        Role.GATEWAY: ports.gateway,
    }[role]


def _health(config: Config, role: Role, port: int) -> Health:
    match role:
        case Role.STORE:
            return Health(target=f"redis://{HOST}:{port}")
        case Role.GATEWAY:
            return Health(target=f"http://{_dialled(config.server.host)}:{port}/ready")
        case _:
            return Health(target=f"{HOST}:{port}", service=HEALTH_SERVICES[role], tls=_tls(config))


def _dialled(host: str) -> str:
    """The address that reaches a server which listens on ``host``."""
    return {"0.0.0.0": HOST, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _tls(config: Config) -> TlsFiles | None:
    cluster = config.cluster
    if not cluster.tls_cert_file:
        return None
    return TlsFiles(
        ca_file=cluster.tls_ca_file or cluster.tls_cert_file,
        cert_file=cluster.tls_cert_file,
        key_file=cluster.tls_key_file,
    )
