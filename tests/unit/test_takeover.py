"""Taking over requests that were registered elsewhere: nothing is lost, doubled or mixed up on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from common.errors import RequestNotFoundError
from common.memory import MemoryTransport
from common.ports import PastEvent, RegisteredRequest, Withdrawn
from common.types import (
    ChannelEvent,
    ChannelResult,
    RequestRecord,
)
from tests.unit.aggregator_builders import (
    delta,
    outcome,
    question,
    request,
    shape,
    started,
)
from tests.unit.aggregator_world import World, settle


class Elsewhere:
    """Requests that were registered at another process."""

    def __init__(self, *records: RequestRecord, age_ms: int = 0) -> None:
        self.age_ms = age_ms
        self.records = {record.request_id: record for record in records}
        self.events: dict[str, list[PastEvent]] = {record.request_id: [] for record in records}
        self.late: list[str] = []
        self.completed: list[str] = []
        self.found: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def happened(self, *events: ChannelEvent, at_ms: int = 0) -> None:
        for event in events:
            self.events[event.request_id].append(PastEvent(event=event, at_ms=at_ms))

    async def find(self, request_id: str) -> RegisteredRequest | None:
        self.found.append(request_id)
        await self.may_answer.wait()
        record = self.records.get(request_id)
        if record is None:
            return None
        return RegisteredRequest(record=record, age_ms=self.age_ms, events=tuple(self.events[request_id]))

    async def overdue(self) -> list[str]:
        return [request_id for request_id in self.late if request_id not in self.completed]

    async def complete(self, request_id: str) -> None:
        self.completed.append(request_id)


async def test_a_request_registered_elsewhere_is_taken_over_with_its_past() -> None:
    """A restarted aggregator would answer 'unknown', start the deadlines anew, or tell other times than before."""
    source = Elsewhere(request([question(0, timeout_ms=1_000), question(1, timeout_ms=1_000)]), age_ms=600)
    source.happened(outcome("ready"), at_ms=250)
    world = World(source=source)
    async with world.running():
        with pytest.raises(RequestNotFoundError):
            await world.service.poll("somebody-else")
        view = await world.service.poll("r")
        assert [(result.text, result.elapsed_ms) for result in view.results] == [("ready", 250)] and not view.done
        await world.pass_s(0.39)
        assert not (await world.service.poll("r")).done
        await world.pass_s(0.01)
        assert (await world.service.poll("r")).done, "600 ms had passed elsewhere and 400 here"
    assert source.found == ["somebody-else", "r"], "a request at hand is not looked up again"


async def test_events_that_come_during_a_takeover_are_not_lost() -> None:
    """An event that was read while the request's log was on its way would be missing from both."""
    source = Elsewhere(request(2))
    source.happened(started(0), delta("a"))
    world = World(source=source)
    async with world.running():
        source.may_answer.clear()
        asking = [asyncio.create_task(world.service.poll("r")) for _ in range(3)]
        await settle()
        asking[2].cancel()
        await world.report(delta("a"), delta("b", 1), outcome("ab"))
        source.may_answer.set()
        await settle()
        assert await asyncio.gather(*asking[:2]) == [await world.service.poll("r")] * 2
        assert shape(world.service._get("r").collector.events) == [
            ("started", ""),
            ("delta", "a"),
            ("delta", "b"),
            ("result", ""),
        ]
        assert world.service.counters.num_late == 0


async def test_what_the_stream_has_missed_is_taken_from_the_log() -> None:
    """A reader that was away would leave its callers waiting for outcomes that everybody else has."""

    class Leaky(MemoryTransport):
        num_lost = 0

        @property
        def num_gaps(self) -> int:
            return self.num_lost

    source = Elsewhere(request(2))
    world = World(source=source, transport=Leaky)
    assert isinstance(world.transport, Leaky)
    async with world.running():
        await world.service.load("r")
        source.happened(started(0), delta("a"), outcome("ab", 0))
        world.transport.num_lost += 1
        await world.report(outcome("c", 1))
        view = await world.service.wait("r", 5)
        assert [result.text for result in view.results] == ["ab", "c"]
        kinds = [(str(event.type), event.question_index) for event in world.service._get("r").collector.events]
        assert kinds == [("started", 0), ("delta", 0), ("delta", 0), ("result", 0), *kinds[4:]], "in the log's order"


