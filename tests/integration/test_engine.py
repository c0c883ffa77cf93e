"""The embedded engine as a whole: threads and loops, endings of every kind, cancellation, timeouts, streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvariantError,
    KevError,
    RequestConflictError,
)
from common.types import FinishReason, RequestState, StreamEventType
from inference_svc.plan import StepKind, StepPlan
from kev import Question
from kev.engine import AsyncEngine, Engine
from kev.testing import scripted_engine
from tests.integration.scripted_runners import GuidedRunner, leftovers, until, until_idle

ANSWERS = {
    "cjk": "隔离通道，互不干扰。",
    "emoji": "👩‍👩‍👧‍👦 🫨 𠮷 ᚠᛇᚻ é",
    "empty": "",
    "long": "abcdefghij" * 40,
}


ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


def answer(prompt: str) -> str:
    """The script: some fixed answers, else the question itself."""
    return ANSWERS.get(prompt, prompt)


def config(**sections: dict[str, object]) -> dict[str, object]:
    """A ``kev.yaml`` with a few fields set."""
    return {"kev": sections}


LONG = {"max_tokens": 256, "max_restarts": 0}
SMALL = config(router={"max_parallel_queries": 2, "channel_pool_size": 4}, core=LONG)


@pytest.fixture
def runner() -> Iterator[GuidedRunner]:
    """A runner whose gate is open at the end, whatever the test did."""
    runner = GuidedRunner(answer)
    yield runner
    runner.gate.set()
    runner.step_s = 0.0


@pytest.fixture
async def engine(runner: GuidedRunner) -> AsyncIterator[AsyncEngine]:
    """An engine with two slots over the guided runner."""
    async with scripted_engine(answer, SMALL, runner=runner) as engine:
        yield engine
        runner.gate.set()
        runner.step_s = 0.0


@pytest.fixture
def blocking() -> Iterator[Engine]:
    """The blocking form."""
    with Engine(scripted_engine(answer, config(core=LONG))) as engine:
        yield engine


def engine_threads() -> list[str]:
    """Names of Kev's threads that run now."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kev-")]


# ---- threads and event loops


