"""What callers need of the router, whatever stands in front of it.

Not here: the router (``service``), what is put in front of it (``metrics``), gRPC (``servicer``).
"""

from __future__ import annotations

from typing import Protocol

from common.types import ChannelSnapshot, RequestSpec, RouterStats


class Router(Protocol):
    """``router_svc.service.RouterService``, or somebody who passes calls on to it."""

    def check_room(self, tenant: str = "") -> None:
        """Refuse before anything is spent."""
        ...

    async def accept(self, spec: RequestSpec, *, has_new_id: bool = False) -> bool:
        """Accept a request; whether it is new."""
        ...

    def channels(self) -> list[ChannelSnapshot]:
        """The channel pool."""
        ...

    def stats(self) -> RouterStats:
        """Counters."""
        ...
