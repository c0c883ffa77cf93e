"""The router service: acceptance, registration, publication, overflow, cancellation, drain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import ManualClock
from common.ending import Ending
from common.errors import (
    DrainingError,
    InvalidRequestError,
    KevError,
    PromptTooLongError,
    QueueFullError,
    RequestConflictError,
    StoreUnavailableError,
)
from common.tokenization import TooManyTokens
from common.types import (
    AggregateMode,
    ChannelResult,
    ErrorInfo,
    FinishReason,
    IsolationLevel,
    OverflowPolicy,
    Prompt,
    QuestionSpec,
    RequestRecord,
    RequestSpec,
    SamplingParams,
    Strategy,
    Truncate,
    WorkItem,
)
from router_svc.service import RouterService
from router_svc.settings import RouterSettings

Key = tuple[str, int]


class LetterTokenizer:
    """One token per character."""

    fingerprint = "letters"

    def __init__(self) -> None:
        self.threads: list[int] = []

    def render(self, question: str, system_prompt: str, *, max_prompt_tokens: int, truncate: Truncate) -> Prompt:
        self.threads.append(threading.get_ident())
        ids = tuple(map(ord, system_prompt + question))
        if len(ids) > max_prompt_tokens:
            raise TooManyTokens(len(ids), max_prompt_tokens)
        return Prompt(ids=ids, boundaries=(len(system_prompt),) if system_prompt else ())

    def encode_plain(self, text: str) -> list[int]:
        return list(map(ord, text))


class Registry:
    """Remembers requests; ``gate`` holds registrations up."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.records: dict[str, RequestRecord] = {}
        self.withdrawn: list[str] = []
        self.gate: asyncio.Event | None = None
        self.on_withdraw: Callable[[RequestRecord], None] = lambda record: None
        self.withdraw_errors: list[KevError] = []
        self.register_errors: list[KevError] = []
        self.lookup_errors: list[KevError] = []
        self.lookup_gate: asyncio.Event | None = None
        self.lookups = 0

    def _same(self, request_id: str, digest: str) -> bool:
        known = self.records.get(request_id)
        if known is not None and known.content_digest != digest:
            raise RequestConflictError(f"{request_id} is taken")
        return known is not None

    async def lookup(self, request_id: str, content_digest: str) -> bool:
        await asyncio.sleep(0)
        self.lookups += 1
        if self.lookup_gate is not None:
            await self.lookup_gate.wait()
        if self.lookup_errors:
            raise self.lookup_errors.pop()
        return self._same(request_id, content_digest)

    async def register(self, record: RequestRecord) -> bool:
        await asyncio.sleep(0)
        if self._same(record.request_id, record.content_digest):
            return False
        if self.register_errors:
            raise self.register_errors.pop()
        self.records[record.request_id] = record
        self.log.append(f"register {record.request_id}")
        if self.gate is not None:
            await self.gate.wait()
        return True

    async def withdraw(self, request_id: str) -> None:
        await asyncio.sleep(0)
        if self.withdraw_errors:
            raise self.withdraw_errors.pop()
        self.withdrawn.append(request_id)
        record = self.records.pop(request_id, None)
        if record is not None:
            self.on_withdraw(record)

    async def unregistered(self, request_ids: Sequence[str]) -> list[str]:
        await asyncio.sleep(0)
        return [request_id for request_id in request_ids if request_id not in self.records]

    async def restore(self, record: RequestRecord, age_ms: int) -> None:
        await asyncio.sleep(0)
        if not self._same(record.request_id, record.content_digest):
            self.records[record.request_id] = record
            self.log.append(f"restore {record.request_id} of {age_ms} ms ago")