def test_the_articles_snippet(blocking: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines a user types fail, or the answers come in another order than the questions."""
    queries = ["cjk", "emoji", "a plain question"]
    request_id = blocking.submit(queries, isolation="strict", max_parallel=4)
    results = blocking.wait(request_id, timeout=15.0)
    for r in results:
        print(f"channel={r.channel_id} | time={r.elapsed_ms}ms | tokens={r.tokens}")
        print(r.text)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1::2] == [ANSWERS["cjk"], ANSWERS["emoji"], "a plain question"]
    assert [result.question_index for result in results] == [0, 1, 2]
    assert blocking.poll(request_id).state is RequestState.COMPLETE


def test_sixteen_threads_share_one_engine(blocking: Engine) -> None:
    """Calls from several threads mix up their answers, or wait for each other for ever."""

    def work(thread: int) -> list[str]:
        asked = [[f"thread {thread} call {call} question {i}" for i in range(3)] for call in range(6)]
        found = [[result.text for result in blocking.ask(questions)] for questions in asked]
        events = list(blocking.stream(blocking.submit([f"stream of {thread}"])))
        assert "".join(event.text for event in events) == f"stream of {thread}"
        return [f"{questions} -> {texts}" for questions, texts in zip(asked, found, strict=True) if questions != texts]

    with ThreadPoolExecutor(16) as pool:
        assert [wrong for result in pool.map(work, range(16)) for wrong in result] == []


async def test_the_blocking_engine_works_inside_a_running_loop(blocking: Engine) -> None:
    """In a notebook, where a loop runs already, the engine refuses to work or deadlocks."""
    assert [result.text for result in blocking.ask(["one", "cjk"])] == ["one", ANSWERS["cjk"]]
    events = list(blocking.stream(blocking.submit(["streamed"])))
    assert events[-1].type is StreamEventType.DONE


def test_an_engine_made_at_import_serves_every_later_loop() -> None:
    """An engine made before any loop runs is tied to the first ``asyncio.run`` that uses it."""
    engine = Engine(scripted_engine(answer))

    async def main(question: str) -> str:
        return engine.ask([question])[0].text

    with engine:
        assert [asyncio.run(main("first run")), asyncio.run(main("second run"))] == ["first run", "second run"]


def test_every_loop_may_have_an_engine_of_its_own() -> None:
    """Something of the first engine, or of its loop, is left over for the second."""

    async def main(question: str) -> str:
        async with scripted_engine(answer) as engine:
            return (await engine.ask([question]))[0].text

    assert [asyncio.run(main("first")), asyncio.run(main("second"))] == ["first", "second"]
    assert engine_threads() == []


def test_an_async_engine_refuses_another_loop() -> None:
    """Used from a second loop, the engine waits for ever on the first one's futures."""
    engine = scripted_engine(answer)
    asyncio.run(engine.ready())

    async def main() -> None:
        for call in (engine.submit(["a"]), engine.ready(), engine.stats(), engine.poll("x"), engine.ask(["a"])):
            with pytest.raises(EngineDeadError, match="another event loop"):
                await call
        await engine.close()

    asyncio.run(main())
    assert engine_threads() == []


async def test_an_async_engine_refuses_a_second_loop_while_the_first_one_runs(engine: AsyncEngine) -> None:
    """Two loops at once corrupt the engine's state."""
    await engine.ready()
    with pytest.raises(EngineDeadError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(engine.ask(["a"])))
    assert (await engine.ask(["still here"]))[0].text == "still here"


# ---- the end


CALLS: dict[str, Callable[[Any], Any]] = {
    "submit": lambda engine: engine.submit(["a"]),
    "ask": lambda engine: engine.ask(["a"]),
    "wait": lambda engine: engine.wait("some-id", 1.0),
    "poll": lambda engine: engine.poll("some-id"),
    "cancel": lambda engine: engine.cancel("some-id"),
    "channels": lambda engine: engine.channels(),
    "stats": lambda engine: engine.stats(),
}


def test_a_closed_engine_says_so() -> None:
    """A call after ``close`` hangs, or fails with an error of some library."""
    engine = Engine(scripted_engine(answer))
    engine.close()
    engine.close()
    for call in CALLS.values():
        with pytest.raises(EngineDeadError, match="closed"):
            call(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        next(engine.stream("some-id"))
    assert engine_threads() == []


async def test_a_closed_async_engine_says_so() -> None:
    """As above, for the asynchronous form; one that was never used can be closed, too."""
    engine = scripted_engine(answer)
    await engine.close()
    await engine.close()
    for call in (*CALLS.values(), lambda engine: engine.ready()):
        with pytest.raises(EngineDeadError, match="closed"):
            await call(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        await anext(engine.stream("some-id"))


async def test_closing_while_questions_run_ends_every_wait(runner: GuidedRunner) -> None:
    """Somebody who waits when the engine closes waits for ever."""
    engine = scripted_engine(
        answer, config(router={"channel_pool_size": 1, "channel_queue_size": 2}, core=LONG), runner=runner
    )
    runner.step_s = 0.01
    request_id = await engine.submit(["long", "long"])
    streamed = _collect(engine, request_id)
    waiting = [
        asyncio.ensure_future(work)
        for work in (
            engine.wait(request_id),
            engine.wait(request_id, 30.0),
            engine.ask(["long"]),
            engine.submit(["long"] * 3),
            streamed,
        )
    ]
    await until(lambda: runner.num_forwards_of("long") > 3)
    async with asyncio.timeout(10):
        await engine.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, KevError), outcome
        elif isinstance(outcome, list):
            assert all(result.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR) for result in outcome)
    assert engine_threads() == []


async def _collect(engine: AsyncEngine, request_id: str) -> str:
    return "".join([event.text async for event in engine.stream(request_id)])


@pytest.mark.parametrize("attempt", range(5))
def test_closing_under_fire_ends_every_thread(attempt: int) -> None:
    """A thread that calls at the very moment of ``close`` is never answered."""
    engine = Engine(scripted_engine(answer))
    ended: list[BaseException] = []

    def hammer(number: int) -> None:
        try:
            while True:
                if number % 2:
                    engine.ask([f"question of {number}"])
                else:
                    list(engine.stream(engine.submit([f"question of {number}"])))
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=hammer, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.05 + 0.01 * attempt)
    engine.close()
    for thread in threads:
        thread.join(10)
    assert [thread.name for thread in threads if thread.is_alive()] == []
    assert all(isinstance(error, KevError) for error in ended), ended
    assert engine_threads() == []


