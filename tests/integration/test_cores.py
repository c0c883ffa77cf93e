"""Several engine cores in one process: the same answers, shared work, and no question lost with a core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import yaml

from common.clock import SystemClock
from common.config import Config, load_config
from common.errors import ConfigError, EngineDeadError, IsolationUnavailableError, OutOfMemoryError
from common.types import FinishReason, Result, StreamEventType
from inference_svc import loading
from inference_svc.devices import engine_devices, threads_per_core
from inference_svc.node import Node
from inference_svc.plan import StepOutput, StepPlan
from kev.engine import AsyncEngine, Engine
from kev.parts import EngineParts, load_parts
from kev.plan import PlanOptions, make_plan
from kev.testing import ScriptedNode, byte_tokenizer
from tests.integration.scripted_runners import GuidedRunner, leftovers, prompts_of, until, until_idle
from tests.integration.test_engine import engine_threads
from tests.integration.tiny_checkpoint import save_checkpoint, settings_for

ROOT = Path(__file__).parents[2]


def config(num_cores: int, **core: object) -> Config:
    deploy = {"mode": "multi_gpu", "workers": num_cores}
    router = {"max_parallel_queries": 4, "channel_pool_size": 8}
    return load_config({"kev": {"deploy": deploy, "router": router, "core": {"max_restarts": 0, **core}}}, env={})


@asynccontextmanager
async def scripted_cores(runners: Sequence[GuidedRunner], **core: object) -> AsyncIterator[AsyncEngine]:
    loaded, clock = config(len(runners), **core), SystemClock()
    nodes = tuple(ScriptedNode(loaded, runner, clock, f"core-{i}") for i, runner in enumerate(runners))
    async with AsyncEngine(loaded, EngineParts(byte_tokenizer(), nodes), clock) as engine:
        try:
            yield engine
        finally:
            for runner in runners:
                runner.gate.set()
                runner.step_s = 0.0


@pytest.fixture
def runners() -> list[GuidedRunner]:
    return [GuidedRunner(str, step_s=0.001) for _ in range(3)]


async def all_wait(engine: AsyncEngine) -> None:
    """Every core waits for work."""
    await engine.ready()
    tiers = engine._tiers
    assert tiers is not None
    transport = tiers.cores._group.transport
    await until(lambda: len(transport._rooms) == len(engine._parts.nodes))


def fail_with(error: BaseException, prompt: str = "") -> Callable[[StepPlan], None]:
    """What a runner does before a forward: fails when the prompt takes part in it, always without one."""

    def fail(plan: StepPlan) -> None:
        if prompt in prompts_of(plan) or not prompt:
            raise error

    return fail


# ---- which cores there are


@pytest.mark.parametrize(
    ("deploy", "num_gpus", "expected"),
    [
        ({}, 4, ("cpu",)),
        ({"mode": "multi_gpu"}, 2, ("cuda:0", "cuda:1")),
        ({"mode": "multi_gpu", "workers": 3}, 2, ("cuda:0", "cuda:1", "cuda:0")),
        ({"mode": "multi_gpu", "workers": 2}, 0, ("cpu", "cpu")),
        ({"mode": "multi_gpu", "workers": 1}, 4, ("cuda:0",)),
        ({"mode": "multi_gpu", "devices": ["cuda:2", "cuda:0"]}, 3, ("cuda:2", "cuda:0")),
        ({"mode": "multi_gpu", "devices": ["cpu"], "workers": 2}, 3, ("cpu", "cpu")),
        ({"mode": "distributed", "workers": 5}, 3, ("cpu",)),
    ],
)
def test_every_core_has_a_device(deploy: dict[str, object], num_gpus: int, expected: tuple[str, ...]) -> None:
    """Cores would sit on the wrong devices, or on none."""
    assert engine_devices(load_config({"kev": {"deploy": deploy}}, env={}), num_gpus) == expected


@pytest.mark.parametrize(
    ("deploy", "words"),
    [({}, r"deploy\.workers: must be set where there is no GPU"), ({"devices": ["cuda:1"]}, "there is no cuda:1 here")],
)
def test_devices_that_are_not_there_are_refused(deploy: dict[str, object], words: str) -> None:
    """A machine without GPUs would run one slow core, or end in an error of the CUDA runtime."""
    with pytest.raises(ConfigError, match=words):
        engine_devices(load_config({"kev": {"deploy": {"mode": "multi_gpu", **deploy}}}, env={}), 0)


def test_the_memory_of_a_device_elsewhere_must_be_given() -> None:
    """The bill of ``kev plan`` would be for a device of no memory."""
    planned = load_config({"kev": {"deploy": {"mode": "multi_gpu", "devices": ["cuda:99"]}}}, env={})
    with pytest.raises(ConfigError, match="say with --memory"):
        make_plan(planned, PlanOptions(layers=32, hidden=4096), None)


@pytest.mark.parametrize(
    ("configured", "devices", "expected"),
    [(0, ("cpu",), 0), (3, ("cpu", "cpu"), 3), (0, ("cpu",) * 3, 2), (0, ("cpu",) * 9, 1), (0, ("cuda:0", "cpu"), 0)],
)
def test_cores_on_the_cpu_divide_its_threads(configured: int, devices: tuple[str, ...], expected: int) -> None:
    """Every core would take all processors, and they would hold each other up."""
    assert threads_per_core(configured, devices, num_cpus=7) == expected


# ---- the same answers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, "gemma3")
    return folder


QUESTIONS = [f"question {'and so on ' * (i % 3)}{i}" for i in range(12)]


def seed_settings(folder: Path, num_cores: int) -> dict[str, dict[str, dict[str, object]]]:
    """The published ``kev.yaml`` with several cores, over the tiny model."""
    tree = yaml.safe_load((ROOT / "deploy/examples/seed.yaml").read_text(encoding="utf-8"))
    small = settings_for(folder)["kev"]
    tree["kev"]["core"] = small["core"]  # type: ignore[index]
    tree["kev"]["deploy"] = {"mode": "multi_gpu", "workers": num_cores} if num_cores else {"mode": "single"}
    return tree


def bits(result: Result) -> tuple[object, ...]:
    return result.token_ids, result.text, result.finish_reason, result.isolation


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_the_published_file_with_two_cores_gives_the_answers_of_one(checkpoint: Path, backend: str) -> None:
    """An answer, or its receipt, would depend on the core that gave it."""
    found: dict[int, list[Result]] = {}
    for num_cores in (0, 2):
        settings = seed_settings(checkpoint, num_cores)
        settings["kev"]["core"]["backend"] = backend
        with Engine.from_config(settings) as engine:
            found[num_cores] = engine.ask(QUESTIONS, timeout_ms=60_000)
            stats = engine.stats()
        assert [node.alive for node in stats.nodes] == [True] * max(1, num_cores)
        assert stats.node.max_slots == 8 * max(1, num_cores)
    assert [bits(result) for result in found[2]] == [bits(result) for result in found[0]]
    assert {result.node_id for result in found[0]} == {"embedded-0"}
    assert {result.node_id for result in found[2]} == {"embedded-0-cpu", "embedded-1-cpu"}, "both cores have worked"


def test_cores_on_one_device_share_its_weights(checkpoint: Path) -> None:
    """Every core on the CPU would hold a copy of the model."""
    settings = load_config(settings_for(checkpoint, deploy={"mode": "multi_gpu", "workers": 2}), env={})
    opened = loading.open_nodes(checkpoint, settings, "test", SystemClock())
    first, second = opened.nodes
    assert first.model is second.model and first.cache is not second.cache and first.ledger is not second.ledger


def test_cores_that_answer_differently_do_not_serve_strict(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A question would get other bits on another GPU, under a promise that it does not."""
    monkeypatch.setattr(loading, "differing", lambda benches: [1])
    deploy: dict[str, object] = {"mode": "multi_gpu", "workers": 2}
    with pytest.raises(IsolationUnavailableError, match="other bits on cpu than on cpu; name equal devices"):
        loading.open_nodes(
            checkpoint, load_config(settings_for(checkpoint, deploy=deploy), env={}), "test", SystemClock()
        )
    lenient = settings_for(checkpoint, deploy=deploy, isolation={"level": "shared"})
    loading.open_nodes(checkpoint, load_config(lenient, env={}), "test", SystemClock())
    assert "an answer depends on the device" in caplog.text