class Work:
    """Remembers items; refuses or holds up what it is told to."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.items: list[WorkItem] = []
        self.errors: list[KevError] = []
        self.gate: asyncio.Event | None = None

    async def publish(self, items: Sequence[WorkItem]) -> list[QueueFullError | None]:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        refusals: list[QueueFullError | None] = []
        for item in items:
            error = self.errors.pop(0) if self.errors else None
            if error is not None and not isinstance(error, QueueFullError):
                raise error
            refusals.append(error)
            if error is None:
                self.log.append(f"publish {item.request_id}/{item.question_index}")
                self.items.append(item)
        return refusals

    @property
    def keys(self) -> list[Key]:
        return [item.key for item in self.items]


class Board:
    """Tells what has become of questions elsewhere; fails once if told to."""

    def __init__(self) -> None:
        self.done: set[Key] = set()
        self.endings: dict[Key, Ending] = {}
        self.gone: set[Key] = set()
        self.errors: list[KevError] = []

    async def settled(self, questions: Sequence[Key]) -> dict[Key, Ending]:
        if self.errors:
            raise self.errors.pop()
        return {key: self.endings.get(key, Ending()) for key in questions if key in self.done}

    async def lost(self, questions: Sequence[Key]) -> list[Key]:
        found = [key for key in questions if key in self.gone]
        self.gone -= set(found)
        return found


class House:
    """A router with fakes around it."""

    def __init__(self, board: Board | None = None, **changes: object) -> None:
        base = RouterSettings(channel_pool_size=2, channel_queue_size=1, max_context=200)
        self.log: list[str] = []
        self.clock, self.tokenizer = ManualClock(), LetterTokenizer()
        self.registry, self.work = Registry(self.log), Work(self.log)
        self.router = RouterService(
            tokenizer=self.tokenizer,
            work=self.work,  # type: ignore[arg-type]
            registry=self.registry,
            clock=self.clock,
            settings=replace(base, **changes),  # type: ignore[arg-type]
            board=board,
        )
        self.registry.on_withdraw = self._cancel

    def _cancel(self, record: RequestRecord) -> None:
        for question in record.questions:
            self.end(record.request_id, question.question_index, FinishReason.CANCELLED)

    def end(
        self,
        request_id: str,
        index: int = 0,
        reason: FinishReason = FinishReason.STOP,
        error: ErrorInfo | None = None,
    ) -> None:
        self.router.on_outcome(
            ChannelResult(request_id=request_id, question_index=index, channel_id=0, finish_reason=reason, error=error)
        )

    @property
    def loads(self) -> list[int]:
        self.router.check_integrity()
        return [channel.num_queued for channel in self.router.channels()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.router.run())
        await turns()
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def spec_of(request_id: str = "r", num_questions: int = 1, **changes: object) -> RequestSpec:
    timeout_ms, priority = changes.pop("timeout_ms", 1000), changes.pop("priority", 0)
    texts = changes.pop("texts", None) or [f"question {index}" for index in range(num_questions)]
    questions = tuple(
        QuestionSpec(text=text, sampling=SamplingParams(max_tokens=8), timeout_ms=timeout_ms, priority=priority)
        for text in texts
    )
    base = RequestSpec(
        request_id=request_id,
        questions=questions,
        isolation=IsolationLevel.STRICT,
        strategy=Strategy.ROUND_ROBIN,
        mode=AggregateMode.SLOT_MAP,
        max_parallel=4,
        content_digest=f"digest of {request_id}",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


async def turns(number: int = 20) -> None:
    """Let every task that can go on do so."""
    for _ in range(number):
        await asyncio.sleep(0)


# ---- acceptance


async def test_a_request_is_registered_before_it_is_published() -> None:
    """An outcome could arrive for a request that the aggregator does not know."""
    house = House()
    assert await house.router.submit(spec_of("r", 2)) == "r"
    assert house.log == ["register r", "publish r/0", "publish r/1"]


async def test_record_and_item_carry_what_the_others_need() -> None:
    """Node or aggregator would run another question than the one asked, or audit another route."""
    house = House()
    spec = spec_of(
        texts=["怎么退款！！！！"], tenant="t", system_prompt="sys", isolation=IsolationLevel.SHARED, timeout_ms=700
    )
    await house.router.submit(spec)
    (item,), record = house.work.items, house.registry.records["r"]
    assert item.prompt == Prompt(ids=tuple(map(ord, "sys怎么退款！")), boundaries=(3,))
    assert (item.num_shared, item.isolation, item.max_parallel, item.tenant) == (3, IsolationLevel.SHARED, 4, "t")
    assert (item.fingerprint, item.sampling, item.time_budget_ms) == ("letters", SamplingParams(max_tokens=8), 700)
    assert (record.content_digest, record.mode, record.tenant) == ("digest of r", AggregateMode.SLOT_MAP, "t")
    (question,) = record.questions
    assert (question.timeout_ms, question.num_prompt_tokens) == (700, 8)
    assert question.route.channel_id == item.channel_id == 0
    assert (question.route.normalized_text, question.route.removed) == ("怎么退款！", ("！！！",))
    assert (question.route.strategy, question.route.hash_bucket) == (Strategy.ROUND_ROBIN, 0)


async def test_the_strategy_of_the_request_is_taken() -> None:
    """A per-request strategy would be ignored."""
    house = House(channel_pool_size=6, channel_queue_size=8, length_tiers=(5, 20))
    await house.router.submit(spec_of(texts=["abc", "x" * 10, "y" * 50], strategy=Strategy.LENGTH_AWARE))
    assert [item.channel_id // 2 for item in house.work.items] == [0, 1, 2]


async def test_a_diverted_question_says_where_from() -> None:
    """The audit could not show that a hot channel was avoided."""
    house = House(channel_queue_size=4)
    spec = spec_of(texts=["same"] * 2, strategy=Strategy.SEMANTIC_HASH)
    await house.router.submit(spec)
    first, second = (question.route for question in house.registry.records["r"].questions)
    assert (second.channel_id, second.diverted_from) == (1 - first.channel_id, first.channel_id)
    assert first.hash_bucket == second.hash_bucket


async def test_the_same_request_joins() -> None:
    """A retry would run everything twice."""
    house = House()
    await house.router.submit(spec_of())
    assert await house.router.submit(spec_of()) == "r"
    assert house.work.keys == [("r", 0)]
    with pytest.raises(RequestConflictError):
        await house.router.submit(spec_of(content_digest="other"))


async def test_simultaneous_retries_join_each_other() -> None:
    """Two retries in flight at once would both be published, or one would be told of a conflict."""
    house = House()
    found = await asyncio.gather(*(house.router.submit(spec_of(num_questions=2)) for _ in range(3)))
    assert found == ["r"] * 3
    assert house.work.keys == [("r", 0), ("r", 1)]
    house.end("r", 0)
    assert house.loads == [0, 1]


async def test_another_router_registered_it_first() -> None:
    """A place would leak when registration finds the request there."""
    house = House()
    house.registry.gate = asyncio.Event()
    task = asyncio.create_task(house.router.submit(spec_of()))
    house.registry.records["r"] = RequestRecord(
        request_id="r",
        content_digest="digest of r",
        mode=AggregateMode.SLOT_MAP,
        isolation=IsolationLevel.STRICT,
        questions=(),
    )
    house.registry.lookup = lambda request_id, digest: asyncio.sleep(0, result=False)  # type: ignore[method-assign]
    assert await task == "r"
    assert (house.work.items, house.loads) == ([], [0, 0])


async def test_one_question_over_the_budget_refuses_all_before_anything_runs() -> None:
    """Half a request would run and the caller would not know which half."""
    house = House()
    with pytest.raises(PromptTooLongError) as caught:
        await house.router.submit(spec_of(texts=["fine", "x" * 300, "y" * 400]))
    assert [violation.field for violation in caught.value.violations] == ["queries[1]", "queries[2]"]
    assert (house.log, house.loads) == ([], [0, 0])


async def test_long_texts_are_prepared_off_the_loop() -> None:
    """Health checks and cancellations would wait for a megabyte to be tokenized."""
    house = House(max_context=20_000)
    await house.router.submit(spec_of("short"))
    await house.router.submit(spec_of("long", texts=["x" * 10_000]))
    assert [thread == threading.get_ident() for thread in house.tokenizer.threads] == [True, False]


# ---- overflow: reject


async def test_reject_takes_all_or_nothing() -> None:
    """A refused request would leave places taken or half its questions running."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    await house.router.submit(spec_of("a"))
    with pytest.raises(QueueFullError) as caught:
        await house.router.submit(spec_of("b", 2))
    assert caught.value.retry_after_s > 0
    assert (house.log, sum(house.loads)) == (["register a", "publish a/0"], 1)
    assert await house.router.submit(spec_of("c")) == "c"
    assert house.router.stats().num_rejected == 1