# ---- faults


FAULTS: list[Exception] = [
    RuntimeError("kernel failed"),
    InvariantError("a KV extent is stale"),
    KeyError("no such layer"),
    MemoryError(),
    ZeroDivisionError(),
    AssertionError("shape"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_fault_in_one_forward_fails_its_questions_only(
    engine: AsyncEngine, runner: GuidedRunner, fault: Exception
) -> None:
    """One broken forward takes questions down that were not in it, or the whole engine."""
    faults = iter([fault])

    def break_once(plan: StepPlan) -> None:
        if plan.kind is StepKind.DECODE:
            for error in faults:
                raise error

    runner.before = break_once
    results = await engine.ask(["first", "second", "third", "fourth"])
    assert [result.finish_reason for result in results[2:]] == [FinishReason.STOP] * 2
    assert [result.text for result in results[2:]] == ["third", "fourth"]
    for result in results[:2]:
        assert result.finish_reason is FinishReason.ERROR
        assert result.error is not None and result.error.reason and result.error.message
    await engine.ready()
    assert [result.text for result in await engine.ask(["next", "one"])] == ["next", "one"]
    await until_idle(engine)


def _break_schedule(engine: AsyncEngine) -> None:
    _scheduler_of(engine).schedule = _broken_books


def _break_update(engine: AsyncEngine) -> None:
    _scheduler_of(engine).update = _broken_books


def _break_add(engine: AsyncEngine) -> None:
    _scheduler_of(engine).add = _broken_books


def _lose_the_ledger(engine: AsyncEngine) -> None:
    """The books are so broken that not even the end of a question can be entered."""
    ledger = engine._parts.nodes[0].ledger  # type: ignore[attr-defined]
    ledger.release = _broken_books


def _scheduler_of(engine: AsyncEngine) -> Any:
    return engine._parts.nodes[0]._scheduler  # type: ignore[attr-defined]


def _broken_books(*_: object) -> None:
    raise InvariantError("the books are broken")


@pytest.mark.parametrize("first", [True, False], ids=["at the first question", "in mid answer"])
@pytest.mark.parametrize("break_books", [_break_schedule, _break_update, _break_add, _lose_the_ledger])
async def test_broken_books_end_the_engine_and_nobody_waits(
    engine: AsyncEngine, runner: GuidedRunner, break_books: Callable[[AsyncEngine], None], first: bool
) -> None:
    """The engine thread is dead, and everything still waits, or is still accepted and promised to be ready."""
    await engine.ready()
    runner.step_s = 0.002
    waiting: list[asyncio.Future[Any]] = []
    if not first:

        def hold_in_mid_answer(_: StepPlan) -> None:
            if runner.num_forwards_of("long") == 3:
                runner.gate.clear()

        runner.before = hold_in_mid_answer
        request_id = await engine.submit(["long"] * 4, timeout_ms=60_000)
        waiting += [asyncio.ensure_future(engine.wait(request_id)), asyncio.ensure_future(_collect(engine, request_id))]
        await until(lambda: not runner.gate.is_set())
    break_books(engine)
    runner.gate.set()
    waiting.append(asyncio.ensure_future(engine.ask(["x", "y", "z"], timeout_ms=60_000)))
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        for call in (engine.ready(), engine.submit(["more"]), engine.ask(["more"])):
            with pytest.raises(EngineDeadError):
                await call
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, EngineDeadError), outcome
        elif isinstance(outcome, list):
            failed = [result for result in outcome if result.finish_reason not in ANSWERED]
            assert failed
            for result in failed:  # Those without a slot end with the tiers, the others by the engine.
                reasons = {"ENGINE_DEAD"} if result.slot >= 0 else {"ENGINE_DEAD", "NODE_DRAINING"}
                assert result.error is not None and result.error.reason in reasons


# ---- waiting and cancelling


async def test_a_wait_that_ends_first_leaves_the_request_alone(engine: AsyncEngine, runner: GuidedRunner) -> None:
    """A short wait kills the request it waited for."""
    runner.gate.clear()
    request_id = await engine.submit(["slow", "slower"])
    for timeout in (0, 0.01):
        with pytest.raises(DeadlineExceededError, match=r"0 of 2 questions .* goes on"):
            await engine.wait(request_id, timeout)
    assert not (await engine.poll(request_id)).done
    runner.gate.set()
    assert [result.text for result in await engine.wait(request_id, 10)] == ["slow", "slower"]
    assert [result.text for result in await engine.wait(request_id, 0)] == ["slow", "slower"]


async def test_a_cancelled_ask_frees_its_slots_within_one_forward(engine: AsyncEngine, runner: GuidedRunner) -> None:
    """The questions of a caller who has left keep their slots and go on generating."""
    asking = asyncio.ensure_future(engine.ask(["long", "long"]))
    neighbour = asyncio.ensure_future(engine.ask(["neighbour"]))
    await until(lambda: runner.num_forwards_of("long") > 3)
    runner.gate.clear()
    num_forwards = len(runner.forwards)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0.02)
    runner.gate.set()
    assert (await neighbour)[0].text == "neighbour"
    await until_idle(engine)
    late = [forward for forward in runner.forwards[num_forwards + 1 :] if "long" in forward]
    assert late == [], f"{len(late)} forwards after the one in flight"