def test_a_core_that_answers_differently_is_found(checkpoint: Path) -> None:
    """The comparison would see no difference, whatever a device does."""
    from inference_svc.equality import differing

    settings = load_config(settings_for(checkpoint, core={"backend": "cpu"}), env={})
    nodes = [loading.open_node(checkpoint, settings, name, SystemClock()).node for name in "abc"]
    module = nodes[1].model.module
    assert module is not None
    module.model.norm.weight.data[0] += 0.01
    assert differing([node.bench for node in nodes]) == [1]


# ---- shared work


async def test_one_request_spreads_over_all_cores(runners: list[GuidedRunner]) -> None:
    """The first core to wake would run everything."""
    async with scripted_cores(runners) as engine:
        await all_wait(engine)
        results = await engine.ask([f"question {i}" for i in range(6)])
        assert sorted(result.node_id for result in results) == [f"core-{i // 2}" for i in range(6)]
        stats = await until_idle(engine)
        assert [node.node_id for node in stats.nodes] == ["core-0", "core-1", "core-2"]
        assert stats.node.num_completion_tokens == sum(node.num_completion_tokens for node in stats.nodes)


async def test_a_cancelled_request_frees_every_core(runners: list[GuidedRunner]) -> None:
    """A core would go on with what nobody waits for."""
    async with scripted_cores(runners) as engine:
        await all_wait(engine)
        request_id = await engine.submit([f"a long question {'x' * 200} {i}" for i in range(6)])
        await until(lambda: all(runner.forwards for runner in runners))
        assert await engine.cancel(request_id) == 6
        await until_idle(engine)