async def test_a_refusal_costs_no_tokenization() -> None:
    """Under overload the router would spend its time on requests that it refuses."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    await house.router.submit(spec_of("a", 2))
    with pytest.raises(QueueFullError):
        await house.router.submit(spec_of("b"))
    assert len(house.tokenizer.threads) == 2


async def test_without_room_the_same_request_still_joins() -> None:
    """A retry would be refused although its request runs, here or at another router; its caller would ask again."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    await house.router.submit(spec_of("a", 2))
    lookups = house.registry.lookups
    assert await house.router.submit(spec_of("a", 2)) == "a"
    assert house.registry.lookups == lookups, "what is under way here needs no store"
    house.registry.records["b"] = replace(house.registry.records["a"], content_digest="digest of b")
    assert not await house.router.accept(spec_of("b"))
    for taken in ("a", "b"):
        with pytest.raises(RequestConflictError):
            await house.router.submit(spec_of(taken, content_digest="other"))
    assert (house.work.keys, house.router.stats().num_rejected) == ([("a", 0), ("a", 1)], 0)


async def test_a_refusal_does_not_wait_for_the_store() -> None:
    """With a slow store every refusal would hang for as long as the store does, just when the most of them are due."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    await house.router.submit(spec_of("a", 2))
    house.registry.lookup_gate = asyncio.Event()
    with pytest.raises(QueueFullError):
        await house.router.submit(spec_of("b"))
    house.registry.lookup_gate.set()
    house.registry.lookup_errors = [StoreUnavailableError("away")]
    with pytest.raises(QueueFullError):
        await house.router.submit(spec_of("b"))


async def test_a_refusal_of_a_new_id_asks_nobody() -> None:
    """Under overload the store would be asked about requests that nobody can have sent before."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    await house.router.submit(spec_of("a"))
    with pytest.raises(QueueFullError):
        await house.router.accept(spec_of("b", 2), has_new_id=True)
    assert house.registry.lookups == 0
    with pytest.raises(QueueFullError):
        await house.router.accept(spec_of("b", 2))
    assert house.registry.lookups == 1


