"""What a process must know to take part in a deployment over Redis.

Not here: the configuration file (``common.config``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

from common.errors import ConfigError
from common.types import ChannelEvent, Durability, WorkItem


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How to reach Redis."""

    url: str
    """``redis://``, ``rediss://`` or ``unix://``, with user and password where needed."""
    deployment: str
    """Name of the deployment; a deployment shares nothing with others on the same server."""
    patience_s: float = 5.0
    """How long a call goes on trying while the store is away."""
    socket_timeout_s: float = 5.0
    """Longest wait for a reply that does not block."""
    block_s: float = 5.0
    """How long a blocking read waits at the server; its socket waits ``socket_timeout_s`` longer."""
    max_connections: int = 16
    durability: Durability = Durability.MEMORY
    """What the server must keep when it crashes."""


def _no_trace(_: object) -> str:
    return ""


def _ignore(_: object, __: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTransportSettings:
    """What every process of a deployment must agree on, and who this one is."""

    num_channels: int
    node_id: str
    """Names the process among its peers; a restart keeps it. Without slash or tilde."""
    incarnation: str = field(default_factory=lambda: uuid4().hex[:12])
    """Never used again by a later process."""
    lease_timeout_s: float = 15.0
    max_deliveries: int = 3
    max_entries_per_channel: int = 1024
    max_bytes_per_channel: int = 67_108_864
    """A channel takes no further item once its stream has so many bytes of the server's memory."""
    priority_step_ms: float = 100.0
    """How much earlier than it came a question stands in line for each step of priority."""
    max_events: int = 65_536
    """Unread events from which on no more progress is taken."""
    retention_s: float = 600.0
    """How long outcomes and a request's events are kept."""
    heartbeat_ttl_s: float = 3.0
    """A consumer that was silent for so long is dead."""
    trace_of: Callable[[WorkItem], str] = _no_trace
    """W3C traceparent that travels with an item; empty for none."""
    on_event: Callable[[ChannelEvent, str], None] = _ignore
    """Told of every event that is read, with the traceparent of its item; must neither raise nor wait."""

    @property
    def consumer(self) -> str:
        """Name of this process in the consumer groups."""
        return f"{self.node_id}/{self.incarnation}"

    @property
    def lease_ms(self) -> int:
        """Lease time in whole milliseconds."""
        return int(self.lease_timeout_s * 1000)

    @property
    def retention_ms(self) -> int:
        """Retention in whole milliseconds."""
        return int(self.retention_s * 1000)

    def check(self) -> None:
        """Look whether the values go together.

        Raises:
            ConfigError: they do not.
        """
        bounds = (self.max_entries_per_channel, self.max_bytes_per_channel, self.max_events)
        sizes = (self.num_channels, self.max_deliveries, *bounds)
        times_s = (self.lease_timeout_s, self.retention_s, self.heartbeat_ttl_s)
        if min(sizes) < 1 or min(times_s) <= 0:
            raise ConfigError("a Redis transport needs at least one channel, delivery, entry and event, and times > 0")
        if not self.node_id or set("/~") & set(self.node_id):
            raise ConfigError(f"the node id {self.node_id!r} must not be empty or contain a slash or a tilde")