# ---- a core fails


async def test_the_questions_of_a_core_that_ends_are_answered_by_the_others(runners: list[GuidedRunner]) -> None:
    """An answer would be lost, or be an error, though other devices are well."""
    async with scripted_cores(runners[:2]) as engine:
        await engine.ready()
        runners[0].before = fail_with(EngineDeadError("the device of this engine cannot be used any more"))
        questions = [f"question {i}" for i in range(8)]
        results = await engine.ask(questions, timeout_ms=60_000)
        assert [result.text for result in results] == questions
        assert {result.node_id for result in results} == {"core-1"}
        assert {result.attempt for result in results} == {1, 2}
        stats = await engine.stats()
        assert [node.alive for node in stats.nodes] == [False, True] and stats.node.alive
        await engine.ready()
        assert [result.text for result in await engine.ask(["more"])] == ["more"]
        assert not set(await leftovers(engine)) - {"running", "waiting", "KV positions"}


async def test_a_stream_goes_on_with_the_next_attempt(runners: list[GuidedRunner]) -> None:
    """A reader would see text of two attempts run together."""
    async with scripted_cores(runners[:2]) as engine:
        question = "an answer of some length"
        doomed = list(runners[:2])
        for runner in doomed:

            def end_one(plan: StepPlan, runner: GuidedRunner = runner) -> None:
                if runner.num_forwards_of(question) == 5:
                    for other in doomed:
                        other.before = lambda plan: None
                    raise EngineDeadError("the device is gone")

            runner.before = end_one
        request_id = await engine.submit([question], timeout_ms=60_000)
        events = [event async for event in engine.stream(request_id)]
        changes = [i for i, event in enumerate(events) if event.type is StreamEventType.ATTEMPT_CHANGED]
        assert len(changes) == 1
        assert "".join(e.text for e in events[changes[0] :]) == question


async def test_a_question_without_room_on_one_core_is_answered_by_another(runners: list[GuidedRunner]) -> None:
    """It would fail although another device has memory."""

    class SmallRunner(GuidedRunner):
        def execute(self, plan: StepPlan) -> StepOutput:
            super().execute(plan)
            return StepOutput(errors={s.sequence_id: OutOfMemoryError("no room") for s in plan.segments})

    async with scripted_cores([SmallRunner(str), runners[0]]) as engine:
        questions = [f"question {i}" for i in range(8)]
        results = await engine.ask(questions, timeout_ms=60_000)
        assert [result.text for result in results] == questions
        assert {result.node_id for result in results} == {"core-1"}
        assert all(node.alive for node in (await engine.stats()).nodes)
        await until_idle(engine)