async def test_an_acceptance_looks_nothing_up() -> None:
    """Every submission would cost a round trip more than it needs."""
    house = House(channel_queue_size=4)
    assert await house.router.accept(spec_of("a"))
    assert not await house.router.accept(spec_of("a"))
    house.end("a")
    assert not await house.router.accept(spec_of("a")), "its outcome is there"
    assert (house.registry.lookups, house.work.keys, house.loads) == (0, [("a", 0)], [0, 0])


async def test_a_new_id_is_refused_before_anything_is_spent() -> None:
    """The cheapest refusal would depend on the size of what is refused, or not be counted."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    house.router.check_room()
    await house.router.submit(spec_of("a", 2))
    with pytest.raises(QueueFullError, match="no room for one more question"):
        house.router.check_room()
    assert house.router.stats().num_rejected == 1
    house.router.begin_drain()
    with pytest.raises(DrainingError):
        house.router.check_room()
    waiting = House()
    await waiting.router.submit(spec_of("a", 2))
    waiting.router.check_room()


@pytest.mark.parametrize("policy", [OverflowPolicy.REJECT, OverflowPolicy.QUEUE])
async def test_what_can_never_fit_is_a_bad_request(policy: OverflowPolicy) -> None:
    """A client would retry for ever what the pool cannot take even when idle."""
    house = House(overflow_policy=policy, overflow_queue_size=1)
    with pytest.raises(InvalidRequestError, match="send fewer"):
        await house.router.submit(spec_of(num_questions=4))
    lanes = House(overflow_policy=OverflowPolicy.REJECT, length_tiers=(50,))
    with pytest.raises(InvalidRequestError, match="send fewer"):
        await lanes.router.submit(spec_of(texts=["long question " * 5] * 2, strategy=Strategy.LENGTH_AWARE))


async def test_reject_and_a_full_transport() -> None:
    """A place would leak, or a question that was refused would count as accepted."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    house.work.errors = [QueueFullError("full", 1.0)]
    with pytest.raises(QueueFullError):
        await house.router.submit(spec_of(num_questions=2))
    assert (house.registry.withdrawn, house.loads) == (["r"], [0, 0])


async def test_a_failed_submission_frees_its_places_by_itself() -> None:
    """Places would leak when the registry has already forgotten the request and reports no outcomes."""
    house = House(overflow_policy=OverflowPolicy.REJECT)
    house.registry.on_withdraw = lambda record: None
    house.work.errors = [QueueFullError("full", 1.0)]
    with pytest.raises(QueueFullError):
        await house.router.submit(spec_of(num_questions=2))
    assert house.loads == [0, 0]


# ---- overflow: queue


async def test_queue_returns_at_once_and_drains_in_order() -> None:
    """The caller would be held up, or late questions would pass early ones."""
    house = House(overflow_policy=OverflowPolicy.QUEUE, overflow_queue_size=3)
    async with house.running():
        await house.router.submit(spec_of("a", 4))
        await house.router.submit(spec_of("b", 1))
        assert house.work.keys == [("a", 0), ("a", 1)]
        assert house.router.stats().num_overflow == 3
        with pytest.raises(QueueFullError):
            await house.router.submit(spec_of("c"))
        for index in (0, 1, 2):
            house.end("a", index)
            await turns()
        assert house.work.keys == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0)]
        assert house.loads == [1, 1]


# ---- overflow: wait