@pytest.mark.parametrize("num_questions", [1, 6])
async def test_no_moment_of_cancelling_leaves_anything_behind(engine: AsyncEngine, num_questions: int) -> None:
    """A call cancelled at an unlucky moment is withdrawn by nobody: about one in a hundred pins its slots."""
    await engine.ready()
    for num_turns in range(60):
        asking = asyncio.ensure_future(engine.ask(["long"] * num_questions, max_tokens=3000))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        completed = (await engine.stats()).node.num_completion_tokens
        await until_idle(engine, 2.0)
        assert (await engine.stats()).node.num_completion_tokens - completed < 400, f"it ran on (turn {num_turns})"
    assert (await engine.ask(["next"]))[0].text == "next"


async def test_cancel_counts_what_it_withdrew(engine: AsyncEngine) -> None:
    """Cancelling twice withdraws twice, or takes back outcomes that are there."""
    request_id = await engine.submit([Question("short"), Question("long", max_tokens=3000), "long", "long"])
    async with asyncio.timeout(20):
        while not (await engine.poll(request_id)).results:
            await asyncio.sleep(0.001)
    assert await engine.cancel(request_id) == 3
    assert await engine.cancel(request_id) == 0
    results = await engine.wait(request_id)
    assert [result.finish_reason for result in results] == [FinishReason.STOP, *[FinishReason.CANCELLED] * 3]
    assert results[0].text == "short"
    await until_idle(engine)


