"""The workload and its checker against the embedded engine: a clean engine is clean, a broken one is found out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from common.errors import StoreUnavailableError
from common.types import Result, StreamEvent, StreamEventType
from kev.engine import AsyncEngine
from kev.testing import scripted_engine
from tests.chaos.checker import Kind, check
from tests.chaos.history import Phase, Submitted
from tests.chaos.workload import Workload, WorkloadSettings

SETTINGS = WorkloadSettings(num_requests=60, duration_s=20, settle_s=5, short_timeout_ms=1, wait_s=0.05, pause_s=0.002)
ROUTER = {"max_parallel_queries": 4, "channel_pool_size": 8}


def engine(**router: object) -> AsyncEngine:
    return scripted_engine(lambda prompt: prompt, {"kev": {"router": ROUTER | router, "core": {"max_tokens": 200}}})


@pytest.mark.parametrize("overflow_policy", ["wait", "queue", "reject"])
async def test_the_embedded_engine_is_clean(overflow_policy: str) -> None:
    """A violation without any fault is a bug of the engine, or of the checker that is to judge the cluster."""
    async with engine(overflow_policy=overflow_policy) as backend:
        workload = Workload(backend, replace(SETTINGS, deadline_share=0.2, cancel_share=0.2))
        report = check(await workload.run())
    assert report.clean, report.summary()
    assert report.num_answers > 50
    assert report.num_answers + report.num_placeholders == report.num_questions
    assert report.num_unknown == 0
    assert report.num_events > report.num_questions
    assert set(report.reasons) <= {"QUEUE_FULL", "BUDGET_SPENT"}
    assert len(workload.latencies_s) == SETTINGS.num_requests


async def test_the_run_ends_when_its_time_is_up() -> None:
    """A bounded run that goes on would hold up every other test."""
    async with engine() as backend:
        workload = Workload(backend, replace(SETTINGS, num_requests=10**9, duration_s=0.3))
        async with asyncio.timeout(10):
            report = check(await workload.run())
    assert report.clean, report.summary()
    assert report.num_questions > 0


class Faulty:
    """An engine with one flaw."""

    def __init__(self, inner: AsyncEngine) -> None:
        self._inner = inner
        self._num_calls = 0
        self._former: Result | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LosesOutcomes(Faulty):
    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        return (await self._inner.wait(request_id, timeout))[1:]


class MixesAnswers(Faulty):
    async def wait(self, request_id: str, timeout: float | None = None) -> list[Result]:
        results = await self._inner.wait(request_id, timeout)
        former, self._former = self._former, results[0]
        return results if former is None else [replace(results[0], text=former.text), *results[1:]]


class ChangesItsMind(Faulty):
    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        self._num_calls += 1
        attempt = self._num_calls
        async for event in self._inner.stream(request_id, from_event_index):
            if event.result is not None:
                event = replace(event, result=replace(event.result, attempt=attempt))
            yield event


class ForgetsEvents(Faulty):
    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        async for event in self._inner.stream(request_id, from_event_index):
            if event.type is not StreamEventType.STARTED:
                yield event


class RewindsSilently(Faulty):
    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        async for event in self._inner.stream(request_id, 0):
            yield event
            if event.event_index == 2 and not from_event_index:
                raise StoreUnavailableError("the stream broke")


WRONG = [
    (LosesOutcomes, Kind.LOST, 0.0),
    (MixesAnswers, Kind.CROSS_CHANNEL, 0.0),
    (ChangesItsMind, Kind.DUPLICATED_VISIBLE, 1.0),
    (ForgetsEvents, Kind.SEQ_GAP, 1.0),
    (RewindsSilently, Kind.SEQ_GAP, 1.0),
]


@pytest.mark.parametrize(("flaw", "kind", "stream_share"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_flaw_is_found(flaw: type[Faulty], kind: Kind, stream_share: float) -> None:
    """A check that finds nothing in a broken engine proves nothing about a whole one."""
    settings = replace(
        SETTINGS,
        num_requests=12,
        stream_share=stream_share,
        attach_share=stream_share,
        cancel_share=0,
        deadline_share=0,
    )
    async with engine() as backend:
        report = check(await Workload(flaw(backend), settings).run())  # type: ignore[arg-type]
    assert report.counts()[kind] > 0, report.summary()


class LosesReplies(Faulty):
    """Every other call takes effect and its reply is lost; streams break after three events."""

    def _breaks(self) -> bool:
        self._num_calls += 1
        return self._num_calls % 2 == 0

    async def submit(self, queries: Any, /, **options: Any) -> str:
        request_id = await self._inner.submit(queries, **options)
        if self._breaks():
            raise StoreUnavailableError("the reply was lost")
        return request_id

    async def stream(self, request_id: str, from_event_index: int = 0) -> AsyncIterator[StreamEvent]:
        async for event in self._inner.stream(request_id, from_event_index):
            yield event
            if event.event_index % 3 == 2 and event.type is not StreamEventType.DONE:
                raise StoreUnavailableError("the stream broke")


async def test_lost_replies_are_no_violation() -> None:
    """A client that repeats its submission and resumes its stream gets everything once."""
    async with engine() as backend:
        history = await Workload(LosesReplies(backend), replace(SETTINGS, stream_share=1.0)).run()  # type: ignore[arg-type]
    report = check(history)
    assert report.clean, report.summary()
    assert report.reasons["STORE_UNAVAILABLE"] > 60
    assert any(isinstance(record, Submitted) and record.phase is Phase.INFO for record in history)


async def test_a_refused_run_owes_nothing() -> None:
    """What was never accepted is not lost."""
    async with engine() as backend:
        report = check(await Workload(backend, replace(SETTINGS, num_requests=5, max_tokens=0)).run())
    assert report.clean, report.summary()
    assert (report.num_questions, report.num_unknown) == (0, 0)
    assert report.reasons == {"INVALID_QUERY": 5}
    assert re.search("0 questions, 0 answers", report.summary())