async def test_wait_holds_the_call_until_all_are_published() -> None:
    """There would be no back-pressure: callers could pour in without bound."""
    house = House()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("a", 4)))
        await turns()
        assert (task.done(), house.work.keys) == (False, [("a", 0), ("a", 1)])
        house.end("a", 0)
        await turns()
        assert (task.done(), house.work.keys[2:]) == (False, [("a", 2)])
        house.end("a", 1)
        assert await task == "a"


async def test_wait_is_first_come_first_served() -> None:
    """A small late request would pass a large early one again and again."""
    house = House()
    async with house.running():
        tasks = [asyncio.create_task(house.router.submit(spec_of(name, 2))) for name in "abc"]
        for name in "ab":
            for index in (0, 1):
                await turns()
                house.end(name, index)
        await asyncio.gather(*tasks)
        assert house.work.keys == [(name, index) for name in "abc" for index in (0, 1)]


async def test_a_cancelled_submit_withdraws_and_never_runs_the_rest() -> None:
    """A client that left would keep channels busy."""
    house = House()
    async with house.running():
        leaving = asyncio.create_task(house.router.submit(spec_of("a", 4)))
        staying = asyncio.create_task(house.router.submit(spec_of("b", 1)))
        await turns()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await staying == "b"
        assert house.work.keys == [("a", 0), ("a", 1), ("b", 0)]
        assert house.registry.withdrawn == ["a"]
        assert sum(house.loads) == 1


async def test_a_retry_keeps_what_its_predecessor_would_withdraw() -> None:
    """A retry that joined would lose its request when the broken call before it is found to be gone."""
    house = House()
    async with house.running():
        first = asyncio.create_task(house.router.submit(spec_of("a", 4)))
        await turns()
        retry = asyncio.create_task(house.router.submit(spec_of("a", 4)))
        await turns()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        house.end("a", 0)
        house.end("a", 1)
        assert await retry == "a"
        assert (house.registry.withdrawn, house.work.keys) == ([], [("a", index) for index in range(4)])
        second = asyncio.create_task(house.router.submit(spec_of("b", 4)))
        last = asyncio.create_task(house.router.submit(spec_of("b", 4)))
        await turns()
        for task in (second, last):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert house.registry.withdrawn == ["b"], "the last one to leave takes it along"


async def test_a_registration_without_an_answer_is_withdrawn() -> None:
    """The request may be registered, and its questions published, for a caller who was told that it failed."""
    house = House()
    house.registry.register_errors = [StoreUnavailableError("away")]
    with pytest.raises(StoreUnavailableError):
        await house.router.submit(spec_of("a", 2))
    assert house.loads == [0, 0]
    assert await house.router.accept(spec_of("a"))
    assert house.registry.withdrawn == ["a"]


async def test_a_cancellation_in_mid_withdrawal_is_repeated() -> None:
    """A second cancellation, or a registry that is down, would leave the request registered for ever."""
    house = House()
    house.registry.withdraw_errors = [QueueFullError("down", 1.0)]
    task = asyncio.create_task(house.router.submit(spec_of("a", 4)))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert house.registry.withdrawn == []
    await house.router.submit(spec_of("a", 1))
    assert house.registry.withdrawn == ["a"], "the retry waits for the withdrawal of its predecessor"
    assert house.loads == [1, 0]


async def test_a_cancellation_during_registration_withdraws() -> None:
    """The request may be registered although nobody knows; it would wait for outcomes that never come."""
    house = House()
    house.registry.gate = asyncio.Event()
    task = asyncio.create_task(house.router.submit(spec_of("a", 2)))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert house.loads == [0, 0]
    async with house.running():
        await turns()
    assert house.registry.withdrawn == ["a"]


async def test_an_outcome_before_the_place_drops_the_question() -> None:
    """A question that timed out or was cancelled while waiting would run all the same."""
    house = House()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("a", 4)))
        await turns()
        house.end("a", 2, FinishReason.TIMEOUT_QUEUED)
        house.end("a", 0)
        assert await task == "a"
        assert house.work.keys == [("a", 0), ("a", 1), ("a", 3)]


async def test_a_spent_budget_is_not_published() -> None:
    """Expired work would reach the nodes."""
    house = House()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("a", 4, timeout_ms=500)))
        await turns()
        house.clock.advance(0.2)
        house.end("a", 0)
        await turns()
        assert house.work.items[-1].time_budget_ms == pytest.approx(300, abs=1)
        house.clock.advance(0.4)
        house.end("a", 1)
        assert await task == "a"
        assert house.work.keys == [("a", 0), ("a", 1), ("a", 2)]
        assert sum(house.loads) == 1