async def test_out_of_memory_everywhere_is_the_outcome(runners: list[GuidedRunner]) -> None:
    """A question that fits nowhere would go round for ever."""
    async with scripted_cores(runners[:2]) as engine:
        for runner in runners[:2]:
            runner.before = fail_with(OutOfMemoryError("no room"), prompt="large")
        large, small = await engine.ask(["large", "small"], timeout_ms=60_000)
        assert large.error is not None and large.error.reason == "OUT_OF_MEMORY" and large.attempt == 2
        assert small.text == "small"
        await until_idle(engine)


async def test_a_question_that_ends_cores_ends_two_at_most(runners: list[GuidedRunner]) -> None:
    """One poisoned question would take all cores down, one after the other, and everybody else's answers along."""
    async with scripted_cores(runners) as engine:
        for runner in runners:
            runner.before = fail_with(EngineDeadError("the device is gone"), prompt="poison")
        questions = ["poison", *(f"question {i}" for i in range(8))]
        poison, *others = await engine.ask(questions, timeout_ms=60_000)
        assert [result.text for result in others] == questions[1:]
        assert poison.finish_reason is FinishReason.ERROR and poison.error is not None
        assert poison.error.reason == "ENGINE_DEAD"
        assert sum(node.alive for node in (await engine.stats()).nodes) == 1
        last = [forward for runner in runners for forward in runner.forwards if "poison" in forward][-1]
        assert last == {"poison"}, "its last attempt has no company"


async def test_the_end_of_the_last_core_ends_the_engine(runners: list[GuidedRunner]) -> None:
    """Everything would still wait, or still be accepted and promised to be ready."""
    async with scripted_cores(runners[:2]) as engine:
        await engine.ready()
        for runner in runners[:2]:
            runner.before = fail_with(EngineDeadError("the device is gone"))
        async with asyncio.timeout(10):
            outcome = await asyncio.gather(engine.ask(["a", "b", "c"], timeout_ms=60_000), return_exceptions=True)
            await until(lambda: engine._task is not None and engine._task.done())
            for call in (engine.ready(), engine.submit(["more"])):
                with pytest.raises(EngineDeadError):
                    await call
        [found] = outcome
        reasons = {r.error.reason for r in found if r.error} if isinstance(found, list) else {"ENGINE_DEAD"}
        assert reasons <= {"ENGINE_DEAD", "NODE_DRAINING"} and reasons


# ---- a core starts again

AT_ONCE: dict[str, object] = {"max_restarts": 2, "restart_pause_ms": 1}


def fail_times(count: int, prompt: str = "") -> Callable[[StepPlan], None]:
    """Ends the engine so many times, then no more."""
    left = [count]
    fail = fail_with(EngineDeadError("the device is gone"), prompt)

    def fail_while_left(plan: StepPlan) -> None:
        if left[0]:
            left[0] -= prompt in prompts_of(plan) or not prompt
            fail(plan)

    return fail_while_left


@pytest.mark.parametrize("num_cores", [1, 2])
async def test_a_core_that_has_ended_starts_again_and_no_question_is_lost(
    num_cores: int, runners: list[GuidedRunner]
) -> None:
    """Its place would stay empty, and what it held unanswered, until somebody restarts the process."""
    async with scripted_cores(runners[:num_cores], **AT_ONCE) as engine:
        await engine.ready()
        runners[0].before = fail_times(1)
        questions = [f"question {i}" for i in range(8)]
        results = await engine.ask(questions, timeout_ms=60_000)
        assert [result.text for result in results] == questions
        assert {result.attempt for result in results} == {1, 2}
        await until(lambda: engine._tiers is not None and engine._tiers.cores.stats()[0].alive)
        stats = await until_idle(engine)
        assert [node.alive for node in stats.nodes] == [True] * num_cores
        assert stats.nodes[0].num_restarts == stats.node.num_restarts == 1
        await engine.ready()


