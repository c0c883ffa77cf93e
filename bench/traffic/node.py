"""A node of the simulation: leases as the real worker does, computes by the clock of ``forward``.

Invariants and semantics: it asks for no more items than it has free slots, hands nothing back, reports the start and
the outcome of every question through the work streams, and stops what was withdrawn. Leases of the simulation do not
run out, as if they were renewed.

Not here: which item comes first (the transport), how long an answer takes (``forward``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from bench.traffic.arrivals import Arrival
from bench.traffic.forward import SharedForward, Speed
from common.ports import Lease, Report, WorkStreams
from common.types import ChannelResult, ChannelStarted, FinishReason

_LEASE_WAIT_S = 5.0

Key = tuple[str, int]


class SimulatedNode:
    """Slots, and a forward that they share."""

    def __init__(self, node_id: str, work: WorkStreams, num_slots: int, speed: Speed, asked: Mapping[str, Arrival]):
        """Idle.

        Args:
            node_id: in its reports.
            work: where items come from.
            num_slots: most questions in a forward.
            speed: of the forward.
            asked: arrivals by request id; how long an answer is is not written in an item.
        """
        self._node_id = node_id
        self._work = work
        self._num_slots = num_slots
        self._asked = asked
        self._leases: dict[Key, Lease] = {}
        self.forward: SharedForward[Key] = SharedForward(speed)
        self._slot_freed = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease_loop())
            group.create_task(self._end_loop())

    def stop(self, key: Key) -> None:
        """Let go of a question that was withdrawn, if it is here."""
        if self._leases.pop(key, None) is not None:
            self.forward.remove(key, self._now_s())
            self._note_change()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _note_change(self) -> None:
        self._changed.set()
        self._slot_freed.set()

    async def _lease_loop(self) -> None:
        while True:
            num_free = self._num_slots - len(self._leases)
            if not num_free:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            leases = await self._work.lease(num_free, _LEASE_WAIT_S)
            for lease in leases:
                self._start(lease)
            if leases:
                self._changed.set()
                await self._work.report([self._started(lease) for lease in leases])

    def _start(self, lease: Lease) -> None:
        arrival = self._asked[lease.item.request_id]
        answer_tokens = math.inf if arrival.stalls else arrival.answer_tokens
        self._leases[lease.item.key] = lease
        self.forward.add(lease.item.key, len(lease.item.prompt.ids), answer_tokens, self._now_s())

    async def _end_loop(self) -> None:
        while True:
            self._changed.clear()
            change_s = self.forward.next_change_s()
            try:
                async with asyncio.timeout_at(change_s if math.isfinite(change_s) else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
            ended = self.forward.take_ended(self._now_s())
            if ended:
                reports = [self._outcome(self._leases.pop(key)) for key in ended]
                self._slot_freed.set()
                await self._work.report(reports)

    def _started(self, lease: Lease) -> Report:
        item = lease.item
        event = ChannelStarted(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            slot=0,
            attempt=lease.attempt,
            node_id=self._node_id,
        )
        return Report(lease=lease, events=(event,))

    def _outcome(self, lease: Lease) -> Report:
        item = lease.item
        event = ChannelResult(
            request_id=item.request_id,
            question_index=item.question_index,
            channel_id=item.channel_id,
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=len(item.prompt.ids),
            finished_at=self._now_s(),
            attempt=lease.attempt,
            node_id=self._node_id,
        )
        return Report(lease=lease, events=(event,))
