"""What every transport must do: the docstrings of ``common.ports`` as tests.

To test another transport, subclass ``TransportSuite`` in a test module and return its harness from ``make_harness``.

Not here: what only one transport promises (its own test module).
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError, InvariantError, OutOfMemoryError, QueueFullError
from common.ports import Lease, Report, ReportState, ResultStream, WorkStreams
from common.types import (
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    FinishReason,
    IsolationLevel,
    Prompt,
    SamplingParams,
    WorkItem,
)
from tests.work_calls import commit, emit, hand_back, publish, renew

OPERATIONS = [
    "publish",
    "publish",
    "publish",
    "lease",
    "lease",
    "interrupted_lease",
    "commit",
    "commit_all",
    "hand_back",
    "renew",
    "dead_letter",
    "expire",
    "cancel",
]

LONG_S = 30.0
"""A wait that a test ends by what it does."""
SHORT_S = 0.01
"""A wait that a test lets run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """One transport from all sides. In a transport of one process both nodes may be the same object."""

    router: WorkStreams
    node: WorkStreams
    other_node: WorkStreams
    results: ResultStream


class TransportHarness(Protocol):
    """What a transport adds to be tested."""

    async def create(
        self, *, num_channels: int, max_entries_per_channel: int = 64, max_bytes_per_channel: int = 67_108_864
    ) -> Ends:
        """A fresh, empty transport; called once per harness."""
        ...

    async def expire_leases(self) -> None:
        """Let so much time pass that every lease not renewed since has run out."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let time pass; leases held must survive 0.5 s."""
        ...

    async def settle(self) -> None:
        """Give tasks the time to reach their wait."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


def make_item(question_index: int = 0, channel_id: int = 0, request_id: str = "r", **changes: Any) -> WorkItem:
    """A work item with plain values."""
    item = WorkItem(
        request_id=request_id,
        question_index=question_index,
        channel_id=channel_id,
        prompt=Prompt(ids=(1, 2, 3)),
        num_shared=0,
        sampling=SamplingParams(),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=10_000,
    )
    return replace(item, **changes)


def started(lease: Lease) -> ChannelStarted:
    """The first event under a lease."""
    return ChannelStarted(
        request_id=lease.item.request_id,
        question_index=lease.item.question_index,
        channel_id=lease.item.channel_id,
        slot=0,
        attempt=lease.attempt,
        node_id="n",
    )


def delta(lease: Lease, seq: int = 0, text: str = "x") -> ChannelDelta:
    """Text under a lease."""
    return ChannelDelta(
        request_id=lease.item.request_id,
        question_index=lease.item.question_index,
        channel_id=lease.item.channel_id,
        attempt=lease.attempt,
        seq=seq,
        text=text,
        num_tokens=seq + 1,
    )


def outcome(lease: Lease, text: str = "answer") -> ChannelResult:
    """An answer under a lease."""
    return ChannelResult(
        request_id=lease.item.request_id,
        question_index=lease.item.question_index,
        channel_id=lease.item.channel_id,
        finish_reason=FinishReason.STOP,
        text=text,
        attempt=lease.attempt,
    )


def keys(leases: list[Lease]) -> list[tuple[str, int]]:
    """The questions that are leased."""
    return [lease.item.key for lease in leases]


class TransportSuite:
    """Run by every transport through a subclass."""

    def make_harness(self) -> TransportHarness:
        """The transport under test."""
        raise NotImplementedError

    @pytest.fixture
    async def harness(self) -> AsyncIterator[TransportHarness]:
        harness = self.make_harness()
        yield harness
        await harness.close()

    # ---- publish

    async def test_a_channel_is_first_in_first_out(self, harness: TransportHarness) -> None:
        """Questions of a channel would overtake each other."""
        ends = await harness.create(num_channels=2)
        for index in range(4):
            await publish(ends.router, make_item(index))
        order = []
        for _ in range(4):
            [lease] = await ends.node.lease(8, 0)
            order.append(lease.item.question_index)
            await commit(ends.node, lease, outcome(lease))
        assert order == [0, 1, 2, 3]

    async def test_a_priority_is_a_head_start(self, harness: TransportHarness) -> None:
        """An urgent question waits for all that came before it, or one that is not urgent waits for ever."""
        ends = await harness.create(num_channels=6)
        for index, priority in enumerate((0, -900, 0, 50, 20)):
            await publish(ends.router, make_item(index, channel_id=index, priority=priority))
        await publish(ends.router, make_item(5, channel_id=0, priority=900))
        first = await ends.node.lease(2, 0) + await ends.node.lease(1, 0)
        assert [lease.item.question_index for lease in first] == [3, 4, 0], "what is behind 0 on its channel waits"
        for lease in first:
            await commit(ends.node, lease, outcome(lease))
        assert [lease.item.question_index for lease in await ends.node.lease(8, 0)] == [5, 2, 1]

    async def test_a_head_start_is_used_up_by_waiting(self, harness: TransportHarness) -> None:
        """Questions without priority starve while others keep coming."""
        ends = await harness.create(num_channels=3)
        await publish(ends.router, make_item(0, channel_id=0))
        await harness.advance(0.15)
        await publish(ends.router, make_item(1, channel_id=1, priority=1))
        await publish(ends.router, make_item(2, channel_id=2, priority=600))
        assert [lease.item.question_index for lease in await ends.node.lease(8, 0)] == [2, 0, 1]

    async def test_the_item_arrives_unchanged(self, harness: TransportHarness) -> None:
        """A field of the item would be lost on the way."""
        ends = await harness.create(num_channels=2)
        item = make_item(
            3,
            1,
            prompt=Prompt(ids=(5, 6, 7), boundaries=(1, 2), num_truncated=4),
            num_shared=2,
            sampling=SamplingParams(max_tokens=7, temperature=0.5, seed=11, stop=("。", "\n"), logprobs=0),
            isolation=IsolationLevel.SHARED,
            priority=-3,
            tenant="t",
            fingerprint="f",
        )
        await publish(ends.router, item)
        [lease] = await ends.node.lease(1, 0)
        assert lease.item == item

    async def test_publishing_what_is_there_does_nothing(self, harness: TransportHarness) -> None:
        """A repeated submit would run its questions twice."""
        ends = await harness.create(num_channels=2)
        await publish(ends.router, make_item())
        await publish(ends.router, make_item())
        assert await ends.router.depths() == [1, 0]
        [lease] = await ends.node.lease(8, 0)
        await publish(ends.router, make_item())
        assert await ends.router.depths() == [1, 0]
        await commit(ends.node, lease, outcome(lease))
        assert await ends.node.lease(8, 0) == []

    async def test_a_full_channel_refuses(self, harness: TransportHarness) -> None:
        """The queue would grow without bound, or a refusal would not say when to come back."""
        ends = await harness.create(num_channels=2, max_entries_per_channel=2)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        await ends.node.lease(1, 0)
        with pytest.raises(QueueFullError, match="channel 0 already holds 2 questions, its limit is 2") as refused:
            await publish(ends.router, make_item(2))
        assert refused.value.retry_after_s > 0
        await publish(ends.router, make_item(1))
        await publish(ends.router, make_item(2, channel_id=1))
        assert await ends.router.depths() == [2, 1]

    async def test_a_channel_is_full_by_its_bytes_too(self, harness: TransportHarness) -> None:
        """A few long questions would fill the memory that many short ones never would."""
        ends = await harness.create(num_channels=2, max_bytes_per_channel=20_000)
        long_prompt = Prompt(ids=tuple(range(5_000, 9_000)))
        refusals = await ends.router.publish([make_item(index, prompt=long_prompt) for index in range(10)])
        num_taken = refusals.index(next(filter(None, refusals)))
        assert 2 <= num_taken <= 4
        assert all(isinstance(refusal, QueueFullError) for refusal in refusals[num_taken:])
        assert re.search(r"channel 0 already holds \d{5} bytes, its limit is 20000", str(refusals[-1]))
        await publish(ends.router, make_item(10, channel_id=1, prompt=long_prompt))
        for _ in range(num_taken):
            [lease] = await ends.node.lease(1, 0)
            await commit(ends.node, lease, outcome(lease))
        assert await ends.router.publish([make_item(9, prompt=long_prompt)]) == [None]

    async def test_an_empty_channel_takes_any_item(self, harness: TransportHarness) -> None:
        """A question longer than the bound would wait for room that never comes."""
        ends = await harness.create(num_channels=1, max_bytes_per_channel=1)
        await publish(ends.router, make_item(prompt=Prompt(ids=tuple(range(4_000)))))
        assert await ends.router.depths() == [1]

    @pytest.mark.parametrize("channel_id", [-1, 2])
    async def test_an_unknown_channel_is_refused(self, harness: TransportHarness, channel_id: int) -> None:
        """A question would be put where nobody reads it."""
        ends = await harness.create(num_channels=2)
        with pytest.raises(InvalidRequestError, match="channel_id"):
            await ends.router.publish([make_item(), make_item(1, channel_id=channel_id)])
        assert await ends.router.depths() == [0, 0]

    async def test_each_item_of_a_call_stands_for_itself(self, harness: TransportHarness) -> None:
        """A full channel would refuse its neighbours' questions, or a question be run twice."""
        ends = await harness.create(num_channels=3, max_entries_per_channel=2)
        items = [make_item(index, index % 2) for index in (0, 1, 2, 4, 3, 3)] + [make_item(5, 2)]
        for _ in range(2):
            refusals = await ends.router.publish(items)
            assert [refusal is None for refusal in refusals] == [True, True, True, False, True, True, True]
            assert await ends.router.depths() == [2, 2, 1]
        assert keys(await ends.node.lease(8, 0)) == [("r", 0), ("r", 1), ("r", 5)]

    async def test_nothing_in_a_call_is_nothing(self, harness: TransportHarness) -> None:
        """A node without leases would crash, or send empty calls to the store."""
        ends = await harness.create(num_channels=1)
        assert await ends.router.publish([]) == []
        assert await ends.node.renew([]) == []
        assert await ends.node.report([]) == []
        assert await ends.node.hand_back([]) == []

    async def test_more_than_one_script_may_work_on(self, harness: TransportHarness) -> None:
        """The end of a large call would be forgotten, or its answers given to the wrong items."""
        ends = await harness.create(num_channels=3, max_entries_per_channel=100)
        refusals = await ends.router.publish([make_item(index, index % 3) for index in range(301)])
        assert [index for index, refusal in enumerate(refusals) if refusal] == [300]
        assert await ends.router.depths() == [100, 100, 100]

    # ---- lease

    async def test_one_item_per_channel_oldest_head_first(self, harness: TransportHarness) -> None:
        """A channel with many questions would keep the others waiting."""
        ends = await harness.create(num_channels=3)
        for index, channel_id in enumerate([2, 2, 2, 0, 1]):
            await publish(ends.router, make_item(index, channel_id))
        assert keys(await ends.node.lease(2, 0)) == [("r", 0), ("r", 3)]
        assert keys(await ends.node.lease(8, 0)) == [("r", 4)]
        assert await ends.node.lease(8, 0) == []

    @pytest.mark.parametrize("seed", range(3))
    async def test_free_slots_go_to_the_channels_that_wait_longest(self, harness: TransportHarness, seed: int) -> None:
        """A hot channel would have two questions in a forward, or a quiet one wait behind it."""
        chance, ends = random.Random(seed), await harness.create(num_channels=4)
        waiting: list[tuple[int, int]] = []
        held: dict[int, Lease] = {}
        for index in range(40):
            channel_id = chance.choice([0, 0, 0, 1, 2, 3])
            await publish(ends.router, make_item(index, channel_id))
            waiting.append((index, channel_id))
            for channel_id in [held_id for held_id in held if chance.random() < 0.4]:
                lease = held.pop(channel_id)
                assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED
            max_items, heads = chance.randint(0, 4), dict[int, int]()
            for number, channel_id in waiting:
                if channel_id not in held:
                    heads.setdefault(channel_id, number)
            leases = await ends.node.lease(max_items, 0)
            assert [lease.item.question_index for lease in leases] == sorted(heads.values())[:max_items]
            held |= {lease.item.channel_id: lease for lease in leases}
            waiting = [entry for entry in waiting if entry[0] not in {lease.item.question_index for lease in leases}]

    async def test_a_leased_item_holds_up_only_its_channel(self, harness: TransportHarness) -> None:
        """The next question of a channel would start beside the first, or another channel would be held up."""
        ends = await harness.create(num_channels=2)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        [first] = await ends.node.lease(8, 0)
        await publish(ends.router, make_item(2, channel_id=1))
        assert keys(await ends.node.lease(8, 0)) == [("r", 2)]
        await commit(ends.node, first, outcome(first))
        assert keys(await ends.node.lease(8, 0)) == [("r", 1)]

    async def test_a_hot_channel_starves_nobody(self, harness: TransportHarness) -> None:
        """A later question of a quiet channel would wait for the whole backlog of a busy one."""
        ends = await harness.create(num_channels=2)
        for index in range(20):
            await publish(ends.router, make_item(index))
        await publish(ends.router, make_item(99, channel_id=1))
        taken = [await ends.node.lease(1, 0), await ends.node.lease(1, 0)]
        assert sorted(key for leases in taken for key in keys(leases)) == [("r", 0), ("r", 99)]

    async def test_no_more_than_asked_for(self, harness: TransportHarness) -> None:
        """A node would hold items it has no slot for."""
        ends = await harness.create(num_channels=3)
        for channel_id in range(3):
            await publish(ends.router, make_item(channel_id, channel_id))
        assert len(await ends.node.lease(2, 0)) == 2
        assert await ends.node.lease(0, 0) == []

    async def test_the_lease_tells_attempt_and_age(self, harness: TransportHarness) -> None:
        """Time budgets would not count the time in the queue."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        await harness.advance(0.5)
        [lease] = await ends.node.lease(1, 0)
        assert lease.attempt == 1
        assert 490 <= lease.age_ms < 5_000

    async def test_waits_for_the_first_item(self, harness: TransportHarness) -> None:
        """An idle node would poll, or not hear of new work until its wait is over."""
        ends = await harness.create(num_channels=1)
        assert await ends.node.lease(1, SHORT_S) == []
        waiting = asyncio.create_task(ends.node.lease(1, LONG_S))
        await harness.settle()
        await publish(ends.router, make_item())
        assert keys(await asyncio.wait_for(waiting, 5)) == [("r", 0)]

    @pytest.mark.parametrize("how", ["commit", "hand_back", "cancel", "dead_letter"])
    async def test_waits_for_a_channel_to_become_free(self, harness: TransportHarness, how: str) -> None:
        """The next question of a channel would lie there although its channel is free."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        [lease] = await ends.node.lease(1, 0)
        waiting = asyncio.create_task(ends.node.lease(1, LONG_S))
        await harness.settle()
        if how == "commit":
            await commit(ends.node, lease, outcome(lease))
        elif how == "hand_back":
            await hand_back(ends.node, lease)
        elif how == "cancel":
            await ends.router.cancel("r", [0])
        else:
            await ends.node.dead_letter(lease, OutOfMemoryError("no memory"))
        assert keys(await asyncio.wait_for(waiting, 5)) == [("r", 0 if how == "hand_back" else 1)]

    async def test_an_expired_lease_is_delivered_again_first(self, harness: TransportHarness) -> None:
        """Work of a dead node would be lost, or wait behind newer work, or keep its attempt number."""
        ends = await harness.create(num_channels=3)
        await publish(ends.router, make_item(0, channel_id=0))
        await publish(ends.router, make_item(1, channel_id=1))
        await publish(ends.router, make_item(2, channel_id=1))
        [untouched, lost] = await ends.node.lease(2, 0)
        await hand_back(ends.node, untouched)
        await harness.expire_leases()
        again = await ends.other_node.lease(8, 0)
        assert [(lease.item.question_index, lease.attempt) for lease in again] == [(1, 2), (0, 1)]
        assert again[0].item == lost.item

    async def test_each_delivery_counts_an_attempt(self, harness: TransportHarness) -> None:
        """A question that kills its node would never be recognised."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        attempts = []
        for _ in range(3):
            [lease] = await ends.node.lease(1, 0)
            attempts.append(lease.attempt)
            await harness.expire_leases()
        assert attempts == [1, 2, 3]

    async def test_an_interrupted_wait_takes_nothing(self, harness: TransportHarness) -> None:
        """An item would vanish with the node that was waiting for it."""
        ends = await harness.create(num_channels=1)
        waiting = asyncio.create_task(ends.node.lease(1, LONG_S))
        await harness.settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await publish(ends.router, make_item())
        assert keys(await ends.node.lease(1, SHORT_S)) == [("r", 0)]

    async def test_racing_nodes_get_each_item_once(self, harness: TransportHarness) -> None:
        """Two nodes would answer the same question."""
        ends = await harness.create(num_channels=4)
        for index in range(24):
            await publish(ends.router, make_item(index, index % 4))
        seen: Counter[tuple[str, int]] = Counter()

        async def work(node: WorkStreams) -> None:
            while leases := await node.lease(2, 0.05):
                for lease in leases:
                    seen[lease.item.key] += 1
                    await asyncio.sleep(0)
                    assert await commit(node, lease, outcome(lease)) is ReportState.COMMITTED

        await asyncio.gather(work(ends.node), work(ends.other_node))
        assert seen == {("r", index): 1 for index in range(24)}
        assert await ends.router.depths() == [0, 0, 0, 0]

    # ---- renew

    async def test_a_renewed_lease_holds(self, harness: TransportHarness) -> None:
        """Long answers would be computed twice."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        assert await renew(ends.node, lease)
        assert await ends.other_node.lease(1, 0) == []
        await harness.expire_leases()
        [again] = await ends.other_node.lease(1, 0)
        assert again.attempt == 2

    async def test_a_lost_lease_is_not_renewed(self, harness: TransportHarness) -> None:
        """A stalled node would steal the item back from its new owner."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lost] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        [held] = await ends.other_node.lease(1, 0)
        assert not await renew(ends.node, lost)
        assert await renew(ends.other_node, held)
        await commit(ends.other_node, held, outcome(held))
        assert not await renew(ends.other_node, held)

    async def test_each_renewal_of_a_call_stands_for_itself(self, harness: TransportHarness) -> None:
        """One lost lease would cost a node all it holds, or be kept alive with the others."""
        ends = await harness.create(num_channels=3)
        for index in range(3):
            await publish(ends.router, make_item(index, index))
        [first, second, third] = await ends.node.lease(3, 0)
        await ends.router.cancel("r", [1])
        await hand_back(ends.node, third)
        await harness.expire_leases()
        assert await ends.node.renew([first, second, first, third]) == [True, False, True, False]
        assert keys(await ends.other_node.lease(8, 0)) == [("r", 2)]

    # ---- report, read

    async def test_events_arrive_in_order(self, harness: TransportHarness) -> None:
        """A stream would be out of order, or its text altered."""
        ends = await harness.create(num_channels=2)
        await publish(ends.router, make_item(0, 0))
        await publish(ends.router, make_item(1, 1))
        [first, second] = await ends.node.lease(2, 0)
        sent = [started(first), started(second), delta(first, 0, "你"), delta(second, 0, "\n"), delta(first, 1, " ")]
        for event in sent:
            assert await emit(ends.node, first if event.question_index == 0 else second, event)
        await commit(ends.node, first, outcome(first, "你 "))
        received = [*await ends.results.read(2, 0), *await ends.results.read(100, 0)]
        assert received == [*sent, outcome(first, "你 ")]

    async def test_a_lost_lease_reports_nothing(self, harness: TransportHarness) -> None:
        """Text of a replaced attempt would reach the reader."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lost] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        [held] = await ends.other_node.lease(1, 0)
        assert not await emit(ends.node, lost, delta(lost))
        assert await emit(ends.other_node, held, started(held))
        assert await ends.results.read(10, 0) == [started(held)]

    async def test_read_takes_no_more_than_asked_for(self, harness: TransportHarness) -> None:
        """A burst would be taken in one piece, whatever the reader can hold."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        for seq in range(5):
            await emit(ends.node, lease, delta(lease, seq))
        assert [len(await ends.results.read(2, 0)) for _ in range(4)] == [2, 2, 1, 0]

    async def test_read_waits_for_the_first_event(self, harness: TransportHarness) -> None:
        """The aggregator would poll, or hear of an answer late."""
        ends = await harness.create(num_channels=1)
        assert await ends.results.read(1, SHORT_S) == []
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        waiting = asyncio.create_task(ends.results.read(10, LONG_S))
        await harness.settle()
        await commit(ends.node, lease, outcome(lease))
        assert await asyncio.wait_for(waiting, 5) == [outcome(lease)]

    async def test_an_interrupted_read_loses_nothing(self, harness: TransportHarness) -> None:
        """An answer would vanish with the read that was waiting for it."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        waiting = asyncio.create_task(ends.results.read(10, LONG_S))
        await harness.settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await commit(ends.node, lease, outcome(lease))
        assert await ends.results.read(10, SHORT_S) == [outcome(lease)]

    # ---- commit

    async def test_a_commit_reports_and_removes(self, harness: TransportHarness) -> None:
        """An answer would be reported but its item kept, or the other way round."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED
        assert await ends.router.depths() == [0]
        assert await ends.results.read(10, 0) == [outcome(lease)]

    async def test_a_repeated_commit_is_told_so(self, harness: TransportHarness) -> None:
        """After a lost reply the answer would be counted twice."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        await commit(ends.node, lease, outcome(lease))
        assert await commit(ends.node, lease, outcome(lease)) is ReportState.ALREADY_COMMITTED
        assert len(await ends.results.read(10, 0)) == 1

    async def test_a_stale_commit_is_refused(self, harness: TransportHarness) -> None:
        """A stalled node would take the item from the one that works on it now."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lost] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        [held] = await ends.other_node.lease(1, 0)
        assert await commit(ends.node, lost, outcome(lost, "stale")) is ReportState.STALE
        assert await ends.router.depths() == [1]
        assert await commit(ends.other_node, held, outcome(held)) is ReportState.COMMITTED
        assert await commit(ends.node, lost, outcome(lost, "stale")) is ReportState.ALREADY_COMMITTED
        assert await ends.results.read(10, 0) == [outcome(held)]

    async def test_an_expired_lease_that_nobody_took_still_commits(self, harness: TransportHarness) -> None:
        """A finished answer would be thrown away although nobody else works on the question."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED
        assert await ends.other_node.lease(1, 0) == []

    async def test_progress_and_outcome_go_together(self, harness: TransportHarness) -> None:
        """The end of a text would come after its outcome, or not at all."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        events = (started(lease), delta(lease, 0), outcome(lease))
        assert await ends.node.report([Report(lease=lease, events=events)]) == [ReportState.COMMITTED]
        assert await ends.results.read(10, 0) == [*events]

    async def test_a_lost_lease_reports_nothing_beside_its_neighbours(self, harness: TransportHarness) -> None:
        """One lost lease would take the other answers of a step along, or pass among them."""
        ends = await harness.create(num_channels=4)
        for index in range(4):
            await publish(ends.router, make_item(index, index))
        leases = await ends.node.lease(4, 0)
        await ends.router.cancel("r", [1])
        await hand_back(ends.node, leases[2])
        reports = [
            Report(lease=leases[0], events=(delta(leases[0]), outcome(leases[0]))),
            Report(lease=leases[1], events=(outcome(leases[1]),)),
            Report(lease=leases[2], events=(delta(leases[2]), outcome(leases[2]))),
            Report(lease=leases[1], events=(delta(leases[1]),)),
            Report(lease=leases[3], events=(delta(leases[3]),)),
        ]
        assert await ends.node.report(reports) == [
            ReportState.COMMITTED,
            ReportState.ALREADY_COMMITTED,
            ReportState.STALE,
            ReportState.STALE,
            ReportState.HELD,
        ]
        assert await ends.results.read(10, 0) == [delta(leases[0]), outcome(leases[0]), delta(leases[3])]
        assert await ends.router.depths() == [0, 0, 1, 1]

    async def test_a_repeated_call_commits_once(self, harness: TransportHarness) -> None:
        """After a lost reply every answer of a step would be counted twice."""
        ends = await harness.create(num_channels=3)
        for index in range(3):
            await publish(ends.router, make_item(index, index))
        leases = await ends.node.lease(3, 0)
        reports = [Report(lease=lease, events=(delta(lease), outcome(lease))) for lease in leases]
        assert await ends.node.report(reports) == [ReportState.COMMITTED] * 3
        assert await ends.node.report(reports) == [ReportState.ALREADY_COMMITTED] * 3
        assert len(await ends.results.read(100, 0)) == 6

    async def test_a_question_twice_in_a_call_commits_once(self, harness: TransportHarness) -> None:
        """Its first outcome would be replaced, or its text continued after its end."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        reports = [
            Report(lease=lease, events=(delta(lease),)),
            Report(lease=lease, events=(outcome(lease, "first"),)),
            Report(lease=lease, events=(outcome(lease, "second"),)),
            Report(lease=lease, events=(delta(lease, 1),)),
        ]
        assert await ends.node.report(reports) == [
            ReportState.HELD,
            ReportState.COMMITTED,
            ReportState.ALREADY_COMMITTED,
            ReportState.STALE,
        ]
        assert await ends.results.read(10, 0) == [delta(lease), outcome(lease, "first")]

    @pytest.mark.parametrize("change", [{"question_index": 1}, {"request_id": "other"}, {"attempt": 2}])
    async def test_a_lease_reports_only_about_its_own_question(
        self, harness: TransportHarness, change: dict[str, Any]
    ) -> None:
        """A mixed-up node would answer one question with another's text."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        with pytest.raises(InvariantError):
            Report(lease=lease, events=(delta(lease), replace(outcome(lease), **change)))
        with pytest.raises(InvariantError):
            Report(lease=lease, events=(outcome(lease), delta(lease)))
        with pytest.raises(InvariantError):
            Report(lease=lease, events=())

    # ---- hand_back, dead_letter

    async def test_a_handed_back_item_is_next_and_counts_no_attempt(self, harness: TransportHarness) -> None:
        """A drain would reorder a channel, or push healthy questions towards the dead letters."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        [lease] = await ends.node.lease(1, 0)
        assert await hand_back(ends.node, lease)
        assert await ends.router.depths() == [2]
        [again] = await ends.other_node.lease(1, 0)
        assert (again.item.question_index, again.attempt) == (0, 1)

    async def test_a_handed_back_lease_works_no_more(self, harness: TransportHarness) -> None:
        """A node would report on an item it gave away, under the attempt number of its new owner."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [given] = await ends.node.lease(1, 0)
        await hand_back(ends.node, given)
        assert not await hand_back(ends.node, given)
        assert not await renew(ends.node, given)
        [held] = await ends.node.lease(1, 0)
        assert not await emit(ends.node, given, delta(given))
        assert await commit(ends.node, given, outcome(given)) is ReportState.STALE
        assert await renew(ends.node, held)
        assert await ends.results.read(10, 0) == []

    async def test_each_hand_back_of_a_call_stands_for_itself(self, harness: TransportHarness) -> None:
        """A drain would stop at the first lease that is lost already, and keep the rest until they run out."""
        ends = await harness.create(num_channels=3)
        for index in range(3):
            await publish(ends.router, make_item(index, index))
        [first, second, third] = await ends.node.lease(3, 0)
        await commit(ends.node, second, outcome(second))
        assert await ends.node.hand_back([first, second, third, first]) == [True, False, True, False]
        again = await ends.other_node.lease(8, 0)
        assert [(lease.item.question_index, lease.attempt) for lease in again] == [(0, 1), (2, 1)]

    async def test_a_lost_lease_cannot_be_handed_back(self, harness: TransportHarness) -> None:
        """A stalled node would interrupt the new owner."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lost] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        [held] = await ends.other_node.lease(1, 0)
        assert not await hand_back(ends.node, lost)
        assert await renew(ends.other_node, held)

    async def test_a_dead_letter_answers_with_an_error(self, harness: TransportHarness) -> None:
        """A poisonous question would leave its caller waiting, or hold up its channel."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        [lease] = await ends.node.lease(1, 0)
        error = OutOfMemoryError("no memory for this question")
        assert await ends.node.dead_letter(lease, error)
        [reported] = await ends.results.read(10, 0)
        assert isinstance(reported, ChannelResult)
        assert (reported.key, reported.channel_id, reported.attempt) == (("r", 0), 0, 1)
        assert (reported.finish_reason, reported.error) == (FinishReason.ERROR, error.info)
        assert keys(await ends.node.lease(1, 0)) == [("r", 1)]
        assert not await ends.node.dead_letter(lease, error)
        assert await ends.results.read(10, 0) == []

    async def test_a_lost_lease_is_no_dead_letter(self, harness: TransportHarness) -> None:
        """A stalled node would kill a question that another one is answering."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [lost] = await ends.node.lease(1, 0)
        await harness.expire_leases()
        [held] = await ends.other_node.lease(1, 0)
        assert not await ends.node.dead_letter(lost, OutOfMemoryError("no memory"))
        assert await commit(ends.other_node, held, outcome(held)) is ReportState.COMMITTED

    # ---- cancel

    async def test_unleased_questions_vanish(self, harness: TransportHarness) -> None:
        """Cancelled questions would still be computed, or the neighbours withdrawn with them."""
        ends = await harness.create(num_channels=2)
        for index in range(4):
            await publish(ends.router, make_item(index))
        await publish(ends.router, make_item(0, channel_id=1, request_id="other"))
        await ends.router.cancel("r", [0, 2, 77])
        assert await ends.router.depths() == [2, 1]
        assert keys(await ends.node.lease(8, 0)) == [("r", 1), ("other", 0)]
        assert await ends.node.cancellations(0) == []

    async def test_a_whole_request_can_be_withdrawn(self, harness: TransportHarness) -> None:
        """Parts of a cancelled request would run on."""
        ends = await harness.create(num_channels=2)
        for index in range(4):
            await publish(ends.router, make_item(index, index % 2))
        [lease, _] = await ends.node.lease(2, 0)
        await ends.router.cancel("r")
        await ends.router.cancel("unknown")
        assert await ends.router.depths() == [0, 0]
        assert await ends.node.lease(8, 0) == []
        assert sorted(await ends.node.cancellations(0)) == [("r", 0), ("r", 1)]
        assert not await renew(ends.node, lease)

    async def test_the_holder_is_told_once(self, harness: TransportHarness) -> None:
        """A node would go on with a question nobody wants, or be told for ever."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item(0))
        await publish(ends.router, make_item(1))
        [lease] = await ends.node.lease(1, 0)
        await ends.router.cancel("r", [0])
        assert await ends.node.cancellations(0) == [("r", 0)]
        assert await ends.node.cancellations(0) == []
        assert not await renew(ends.node, lease)
        assert not await emit(ends.node, lease, delta(lease))
        assert not await hand_back(ends.node, lease)
        assert await commit(ends.node, lease, outcome(lease)) is ReportState.ALREADY_COMMITTED
        assert await ends.results.read(10, 0) == []
        assert keys(await ends.node.lease(1, 0)) == [("r", 1)]

    async def test_a_holder_that_waits_is_woken(self, harness: TransportHarness) -> None:
        """A cancelled question would occupy its slot until the next look."""
        ends = await harness.create(num_channels=1)
        assert await ends.node.cancellations(SHORT_S) == []
        await publish(ends.router, make_item())
        await ends.node.lease(1, 0)
        waiting = asyncio.create_task(ends.node.cancellations(LONG_S))
        await harness.settle()
        await ends.router.cancel("r", [0])
        assert await asyncio.wait_for(waiting, 5) == [("r", 0)]

    async def test_an_interrupted_wait_loses_no_cancellation(self, harness: TransportHarness) -> None:
        """A withdrawn question would run to its end because a wait was cancelled."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        await ends.node.lease(1, 0)
        waiting = asyncio.create_task(ends.node.cancellations(LONG_S))
        await harness.settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await ends.router.cancel("r")
        assert await ends.node.cancellations(SHORT_S) == [("r", 0)]

    async def test_an_expired_lease_of_a_cancelled_question_is_not_delivered(self, harness: TransportHarness) -> None:
        """A dead node's cancelled question would come back to life."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        await ends.node.lease(1, 0)
        await harness.expire_leases()
        await ends.router.cancel("r")
        assert await ends.other_node.lease(1, 0) == []

    async def test_an_id_can_be_used_again_after_its_cancellation(self, harness: TransportHarness) -> None:
        """A retried submit would be lost, or killed by the withdrawal of the first one."""
        ends = await harness.create(num_channels=1)
        await publish(ends.router, make_item())
        [former] = await ends.node.lease(1, 0)
        await ends.router.cancel("r")
        await publish(ends.router, make_item())
        [lease] = await ends.node.lease(1, 0)
        assert lease.attempt == 1
        assert await ends.node.cancellations(0) == []
        assert await commit(ends.node, former, outcome(former, "former")) is ReportState.STALE
        assert await commit(ends.node, lease, outcome(lease)) is ReportState.COMMITTED
        assert await ends.results.read(10, 0) == [outcome(lease)]

    # ---- conservation

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), max_size=60))
    def test_every_question_ends_once_or_is_there(self, operations: list[tuple[str, int]]) -> None:
        """A question would be lost or answered twice by some order of deliveries, losses and withdrawals."""
        asyncio.run(_conserve(self.make_harness(), operations))


async def _conserve(harness: TransportHarness, operations: list[tuple[str, int]]) -> None:
    ends = await harness.create(num_channels=3, max_entries_per_channel=3)
    ledger = _Ledger(ends)
    try:
        for operation, number in operations:
            if operation == "expire":
                await harness.expire_leases()
            else:
                await getattr(ledger, operation)(number)
            await ledger.check()
        await harness.expire_leases()
        while leases := await ends.node.lease(8, 0):
            for lease in leases:
                await ledger.finish(lease)
        await ledger.check()
        assert not ledger.live, "questions were lost"
        assert await ends.router.depths() == [0, 0, 0]
    finally:
        await harness.close()


@dataclass(slots=True)
class _Ledger:
    """Does operations and knows which questions must be there, and how the others ended."""

    ends: Ends
    live: set[int] = field(default_factory=set)
    withdrawn: set[int] = field(default_factory=set)
    committed: Counter[int] = field(default_factory=Counter)
    reported: Counter[int] = field(default_factory=Counter)
    leases: list[Lease] = field(default_factory=list)

    async def publish(self, number: int) -> None:
        if number in self.withdrawn or number in self.committed:
            return
        try:
            await publish(self.ends.router, make_item(number, number % 3))
            self.live.add(number)
        except QueueFullError:
            assert number not in self.live
            assert (await self.ends.router.depths())[number % 3] == 3

    async def lease(self, number: int) -> None:
        node = self.ends.node if number % 2 else self.ends.other_node
        leases = await node.lease(1 + number % 3, 0)
        assert len({lease.item.channel_id for lease in leases}) == len(leases) <= 1 + number % 3
        assert {lease.item.question_index for lease in leases} <= self.live
        self.leases += leases

    async def interrupted_lease(self, number: int) -> None:
        waiting = asyncio.create_task(self.ends.node.lease(2, LONG_S))
        await asyncio.sleep(0)
        if number % 2:
            await self.publish(number)
        waiting.cancel()
        for outcome_of_wait in await asyncio.gather(waiting, return_exceptions=True):
            if not isinstance(outcome_of_wait, BaseException):
                self.leases += outcome_of_wait

    async def commit(self, number: int) -> None:
        if self.leases:
            await self.finish(self.leases[number % len(self.leases)])

    async def commit_all(self, number: int) -> None:
        await self.finish(*self.leases[number % 3 :])

    async def finish(self, *leases: Lease) -> None:
        states = await self.ends.node.report([Report(lease=lease, events=(outcome(lease),)) for lease in leases])
        for lease, state in zip(leases, states, strict=True):
            self.note(lease.item.question_index, state)

    def note(self, index: int, state: ReportState) -> None:
        if state is ReportState.COMMITTED:
            self.committed[index] += 1
            self.live.remove(index)
        else:
            assert (state is ReportState.STALE) == (index in self.live)

    async def hand_back(self, number: int) -> None:
        if self.leases:
            await hand_back(self.ends.node, self.leases[number % len(self.leases)])

    async def renew(self, number: int) -> None:
        if self.leases:
            lease = self.leases[number % len(self.leases)]
            if await renew(self.ends.node, lease):
                assert lease.item.question_index in self.live

    async def dead_letter(self, number: int) -> None:
        if self.leases:
            lease = self.leases[number % len(self.leases)]
            if await self.ends.node.dead_letter(lease, OutOfMemoryError("no memory")):
                self.committed[lease.item.question_index] += 1
                self.live.remove(lease.item.question_index)

    async def cancel(self, number: int) -> None:
        await self.ends.router.cancel("r", [number])
        if number in self.live:
            self.live.remove(number)
            self.withdrawn.add(number)

    async def check(self) -> None:
        for event in await self.ends.results.read(100, 0):
            self.reported[event.question_index] += 1
        assert self.reported == self.committed
        assert set(self.committed.values()) <= {1}
        assert sum(await self.ends.router.depths()) == len(self.live)