def test_a_core_that_starts_again_gives_the_same_bits(checkpoint: Path) -> None:
    """Something of the core that ended, or of its neighbours, would be in the answers of the new one."""
    loaded = load_config(settings_for(checkpoint, core={"backend": "auto", "restart_pause_ms": 1}), env={})
    parts = load_parts(loaded, SystemClock(), print)
    [node] = parts.nodes
    assert isinstance(node, Node)
    with Engine(AsyncEngine(loaded, parts)) as engine:
        before = engine.ask(QUESTIONS, timeout_ms=60_000)
        execute, plans = node.runner.execute, count()

        def fail_in_mid_answer(plan: StepPlan) -> StepOutput:
            if next(plans) == 3:
                raise EngineDeadError("the device is gone")
            return execute(plan)

        node.runner.execute = fail_in_mid_answer  # type: ignore[method-assign]
        after = engine.ask(QUESTIONS, timeout_ms=60_000)
        assert engine.stats().node.num_restarts == 1
    assert [bits(result) for result in after] == [bits(result) for result in before]
    assert {result.attempt for result in after} == {1, 2}


async def test_a_question_that_ends_the_only_core_twice_is_an_error(runners: list[GuidedRunner]) -> None:
    """It would end the core again and again; everybody else is answered."""
    async with scripted_cores(runners[:1], **AT_ONCE) as engine:
        runners[0].before = fail_times(2, prompt="poison")
        questions = ["poison", *(f"question {i}" for i in range(6))]
        poison, *others = await engine.ask(questions, timeout_ms=60_000)
        assert [result.text for result in others] == questions[1:]
        assert poison.error is not None and poison.error.reason == "ENGINE_DEAD"
        assert (await engine.stats()).node.num_restarts == 2


async def test_when_all_restarts_are_spent_the_engine_ends(runners: list[GuidedRunner]) -> None:
    """It would go on for ever without ever answering."""
    async with scripted_cores(runners[:1], **AT_ONCE) as engine:
        await engine.ready()
        runners[0].before = fail_with(EngineDeadError("the device is gone"))
        reasons: set[str] = set()
        async with asyncio.timeout(20):
            while engine._task is not None and not engine._task.done():
                [outcome] = await asyncio.gather(engine.ask(["a"], timeout_ms=60_000), return_exceptions=True)
                reasons |= {r.error.reason for r in outcome if r.error} if isinstance(outcome, list) else set()
        assert reasons <= {"ENGINE_DEAD", "NODE_DRAINING"}
        with pytest.raises(EngineDeadError):
            await engine.ready()
        assert (await engine.stats()).node.num_restarts == 2


