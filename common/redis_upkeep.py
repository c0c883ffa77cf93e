"""Keeps the work streams in order: signs of life, dead nodes, expired leases, items that nobody can finish.

Invariants and semantics: ``run`` gives a sign of life three times per ``heartbeat_ttl_s`` and sweeps about every half
lease, at random within that, so that nodes do not sweep together. Every node does the upkeep of all. The store's
absence is logged and waited out. An item is set aside together with its error outcome, or not at all.

Not here: the scripts (``redis_scripts_upkeep``, ``redis_scripts_lease``).
"""

from __future__ import annotations

import asyncio
import logging
import random

from common import redis_scripts_lease as lease_scripts
from common import redis_scripts_upkeep as scripts
from common.codec import seal
from common.ending import Ending
from common.errors import InvariantError, KevError, StoreUnavailableError
from common.outage_log import OutageLog
from common.ports import Clock
from common.redis_keys import UNOWNED
from common.redis_link import RedisLink
from common.redis_scripts import Entry, Hold
from common.redis_settings import RedisTransportSettings
from common.types import ChannelResult, ErrorInfo, FinishReason

_log = logging.getLogger("kev.redis")


class RedisUpkeep:
    """The upkeep of one deployment's work streams by one consumer."""

    def __init__(self, link: RedisLink, clock: Clock, settings: RedisTransportSettings) -> None:
        self._link = link
        self._clock = clock
        self._settings = settings
        self._num_lost_entries = 0
        self._outage = OutageLog(_log)

    @property
    def num_lost_entries(self) -> int:
        """Leased entries that somebody else deleted or trimmed, since start."""
        return self._num_lost_entries

    async def run(self) -> None:
        """Signs of life and sweeps, until cancelled."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        sweeps_at_s = loop.time() + random.uniform(0.25, 0.5) * settings.lease_timeout_s
        while True:
            await asyncio.sleep(min(settings.heartbeat_ttl_s / 3, settings.lease_timeout_s / 4))
            try:
                await self._link.unbroken(self.beat())
                if loop.time() >= sweeps_at_s:
                    sweeps_at_s = loop.time() + random.uniform(0.4, 0.6) * settings.lease_timeout_s
                    await self._link.unbroken(self.sweep())
                self._outage.worked()
            except KevError as error:
                self._outage.failed(f"the upkeep of the work streams has to wait: {error}")

    async def beat(self) -> None:
        """Give a sign of life and bury the dead.

        Raises:
            StoreUnavailableError: the store is away.
        """
        dead = await scripts.beat(
            self._link,
            self._settings.consumer,
            ttl_ms=int(self._settings.heartbeat_ttl_s * 1000),
            num_channels=self._settings.num_channels,
        )
        if dead:
            _log.warning("nodes that gave no sign of life were removed: %s", ", ".join(dead))

    async def sweep(self) -> None:
        """Put expired leases back in line, set poisonous items aside, count entries that were lost.

        Raises:
            StoreUnavailableError: the store is away.
        """
        swept = await scripts.sweep(
            self._link,
            lease_ms=self._settings.lease_ms,
            max_deliveries=self._settings.max_deliveries,
            num_channels=self._settings.num_channels,
        )
        if swept.deleted:
            self._num_lost_entries += len(swept.deleted)
            _log.error("%d leased entries were deleted by somebody else", len(swept.deleted))
        for entry in swept.poisonous:
            await self.set_poisonous_aside(entry)

    async def retire(self) -> None:
        """Let go of whatever this consumer holds and leave the groups.

        Raises:
            StoreUnavailableError: the store is away; the other nodes will notice.
        """
        await scripts.retire(self._link, self._settings.consumer, self._settings.num_channels)

    # ---- dead letters

    def error_outcome(self, hold: Hold, error: ErrorInfo) -> ChannelResult:
        """The outcome of a question that cannot be run."""
        return ChannelResult(
            request_id=hold.request_id,
            question_index=hold.question_index,
            channel_id=hold.channel_id,
            finish_reason=FinishReason.ERROR,
            finished_at=self._clock.time(),
            attempt=max(1, hold.attempt),
            error=error,
        )

    async def set_aside(self, hold: Hold, error: ErrorInfo, envelope: bytes) -> bool:
        """Move a held entry to the dead letters and report its outcome (empty: nobody to report to).

        Raises:
            StoreUnavailableError: the store is away.
        """
        return await lease_scripts.dead_letter(
            self._link,
            hold,
            reason=error.reason,
            message=error.message,
            envelope=envelope,
            ending=Ending(FinishReason.ERROR, error.reason).mark,
            ttl_ms=self._settings.retention_ms,
        )

    async def set_unreadable_aside(self, hold: Hold, error: ErrorInfo) -> None:
        """Set aside an entry for which there is no lease; a failure leaves it to a later sweep."""
        is_addressed = bool(hold.request_id) and hold.question_index >= 0
        envelope = seal(self.error_outcome(hold, error)) if is_addressed else b""
        _log.error("entry %s of channel %d goes to the dead letters: %s", hold.entry_id, hold.channel_id, error.reason)
        try:
            await self.set_aside(hold, error, envelope)
        except StoreUnavailableError as failure:
            _log.warning("could not set the entry aside now: %s", failure)

    async def set_poisonous_aside(self, entry: Entry) -> None:
        """Set aside an entry in line that was delivered too often; a failure leaves it to a later sweep."""
        error = InvariantError(
            f"the question was given to a node {entry.deliveries} times and none of them finished it; "
            "it was set aside for the operator"
        )
        await self.set_unreadable_aside(entry.hold(UNOWNED), error.info)
