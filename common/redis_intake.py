"""The router's way into Redis: a request and its first questions in one script, and so in one round trip.

Invariants and semantics: see ``common.ports.Intake``. Questions beyond what one script call may carry follow in calls
of their own.

Not here: what is kept of a request (``redis_registry``), what becomes of an item (``redis_streams``).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import KevError
from common.redis_link import RedisLink
from common.redis_registry import RedisRegistry
from common.redis_scripts import Script
from common.redis_scripts_publish import APPEND, Publication, Published, PublishState
from common.redis_scripts_registry import REGISTER, REGISTRATION_SIZE, RegisterState, Registration
from common.redis_streams import RedisTransport, parts_of
from common.types import RequestRecord, WorkItem

_ACCEPT = Script.of(f"""{REGISTER}{APPEND}
local state = register_from(3)
return {{state, state == 'new' and append_from({3 + REGISTRATION_SIZE}) or {{}}}}
""")


class RedisIntake:
    """``Intake`` of one registry and one transport, which share a link."""

    def __init__(self, *, link: RedisLink, registry: RedisRegistry, transport: RedisTransport) -> None:
        self._link = link
        self._registry = registry
        self._transport = transport

    async def accept(self, record: RequestRecord, items: Sequence[WorkItem]) -> list[KevError | None] | None:
        """Register a request and publish items of it; see ``common.ports.Intake``."""
        publications = [self._transport.publication_of(item) for item in items]
        parts = parts_of(publications, lambda publication: len(publication.envelope))
        first = next(parts, ())
        registration = self._registry.registration_of(record)
        with self._registry.doubting(registration):
            state, published = await self._link.unbroken(self._run(registration, first))
            if not self._registry.is_new(record, state):
                return None
        refusals: list[KevError | None] = [*map(self._transport.refusal_of, first, published)]
        return refusals + await self._publish(items[len(first) :])

    async def _run(
        self, registration: Registration, publications: Sequence[Publication]
    ) -> tuple[RegisterState, list[Published]]:
        arguments = [argument for publication in publications for argument in publication.arguments()]
        state, states = await self._link.run(
            _ACCEPT, *self._transport.channel_limits, *registration.arguments(), *arguments
        )
        published = [Published(state=PublishState(state.decode()), num_held=int(held)) for state, held in states]
        return RegisterState(state.decode()), published

    async def _publish(self, items: Sequence[WorkItem]) -> list[KevError | None]:
        try:
            return [*await self._transport.publish(items)]
        except KevError as error:
            return [error] * len(items)