async def test_streams_closed_early_leave_nothing_behind(engine: AsyncEngine) -> None:
    """Fifty readers that left early keep something alive, or end the request for the others."""
    await engine.ask(["cjk"])  # every task of the engine has begun
    before = await until_idle(engine)
    num_tasks = len(asyncio.all_tasks())
    for attempt in range(50):
        request_id = await engine.submit(["long", "cjk"], max_tokens=40)
        events = engine.stream(request_id)
        async for event in events:
            if event.type is StreamEventType.DELTA or attempt % 2:
                break
        await events.aclose()  # type: ignore[attr-defined]
        if attempt % 3 == 0:
            await engine.cancel(request_id)
        else:
            assert [result.text for result in await engine.wait(request_id)] == [ANSWERS["long"][:40], ANSWERS["cjk"]]
    after = await until_idle(engine)
    assert after.node.kv_bytes_used == before.node.kv_bytes_used == 0
    await until(lambda: len(asyncio.all_tasks()) == num_tasks)


def test_a_blocking_stream_may_be_left_early(blocking: Engine) -> None:
    """``break`` in a loop over a stream leaves a reader on the loop for ever."""
    for _ in range(20):
        request_id = blocking.submit(["long"])
        for event in blocking.stream(request_id):
            if event.type is StreamEventType.DELTA:
                break
        assert blocking.wait(request_id)[0].finish_reason is FinishReason.LENGTH
    assert blocking.stats().node.kv_bytes_used == 0


async def test_the_same_id_joins_and_other_content_is_a_conflict(engine: AsyncEngine, runner: GuidedRunner) -> None:
    """A retry runs its questions again, or gets somebody else's answers."""
    runner.gate.clear()
    ids = [await engine.submit(["the question"], request_id="retry", temperature=0.5) for _ in range(3)]
    with pytest.raises(RequestConflictError):
        await engine.submit(["the question"], request_id="retry")
    runner.gate.set()
    asked = await asyncio.gather(*(engine.ask(["the question"], request_id="retry", temperature=0.5) for _ in range(5)))
    assert ids == ["retry"] * 3
    assert {results[0].text for results in asked} == {"the question"}
    assert runner.num_forwards_of("the question") == len("the question") + 1, "it ran more than once"
    assert (await engine.stats()).router.num_questions == 1


# ---- time budgets


async def test_timeouts_tell_waiting_from_running_and_spare_the_neighbours(
    engine: AsyncEngine, runner: GuidedRunner
) -> None:
    """A question out of time disturbs its neighbours, hangs, or does not say where its time went."""
    await engine.ready()
    runner.step_s = 0.01
    queries = [
        Question("long", timeout_ms=400),
        Question("neighbour", timeout_ms=60_000),
        Question("queued", timeout_ms=5),
        Question("late but well", timeout_ms=60_000),
    ]
    results = await engine.ask(queries)
    running, neighbour, queued, late = results
    assert running.finish_reason is FinishReason.TIMEOUT_RUNNING
    assert ANSWERS["long"].startswith(running.text) and 0 < running.tokens < 60
    assert queued.finish_reason is FinishReason.TIMEOUT_QUEUED
    assert (queued.text, queued.tokens, queued.slot) == ("", 0, -1)
    for result, budget_ms in ((running, 400), (queued, 5)):
        assert budget_ms - 1 <= result.elapsed_ms < budget_ms + 3000
        assert result.error is not None and result.error.reason == "BUDGET_SPENT"
        assert f"{budget_ms} ms" in result.error.message
    assert (neighbour.text, late.text) == ("neighbour", "late but well")
    view = await engine.poll(results[0].request_id)
    assert view.state is RequestState.PARTIAL
    await until_idle(engine)


async def test_a_timeout_fires_in_mid_forward(engine: AsyncEngine, runner: GuidedRunner) -> None:
    """The answer to a deadline waits until a long forward is over."""
    runner.before = lambda plan: runner.gate.clear() if plan.step_index == 2 else None
    async with asyncio.timeout(5):
        results = await engine.ask(["held", "held too"], timeout_ms=100)
    assert all(result.finish_reason is FinishReason.TIMEOUT_RUNNING for result in results)
    runner.gate.set()
    await until_idle(engine)
    assert (await engine.ask(["next"]))[0].text == "next"