async def test_nothing_is_published_before_its_registration() -> None:
    """A channel that frees up during the registration would let a question out too early."""
    house = House()
    async with house.running():
        await house.router.submit(spec_of("a", 2))
        house.registry.gate = asyncio.Event()
        task = asyncio.create_task(house.router.submit(spec_of("b", 2)))
        await turns()
        house.end("a", 0)
        await turns()
        assert house.work.keys == [("a", 0), ("a", 1)]
        house.registry.gate.set()
        await turns()
        assert house.work.keys[2:] == [("b", 0)]
        house.end("a", 1)
        assert await task == "b"


async def test_an_outcome_during_registration_frees_the_place() -> None:
    """A very short time budget would leak a place for ever."""
    house = House()
    house.registry.gate = asyncio.Event()
    task = asyncio.create_task(house.router.submit(spec_of("a", 2)))
    await turns()
    house.end("a", 1, FinishReason.TIMEOUT_QUEUED)
    house.registry.gate.set()
    await task
    assert (house.router.channels()[0].num_queued, house.loads) == (1, [1, 0])


async def test_a_full_transport_is_asked_again() -> None:
    """An accepted question would be lost, or its place leak, because the transport had no room at that moment."""
    house = House(retry_interval_s=0.0)
    async with house.running():
        await house.router.submit(spec_of("a"))
        house.work.errors = [QueueFullError("full", 1.0)] * 1000
        task = asyncio.create_task(house.router.submit(spec_of("b")))
        await turns()
        assert (task.done(), house.loads) == (False, [1, 1])
        house.work.errors.clear()
        assert await task == "b"
        assert house.work.keys == [("a", 0), ("b", 0)]
        house.end("b")
        assert house.loads == [1, 0]


async def test_a_full_transport_is_asked_again_without_an_outcome() -> None:
    """With nothing else running, a refused question would wait for ever."""
    house = House(retry_interval_s=0.0)
    house.work.errors = [QueueFullError("full", 1.0)] * 3
    async with house.running():
        assert await house.router.submit(spec_of("a", 2)) == "a"
    assert sorted(house.work.keys) == [("a", 0), ("a", 1)]


async def test_a_broken_transport_ends_the_call() -> None:
    """The caller would wait for ever for a question that cannot be published."""
    house = House()
    async with house.running():
        await house.router.submit(spec_of("a", 2))
        task = asyncio.create_task(house.router.submit(spec_of("b")))
        await turns()
        house.work.errors = [InvalidRequestError.of("channel_id", "does not exist")]
        house.end("a", 0)
        with pytest.raises(InvalidRequestError):
            await task
        assert house.registry.withdrawn == ["b"]
        assert sum(house.loads) == 1


async def test_a_broken_transport_leaves_no_place_behind() -> None:
    """A question of the overflow queue that cannot be published would hold its channel for ever."""
    house = House(overflow_policy=OverflowPolicy.QUEUE)
    async with house.running():
        await house.router.submit(spec_of("a", 3))
        house.work.errors = [InvalidRequestError.of("channel_id", "does not exist")]
        house.end("a", 0)
        await turns()
        assert sum(house.loads) == 1
        house.end("a", 2, FinishReason.TIMEOUT_QUEUED)
        assert sum(house.loads) == 1


async def test_a_question_is_published_once() -> None:
    """Submit call and drain loop would both publish a question that got its place in between."""
    house = House()
    async with house.running():
        await house.router.submit(spec_of("a", 2))
        house.registry.gate, house.work.gate = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(house.router.submit(spec_of("b", 2)))
        await turns()
        house.registry.gate.set()
        house.end("a", 0)
        house.end("a", 1)
        await turns()
        house.work.gate.set()
        await task
        assert sorted(house.work.keys[2:]) == [("b", 0), ("b", 1)]


# ---- outcomes, drain, counters


async def test_an_outcome_counts_once() -> None:
    """A repeated outcome would free a place that another question holds."""
    house = House()
    await house.router.submit(spec_of("a"))
    house.end("a")
    house.end("a")
    house.end("unknown", 7)
    assert house.loads == [0, 0]


async def test_drain_refuses_new_and_lets_the_accepted_go_on() -> None:
    """A rolling restart would lose accepted questions."""
    house = House()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("a", 3)))
        await turns()
        house.router.begin_drain()
        with pytest.raises(DrainingError):
            await house.router.submit(spec_of("b"))
        house.end("a", 0)
        assert await task == "a"


