"""The worker between work streams and engine: what it takes, what it reports, whom it leaves alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.byte_tokenizer import EOS_ID, byte_tokenizer, encode
from common.clock import ManualClock
from common.config import Config
from common.memory import MemoryTransport
from common.ports import Lease, Report, ReportState, WorkStreams
from common.tokenization import Detokenizer
from common.types import (
    ChannelDelta,
    ChannelEvent,
    ChannelResult,
    ChannelStarted,
    FinishReason,
    IsolationLevel,
    Prompt,
    SamplingParams,
    WorkItem,
)
from inference_svc.pile import Key, Pile, joined_deltas
from inference_svc.plan import StepOutput, StepPlan
from inference_svc.scripted import ScriptedNode, ScriptedRunner
from inference_svc.worker import Worker, WorkerSettings
from tests.work_calls import publish

LONG_S = 20.0
"""A wait that a test ends by what it does."""
LEASE_S = 60.0
_WHERE = {"request_id": "r", "question_index": 0, "channel_id": 0}
_STARTED = ChannelStarted(**_WHERE, slot=0, attempt=1, node_id="n")
_RESULT = ChannelResult(**_WHERE, finish_reason=FinishReason.STOP)


# ---- what has piled up


def _delta(text: str, number: int, index: int = 0) -> ChannelDelta:
    return ChannelDelta(
        request_id="r", question_index=index, channel_id=0, attempt=1, seq=number, text=text, num_tokens=number + 1
    )


@given(texts=st.lists(st.text(max_size=4), max_size=8), started=st.booleans(), ended=st.booleans())
def test_joining_keeps_the_text_the_count_and_the_order(texts: list[str], started: bool, ended: bool) -> None:
    """A reader would miss text, see it twice, or see the outcome before the end of the text."""
    deltas = [_delta(text, number) for number, text in enumerate(texts)]
    events: list[ChannelEvent] = [*([_STARTED] if started else []), *deltas, *([_RESULT] if ended else [])]
    joined = joined_deltas(events)
    kept = [event for event in joined if isinstance(event, ChannelDelta)]
    assert "".join(delta.text for delta in kept) == "".join(texts)
    assert [delta.num_tokens for delta in kept] == ([len(texts)] if texts else [])
    assert [event for event in joined if not isinstance(event, ChannelDelta)] == [
        event for event in events if not isinstance(event, ChannelDelta)
    ]
    assert not any(isinstance(a, ChannelDelta) and isinstance(b, ChannelDelta) for a, b in pairwise(joined))


@given(moves=st.lists(st.one_of(st.integers(0, 1), st.sampled_from(["take", "full"])), max_size=40))
def test_what_finds_no_room_is_reported_later_without_a_gap(moves: list[int | str]) -> None:
    """A reader would miss text or see it twice after the event stream was full."""
    held = {("r", index): _lease(index) for index in (0, 1)}
    pile, given_texts, reported = Pile(), {0: "", 1: ""}, {0: list[ChannelDelta](), 1: list[ChannelDelta]()}
    for number, move in enumerate([*moves, "take"]):
        if isinstance(move, int):
            pile.add([_delta(chr(97 + number % 26), number, move)])
            given_texts[move] += chr(97 + number % 26)
            continue
        for report in pile.take(held):
            if move == "full":
                pile.put_back(report)
            else:
                reported[report.lease.item.question_index] += [e for e in report.events if isinstance(e, ChannelDelta)]
    assert {index: "".join(delta.text for delta in deltas) for index, deltas in reported.items()} == given_texts
    assert all([delta.seq for delta in deltas] == list(range(len(deltas))) for deltas in reported.values())


def test_events_of_others_are_dropped() -> None:
    """Text of a former attempt would be reported under the new one's lease."""
    pile = Pile()
    pile.add([_delta("x", 0), _delta("y", 0, index=1)])
    assert pile.take({("r", 0): _lease(0, attempt=2)}) == []
    assert pile.take({("r", 1): _lease(1)}) == []


# ---- the worker itself


def _item(index: int, question: str) -> WorkItem:
    return WorkItem(
        request_id="r",
        question_index=index,
        channel_id=index,
        prompt=Prompt(ids=tuple(encode(question))),
        num_shared=0,
        sampling=SamplingParams(max_tokens=64),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=3_600_000,
        fingerprint="f",
    )


def _lease(index: int, attempt: int = 1) -> Lease:
    return Lease(lease_id=f"{index}", item=_item(index, "?"), attempt=attempt, age_ms=0.0)


