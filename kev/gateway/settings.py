"""Limits of the gateway.

Not here: where it listens; that is an argument of ``server.serve``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How much a connection may cost."""

    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; a larger one is refused with 413."""
    body_timeout_s: float = 60.0
    """A body must have arrived after this time; else 408."""
    send_timeout_s: float = 60.0
    """A client that takes nothing from its event stream for this long counts as gone."""
    ping_interval_s: float = 15.0
    """A silent event stream carries a comment this often, so that proxies keep it open."""
    ready_timeout_s: float = 2.0
    """``/ready`` answers 503 when the backend has not said it is ready within this time."""
    max_wait_ms: int = 60_000
    """Largest ``wait_ms`` of a poll."""
    drain_grace_s: float = 25.0
    """After the order to stop, open exchanges may go on for this long."""