async def test_a_drain_that_begins_during_acceptance_refuses() -> None:
    """A request would be accepted by a router that is about to stop."""
    house = House(max_context=20_000)
    task = asyncio.create_task(house.router.submit(spec_of("a", texts=["x" * 10_000])))
    await asyncio.sleep(0)
    house.router.begin_drain()
    with pytest.raises(DrainingError):
        await task
    assert (house.log, house.loads) == ([], [0, 0])


async def test_the_end_of_the_drain_ends_waiting_calls() -> None:
    """A waiting submit call would hang for ever when the router stops."""
    house = House()
    async with house.running():
        task = asyncio.create_task(house.router.submit(spec_of("a", 3)))
        await turns()
    with pytest.raises(DrainingError):
        await task
    assert (house.registry.withdrawn, house.loads) == (["a"], [0, 0])
    with pytest.raises(DrainingError):
        await house.router.submit(spec_of("b"))


async def test_stats_count_what_was_accepted() -> None:
    """Hot buckets could not be found."""
    house = House(channel_queue_size=8)
    await house.router.submit(spec_of("a", texts=["same!!!!", "same"], strategy=Strategy.SEMANTIC_HASH))
    await house.router.submit(spec_of("a", texts=["same!!!!", "same"], strategy=Strategy.SEMANTIC_HASH))
    stats = house.router.stats()
    assert (stats.num_requests, stats.num_questions, stats.num_rejected, stats.num_removed_chars) == (1, 2, 0, 3)
    assert sum(count for _, count in stats.bucket_counts) == 2
    assert [channel.num_total for channel in house.router.channels()] == [1, 1]


# ---- any order of events