class GatedRunner(ScriptedRunner):
    """Echoes; its forwards wait for the gate, and it remembers who shared one."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: prompt)
        self.gate = threading.Event()
        self.gate.set()
        self.is_held_back = threading.Event()
        self.forwards: list[frozenset[str]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        self.forwards.append(
            frozenset(bytes(token - 3 for token in segment.prompt_ids).decode() for segment in plan.segments)
        )
        if not self.gate.is_set():
            self.is_held_back.set()
            self.gate.wait(LONG_S)
        return super().execute(plan)


class CountingTransport(MemoryTransport):
    """Remembers what it granted and the calls that report, and can hold one back."""

    def __init__(self, clock: ManualClock, max_events: int = 65_536) -> None:
        super().__init__(num_channels=4, clock=clock, lease_timeout_s=LEASE_S, max_events=max_events)
        self.calls: list[list[Report]] = []
        self.granted: set[tuple[Key, int]] = set()
        self.open = asyncio.Event()
        self.open.set()

    async def lease(self, max_items: int, wait_s: float) -> list[Lease]:
        leases = await super().lease(max_items, wait_s)
        self.granted |= {(lease.item.key, lease.attempt) for lease in leases}
        return leases

    async def until_granted(self, key: Key, attempt: int) -> None:
        async with asyncio.timeout(LONG_S):
            while (key, attempt) not in self.granted:
                await asyncio.sleep(0.001)

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        self.calls.append(list(reports))
        await self.open.wait()
        return await super().report(reports)


@asynccontextmanager
async def _working(work: WorkStreams, clock: ManualClock, runner: ScriptedRunner) -> AsyncIterator[Worker]:
    settings = WorkerSettings(
        node_id="n", max_slots=4, fingerprint="f", eos_ids=frozenset({EOS_ID}), lease_timeout_s=LEASE_S, max_attempts=3
    )
    tokenizer = byte_tokenizer()
    worker = Worker(work, clock, settings, lambda: Detokenizer(tokenizer))
    node = ScriptedNode(Config(), runner, clock)
    engine = node.start(worker.events_from(asyncio.get_running_loop()))
    running = asyncio.create_task(worker.run(engine))
    try:
        yield worker
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await asyncio.to_thread(node.close)


async def _read_to_the_end(transport: MemoryTransport, num_outcomes: int) -> dict[Key, list[ChannelEvent]]:
    events: dict[Key, list[ChannelEvent]] = {}
    async with asyncio.timeout(LONG_S):
        while num_outcomes:
            for event in await transport.read(2, LONG_S):
                events.setdefault((event.request_id, event.question_index), []).append(event)
                num_outcomes -= isinstance(event, ChannelResult)
    return events


def _text_of(events: Sequence[ChannelEvent]) -> str:
    deltas = [event for event in events if isinstance(event, ChannelDelta)]
    assert [delta.seq for delta in deltas] == list(range(len(deltas)))
    return "".join(delta.text for delta in deltas)


async def _lose(transport: MemoryTransport, clock: ManualClock, times: int) -> None:
    for _ in range(times):
        await transport.lease(1, 0)
        clock.advance(LEASE_S)


async def test_a_question_has_its_last_try_alone() -> None:
    """One that kills its node would take the others along for the third time, until all are dead letters."""
    clock, runner = ManualClock(), GatedRunner()
    transport = CountingTransport(clock)
    await publish(transport, _item(0, "suspect"))
    await _lose(transport, clock, times=2)
    for index in (1, 2, 3):
        await publish(transport, _item(index, f"sibling {index}"))
    async with _working(transport, clock, runner):
        events = await _read_to_the_end(transport, 4)
    assert {key: _text_of(events[key]) for key in events} == {
        ("r", 0): "suspect",
        **{("r", index): f"sibling {index}" for index in (1, 2, 3)},
    }
    assert [end.attempt for end in (events["r", 0][-1], events["r", 1][-1])] == [3, 1]
    with_suspect = {forward for forward in runner.forwards if "suspect" in forward}
    assert with_suspect == {frozenset({"suspect"})}
    assert frozenset({"sibling 1", "sibling 2", "sibling 3"}) in runner.forwards, "the others shared forwards"


async def test_a_last_try_waits_for_what_runs() -> None:
    """A question on its last try would start beside those that its node is just answering."""
    clock, runner = ManualClock(), GatedRunner()
    transport = CountingTransport(clock)
    await publish(transport, _item(0, "suspect"))
    await _lose(transport, clock, times=1)
    await transport.lease(1, 0)
    clock.advance(LEASE_S - 1)
    await publish(transport, _item(1, "running"))
    runner.gate.clear()
    async with _working(transport, clock, runner):
        assert await asyncio.to_thread(runner.is_held_back.wait, LONG_S)
        clock.advance(1)
        await publish(transport, _item(2, "late"))
        await transport.until_granted(("r", 0), 3)
        runner.gate.set()
        events = await _read_to_the_end(transport, 3)
    assert [_text_of(events["r", index]) for index in range(3)] == ["suspect", "running", "late"]
    assert {forward for forward in runner.forwards if "suspect" in forward} == {frozenset({"suspect"})}
    assert events["r", 2][-1].attempt == 1, "company that was sent away has lost no attempt"


async def test_the_first_event_leaves_at_once_and_the_rest_goes_together() -> None:
    """Every token would cost a call, or the first one wait for company."""
    clock, runner = ManualClock(), GatedRunner()
    transport = CountingTransport(clock)
    transport.open.clear()
    for index in range(3):
        await publish(transport, _item(index, "a longer question"))
    async with _working(transport, clock, runner):
        async with asyncio.timeout(LONG_S):
            while not transport.calls or len(runner.forwards) < 18:
                await asyncio.sleep(0.001)
        assert len(transport.calls) == 1
        transport.open.set()
        events = await _read_to_the_end(transport, 3)
    assert {_text_of(events["r", index]) for index in range(3)} == {"a longer question"}
    assert isinstance(transport.calls[0][0].events[0], ChannelStarted)
    assert sum(len(call) for call in transport.calls) < 3 * len("a longer question")
    assert len(transport.calls) <= 4


async def test_a_full_event_stream_costs_no_text() -> None:
    """Text would be missing, out of order or there twice once the reader was slow."""
    clock, runner = ManualClock(), GatedRunner()
    transport = CountingTransport(clock, max_events=1)
    for index in range(2):
        await publish(transport, _item(index, f"question {index}"))
    async with _working(transport, clock, runner):
        events = await _read_to_the_end(transport, 2)
    assert [_text_of(events["r", index]) for index in range(2)] == ["question 0", "question 1"]
    assert all(isinstance(events["r", index][-1], ChannelResult) for index in range(2))


async def test_a_question_that_comes_back_is_reported_under_its_new_lease_only() -> None:
    """A node that was asleep would mix the text of two attempts."""
    clock, runner = ManualClock(), GatedRunner()
    transport = CountingTransport(clock)
    await publish(transport, _item(0, "question"))
    runner.gate.clear()
    async with _working(transport, clock, runner):
        assert await asyncio.to_thread(runner.is_held_back.wait, LONG_S)
        clock.advance(LEASE_S)
        await publish(transport, _item(1, "wakes the worker"))
        await transport.until_granted(("r", 0), 2)
        runner.gate.set()
        events = await _read_to_the_end(transport, 2)
    again = [event for event in events["r", 0] if event.attempt == 2]
    assert _text_of(again) == "question"
    assert isinstance(again[-1], ChannelResult) and again[-1].finish_reason is FinishReason.STOP
    assert not any(isinstance(event, ChannelResult) for event in events["r", 0][:-1])


async def test_leaving_gives_back_what_is_held() -> None:
    """A drained node's questions would wait for its leases to run out."""
    clock, runner = ManualClock(), GatedRunner()
    transport = CountingTransport(clock)
    for index in range(2):
        await publish(transport, _item(index, "question"))
    runner.gate.clear()
    async with _working(transport, clock, runner):
        assert await asyncio.to_thread(runner.is_held_back.wait, LONG_S)
        runner.gate.set()
        transport.open.clear()
    leases = await transport.lease(4, 0)
    assert [(lease.item.question_index, lease.attempt) for lease in leases] == [(0, 1), (1, 1)]


class ForgetfulTransport(CountingTransport):
    """Says of the first report that its leases are lost, as a store does whose group was destroyed."""

    async def report(self, reports: Sequence[Report]) -> list[ReportState]:
        if not self.calls:
            self.calls.append(list(reports))
            return [ReportState.STALE] * len(reports)
        return await super().report(reports)


async def test_stopping_after_a_lost_lease_is_nobodys_cancellation() -> None:
    """A caller would read "cancelled" of a question that nobody withdrew, with half an answer."""
    clock, runner = ManualClock(), GatedRunner()
    transport = ForgetfulTransport(clock)
    await publish(transport, _item(0, "a question of some length"))
    async with _working(transport, clock, runner) as worker:
        async with asyncio.timeout(LONG_S):
            while worker.num_held or not transport.calls:
                await asyncio.sleep(0.001)
        clock.advance(LEASE_S)
        await publish(transport, _item(1, "wakes the worker"))
        events = await _read_to_the_end(transport, 2)
    told = [event for call in transport.calls for report in call for event in report.events]
    assert not any(isinstance(e, ChannelResult) and e.finish_reason is FinishReason.CANCELLED for e in told)
    again = [event for event in events["r", 0] if event.attempt == 2]
    assert _text_of(again) == "a question of some length"