async def test_a_placeholder_that_lost_the_race_brings_the_winner() -> None:
    """A question whose outcome was missed would be asked for again and again, and never told."""

    class Settled(MemoryTransport):
        async def settle(self, outcomes: Sequence[ChannelResult]) -> list[int]:
            return []

    source = Elsewhere(request([question(0, timeout_ms=500)]))
    world = World(source=source, transport=Settled)
    async with world.running():
        await world.service.load("r")
        source.happened(outcome("just in time"), at_ms=490)
        await world.pass_s(0.5)
        assert [result.text for result in (await world.service.poll("r")).results] == ["just in time"]


async def test_a_request_is_taken_over_with_its_first_event() -> None:
    """What was answered before anybody asked would be gone with a store that is emptied."""
    source = Elsewhere(request(2))
    world = World(source=source)
    async with world.running():
        source.happened(started(0))
        await world.report(started(0))
        assert source.found == ["r"]
        await world.report(outcome("a", 0), outcome("b", 1), started(request_id="gone"))
        source.records.clear()
        assert [result.text for result in (await world.service.wait("r", 5)).results] == ["a", "b"]
        await world.report(started(request_id="gone"))
        assert source.found == ["r", "gone", "gone"], "a request that may come again is looked for again"


async def test_a_withdrawn_request_makes_room_for_another_one_under_its_id() -> None:
    """A retry with other content would be answered with what the withdrawn request was told."""
    source = Elsewhere(request(2))
    world = World(source=source)
    async with world.running():
        waiting = asyncio.create_task(world.service.wait("r", None))
        await world.report(outcome("of the first", 0))
        source.records["r"] = request(1, content_digest="other")
        source.happened(started(0), outcome("of the second"))
        await world.report(cast(ChannelEvent, Withdrawn(request_id="r")), started(0), outcome("of the second"))
        assert [r.finish_reason for r in (await asyncio.wait_for(waiting, 5)).results] == ["stop", "cancelled"]
        assert [r.text for r in (await world.service.wait("r", 5)).results] == ["of the second"]


async def test_a_request_withdrawn_during_its_takeover_is_looked_for_again() -> None:
    """The record of the withdrawn request would be kept for the one that follows under its id."""
    source = Elsewhere(request(2))
    world = World(source=source)
    async with world.running():
        first = source.records["r"]
        source.may_answer.clear()
        asking = asyncio.create_task(world.service.poll("r"))
        await settle()
        await world.report(outcome("of the first", 0), cast(ChannelEvent, Withdrawn(request_id="r")))
        source.records["r"] = request(1, content_digest="other")
        source.may_answer.set()
        assert (await asking).num_questions == 1 != len(first.questions)
        assert (await world.service.poll("r")).results == ()
        assert source.found == ["r", "r"]


async def test_requests_nobody_asks_for_are_looked_after() -> None:
    """An unattached request would never time out, or be kept for ever as unfinished."""
    source = Elsewhere(request([question(0, timeout_ms=500)]), age_ms=600)
    source.late = ["r"]
    world = World(source=source)
    settled: list[ChannelResult] = []
    world.service.add_listener(settled.append)
    async with world.running():
        async with asyncio.timeout(5):
            while not source.completed:
                await asyncio.sleep(0.01)
    assert [outcome.finish_reason for outcome in settled] == ["timeout_queued"]
    assert source.completed == ["r"]


async def test_a_drain_leaves_requests_of_a_source_to_the_next_aggregator() -> None:
    """Ending them as cancelled would lose questions that a node is still answering."""
    world = World(source=Elsewhere(request([question(0, timeout_ms=1_000)])))
    async with world.running():
        await world.service.load("r")
    assert not (await world.service.poll("r")).done