EVENTS = st.lists(
    st.tuples(st.sampled_from(["submit", "end", "end", "cancel", "time out", "refuse"]), st.integers(0, 7)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from(OverflowPolicy), st.integers(0, 2))
def test_no_order_of_events_leaks_or_loses(events: list[tuple[str, int]], policy: OverflowPolicy, breaker: int) -> None:
    """Places would leak until nothing is accepted any more, or a waiting call would hang."""
    asyncio.run(play(events, policy, breaker))


async def play(events: list[tuple[str, int]], policy: OverflowPolicy, breaker: int) -> None:
    house = House(overflow_policy=policy, overflow_queue_size=3, breaker_queue_length=breaker, retry_interval_s=0.0)
    tasks: dict[str, asyncio.Task[str]] = {}
    async with house.running():
        for number, (event, choice) in enumerate(events):
            apply(house, tasks, event, choice, number)
            await turns(choice)
            house.router.check_integrity()
        house.work.errors.clear()
        for _ in range(60):
            for key in house.work.keys:
                house.end(*key)
            await turns()
        assert all(task.done() for task in tasks.values()), "a submit call hangs"
        assert sum(house.loads) == house.router.stats().num_overflow == 0
    assert len(set(house.work.keys)) == len(house.work.keys), "published twice"
    for name, task in tasks.items():
        if task.cancelled() or task.exception() is not None:
            assert name not in house.registry.records, "a failed submission is still registered"


def apply(house: House, tasks: dict[str, asyncio.Task[str]], event: str, choice: int, number: int) -> None:
    published = house.work.keys
    match event:
        case "submit":
            tasks[f"r{number}"] = asyncio.create_task(house.router.submit(spec_of(f"r{number}", choice % 4 + 1)))
        case "end" if published:
            house.end(*published[choice % len(published)])
        case "cancel" if tasks:
            list(tasks.values())[choice % len(tasks)].cancel()
        case "time out" if tasks:
            house.end(list(tasks)[choice % len(tasks)], choice % 3, FinishReason.TIMEOUT_QUEUED)
        case "refuse":
            house.work.errors.append(QueueFullError("full", 1.0))


# ---- outcomes elsewhere


async def _until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():
            await asyncio.sleep(0.01)


async def test_outcomes_elsewhere_free_the_channels() -> None:
    """A router in a process of its own would fill up and take no more questions."""
    board = Board()
    house = House(board)
    async with house.running():
        waiting = asyncio.create_task(house.router.submit(spec_of("r", 3)))
        await _until(lambda: len(house.work.items) == 2)
        board.errors.append(StoreUnavailableError("away for a moment"))
        board.done.add(("r", 0))
        await asyncio.wait_for(waiting, 10)
        assert house.work.keys == [("r", 0), ("r", 1), ("r", 2)]
        board.done |= {("r", 1), ("r", 2)}
        await _until(lambda: house.loads == [0, 0])


async def test_a_lost_question_is_published_again() -> None:
    """A flushed or trimmed stream would leave a waiting client with a timeout."""
    board = Board()
    house = House(board)
    async with house.running():
        await house.router.submit(spec_of("r", 2))
        registered = house.registry.records.pop("r")
        board.gone.add(("r", 1))
        await _until(lambda: len(house.work.items) == 3)
        assert house.work.keys == [("r", 0), ("r", 1), ("r", 1)]
        assert house.work.items[2].channel_id == house.work.items[1].channel_id
        assert sum(house.loads) == 2
        assert house.registry.records == {"r": registered}, "whoever lost the question may have lost its request"


async def test_a_lost_request_is_registered_again_while_all_its_questions_wait() -> None:
    """What is published later would be answered to nobody: no aggregator could know whose it is."""
    house = House(Board(), overflow_policy=OverflowPolicy.QUEUE)
    async with house.running():
        await house.router.submit(spec_of("running", 2, timeout_ms=60_000))
        house.clock.advance(0.5)
        await house.router.submit(spec_of("waiting", 2, timeout_ms=60_000))
        house.registry.records.clear()
        house.clock.advance(1.5)
        await _until(lambda: house.registry.records.keys() == {"running", "waiting"})
        assert house.log[-2:] == ["restore running of 2000 ms ago", "restore waiting of 1500 ms ago"]
        assert house.work.keys == [("running", 0), ("running", 1)], "nothing else was lost"


async def test_a_lost_request_whose_id_was_taken_lets_go_of_its_places() -> None:
    """The router would try for ever, or answer another request's questions."""
    board = Board()
    house = House(board)
    async with house.running():
        await house.router.submit(spec_of("r", 2, timeout_ms=60_000))
        taken = replace(house.registry.records.pop("r"), content_digest="other")

        async def take_first(record: RequestRecord, age_ms: int) -> None:
            house.registry.records["r"] = taken
            raise RequestConflictError("r is taken")

        house.registry.restore = take_first  # type: ignore[method-assign]
        house.clock.advance(1.0)
        await _until(lambda: house.loads == [0, 0])
        assert house.registry.records == {"r": taken}


async def test_a_question_that_is_lost_after_its_end_is_published_again() -> None:
    """A store that is emptied between a commit and its reading would leave a client with a timeout."""
    board = Board()
    house = House(board)
    async with house.running():
        await house.router.submit(spec_of("r", 1, timeout_ms=60_000))
        board.done.add(("r", 0))
        await _until(lambda: house.loads == [0, 0])
        board.done.clear()
        house.registry.records.clear()
        board.gone.add(("r", 0))
        house.clock.advance(1.0)
        await _until(lambda: house.work.keys.count(("r", 0)) == 2)
        assert sum(house.loads) == 1
        assert "r" in house.registry.records
        board.done.add(("r", 0))
        await _until(lambda: house.loads == [0, 0])


async def test_a_question_that_was_lost_after_its_end_waits_for_room() -> None:
    """It would be given up because others have its place now, or hold a place that there is not."""
    board = Board()
    house = House(board, overflow_policy=OverflowPolicy.REJECT)
    async with house.running():
        await house.router.submit(spec_of("r", 1, timeout_ms=60_000))
        board.done.add(("r", 0))
        await _until(lambda: house.loads == [0, 0])
        await house.router.submit(spec_of("other", 2, timeout_ms=60_000))
        for _ in range(3):
            board.gone.add(("r", 0))
            house.clock.advance(1.0)
            await _until(lambda: not board.gone)
            await turns()
            assert house.work.keys.count(("r", 0)) == 1
        board.done = {("other", 0)}
        await _until(lambda: sum(house.loads) == 1)
        board.gone.add(("r", 0))
        house.clock.advance(1.0)
        await _until(lambda: house.work.keys.count(("r", 0)) == 2)


async def test_what_ended_a_while_ago_is_not_searched_for() -> None:
    """The router would remember every question, or have work done again of which everybody knows the outcome."""
    board = Board()
    house = House(board)
    async with house.running():
        await house.router.submit(spec_of("r", 1, timeout_ms=60_000))
        board.done.add(("r", 0))
        await _until(lambda: house.loads == [0, 0])
        house.clock.advance(5.0)
        await _until(lambda: not house.router._publisher._ended)
        board.gone.add(("r", 0))
        await house.router.submit(spec_of("other", 1, timeout_ms=60_000))
        board.gone.add(("other", 0))
        house.clock.advance(1.0)
        await _until(lambda: house.work.keys.count(("other", 0)) == 2)
        assert house.work.keys.count(("r", 0)) == 1