async def test_a_core_that_cannot_be_renewed_uses_up_its_restarts(
    runners: list[GuidedRunner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that is gone, or that gives other bits now, would be tried for ever, or be trusted."""

    def broken(_: ScriptedNode) -> None:
        raise IsolationUnavailableError("other bits in company than alone")

    async with scripted_cores(runners[:2], **AT_ONCE) as engine:
        await engine.ready()
        monkeypatch.setattr(ScriptedNode, "renew", broken)
        runners[0].before = fail_times(1)
        results = await engine.ask([f"question {i}" for i in range(8)], timeout_ms=60_000)
        assert all(result.error is None for result in results)
        await until(lambda: "stays away" in caplog.text)
        assert [node.alive for node in (await engine.stats()).nodes] == [False, True]
        assert caplog.text.count("could not be started again") >= 2


async def test_while_no_core_runs_the_engine_is_not_ready_and_what_comes_waits(runners: list[GuidedRunner]) -> None:
    """A load balancer would send questions on; those that are there would be refused."""
    async with scripted_cores(runners[:1], max_restarts=1, restart_pause_ms=300) as engine:
        await engine.ready()
        runners[0].before = fail_times(1)
        asked = asyncio.create_task(engine.ask(["a"], timeout_ms=60_000))
        cores = engine._tiers.cores if engine._tiers is not None else None
        assert cores is not None
        await until(lambda: not cores.stats()[0].alive and not cores._group.has_others(""))
        with pytest.raises(EngineDeadError, match="starts again"):
            await engine.ready()
        late = asyncio.create_task(engine.ask(["late"], timeout_ms=60_000))
        assert [result.text for result in (*await asked, *await late)] == ["a", "late"]
        await engine.ready()


# ---- a step that does not return

HANGING: dict[str, object] = {"max_restarts": 1, "restart_pause_ms": 1, "step_limit_ms": 100}


async def test_the_questions_of_a_core_that_hangs_are_answered_by_the_others(
    runners: list[GuidedRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """They would wait for ever, though other devices are well; it comes back once its step returns."""
    async with scripted_cores(runners[:2], **HANGING) as engine:
        await all_wait(engine)
        runners[0].gate.clear()
        questions = [f"question {i}" for i in range(8)]
        results = await engine.ask(questions, timeout_ms=60_000)
        assert [result.text for result in results] == questions
        assert {result.node_id for result in results} == {"core-1"}
        assert "of core-0 on scripted has not returned" in caplog.text
        stats = await engine.stats()
        assert [node.alive for node in stats.nodes] == [False, True] and not stats.node.num_restarts
        await engine.ready()
        runners[0].gate.set()
        await until(lambda: engine._tiers is not None and engine._tiers.cores.stats()[0].alive)
        assert [result.text for result in await engine.ask(questions)] == questions
        assert (await until_idle(engine)).nodes[0].num_restarts == 1


async def test_the_only_core_that_hangs_fails_its_questions_and_the_engine_is_not_ready(
    runners: list[GuidedRunner],
) -> None:
    """Callers would wait for a device that does nothing any more, and more would be sent to it."""
    async with scripted_cores(runners[:1], **HANGING) as engine:
        await engine.ready()
        runners[0].gate.clear()
        results = await engine.ask(["a", "a", "b"], timeout_ms=60_000)
        assert {result.error.reason for result in results if result.error} == {"ENGINE_DEAD"}
        assert all(result.error and "core.step_limit_ms" in result.error.message for result in results)
        with pytest.raises(EngineDeadError, match="has not returned"):
            await engine.ready()
        with pytest.raises(EngineDeadError, match="has not returned"):
            await engine.submit(["more"])
        runners[0].gate.set()
        await until(lambda: engine._tiers is not None and engine._tiers.cores.stats()[0].alive)
        await engine.ready()
        assert [result.text for result in await engine.ask(["more"])] == ["more"]


async def test_steps_that_take_their_time_are_not_given_up(runners: list[GuidedRunner]) -> None:
    """Many steps, each within its limit, are not one long step."""
    async with scripted_cores(runners[:1], **HANGING) as engine:
        runners[0].step_s = 0.02
        assert [result.text for result in await engine.ask(["a question of twenty"])] == ["a question of twenty"]
        stats = await until_idle(engine)
        assert stats.node.alive and not stats.node.num_restarts


async def test_an_engine_that_hangs_can_be_closed(runners: list[GuidedRunner]) -> None:
    """Closing would wait for the step."""
    async with scripted_cores(runners[:1], **HANGING) as engine:
        await engine.ready()
        runners[0].gate.clear()
        await engine.ask(["a"], timeout_ms=60_000)
        async with asyncio.timeout(10):
            await engine.close()


# ---- the end


async def test_closing_stops_every_core(runners: list[GuidedRunner]) -> None:
    """A thread, with its arena, would stay behind."""
    before = engine_threads()
    async with scripted_cores(runners) as engine:
        await all_wait(engine)
        await engine.submit([f"a long question {'x' * 200} {i}" for i in range(12)])
        await until(lambda: all(runner.forwards for runner in runners))
        assert engine_threads().count("kev-engine") - before.count("kev-engine") == 3
    assert engine_threads() == before
    with pytest.raises(EngineDeadError, match="closed"):
        await engine.ask(["more"])


def test_the_report_is_that_of_the_core_that_can_promise_least(runners: list[GuidedRunner]) -> None:
    """One core would give unverified answers under the promise of another."""
    loaded, clock = config(2), SystemClock()
    nodes = [ScriptedNode(loaded, runner, clock) for runner in runners[:2]]
    nodes[1].report = replace(nodes[1].report, reason="its rows depend on each other")
    assert EngineParts(byte_tokenizer(), tuple(nodes)).report is nodes[1].report