# ---- order, text


async def test_results_come_in_the_order_of_the_mode(engine: AsyncEngine, runner: GuidedRunner) -> None:
    """Results are handed out in another order than was asked for."""
    runner.step_s = 0.005  # all four questions must be there before the long answer can be over
    queries = [
        Question("a rather long answer", priority=1),
        Question("short", priority=5),
        Question("x", priority=1),
        Question("yes", priority=9),
    ]

    async def order(mode: str) -> list[str]:
        return [result.text for result in await engine.ask(queries, mode=mode, max_parallel=2)]

    assert await order("slot_map") == ["a rather long answer", "short", "x", "yes"]
    assert await order("priority") == ["yes", "short", "x", "a rather long answer"]
    appended = await order("seq_append")
    assert appended.index("short") < appended.index("a rather long answer")
    assert appended.index("x") < appended.index("a rather long answer")


async def test_joined_deltas_are_the_text_and_no_character_is_broken(engine: AsyncEngine) -> None:
    """What a reader of the stream puts together differs from the answer, or shows half characters."""
    request_id = await engine.submit(["cjk", "emoji", "long", "empty"])
    told: dict[int, list[str]] = {index: [] for index in range(4)}
    finals: dict[int, str] = {}
    ends = 0
    async for event in engine.stream(request_id):
        if event.type is StreamEventType.DELTA:
            assert event.question_index is not None and event.question_index not in finals
            told[event.question_index].append(event.text)
        elif event.type is StreamEventType.RESULT:
            assert event.result is not None
            finals[event.result.question_index] = event.result.text
        ends += event.type is StreamEventType.DONE
    results = await engine.wait(request_id)
    assert ends == 1
    assert [result.text for result in results] == [ANSWERS[q][:256] for q in ("cjk", "emoji", "long", "empty")]
    assert [finals[index] for index in range(4)] == [result.text for result in results]
    assert ["".join(told[index]) for index in range(4)] == [result.text for result in results]
    assert not any("\ufffd" in text for texts in told.values() for text in texts)
    assert len(told[0]) > 1, "text is sent while the answer is being written"


STOPS = [
    ("A B own fox C", "own fox", "A B "),
    ("A B own", "own fox", "A B own"),
    ("xxabcxx", ["ab", "abc"], "xx"),
    ("xxabcxx", ["abc", "b"], "xxa"),
    ("通道隔离。完", "。", "通道隔离"),
    ("own fox", "own fox", ""),
    ("a\n\nb", "\n\n", "a"),
]


@pytest.mark.parametrize(("whole", "stop", "cut"), STOPS)
async def test_a_stop_string_cuts_right_before_it(whole: str, stop: Any, cut: str) -> None:
    """A stop across tokens is missed or half of it shown, held-back text is lost, or a neighbour stops, too."""
    async with scripted_engine(lambda prompt: whole) as engine:
        request_id = await engine.submit([Question(f"own fox ab\n\n {whole}", stop=stop), "neighbour"])
        told = [event async for event in engine.stream(request_id)]
        stopped, neighbour = await engine.wait(request_id)
    assert (stopped.text, stopped.finish_reason) == (cut, FinishReason.STOP)
    assert (neighbour.text, neighbour.finish_reason) == (whole, FinishReason.STOP)
    for index, text in ((0, cut), (1, whole)):
        deltas = [event.text for event in told if event.question_index == index]
        assert "".join(deltas) == text


async def test_an_idle_engine_takes_no_steps(engine: AsyncEngine) -> None:
    """The engine thread spins while nobody asks."""
    await engine.ask(["a"])
    before = (await until_idle(engine)).node.num_steps
    await asyncio.sleep(0.1)
    assert (await engine.stats()).node.num_steps == before
    assert await leftovers(engine) == {}
