"""A model spread over two processes: the answers of one, isolated as promised, and a clear end when a process dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from common.config import load_config
from common.errors import ConfigError, EngineDeadError, InvariantError, UnsupportedModelError
from common.types import FinishReason, IsolationLevel, Verdict
from inference_svc.attention import Backend
from inference_svc.devices import engine_devices
from inference_svc.model_loader import LoadSettings, load_model
from inference_svc.node import Node
from inference_svc.plan import ForwardShapes, KVView, Segment, StepKind, StepPlan
from inference_svc.probe import ProbeQuestion, run_questions
from inference_svc.slots import Extent
from inference_svc.tensor_parallel_message import Fill, Open, Rows, Run, encode, read
from inference_svc.verify import verify_isolation
from kev.engine import AsyncEngine
from kev.parts import EngineParts, load_parts
from tests.integration.tiny_checkpoint import prompt_ids, save_checkpoint, settings_for

# ---- messages

numbers = st.integers(0, 2**40)
extents = st.builds(Extent, numbers, numbers, st.just(0), st.just(""))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    ids = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
    kv = st.builds(KVView, private=extents, prefix=st.none() | extents, num_prefix=numbers)
    parts = draw(st.lists(st.tuples(numbers, numbers, ids, kv), max_size=4))
    segments = tuple(
        Segment(sequence_id=i, slot=i, row=row, position=position, token_ids=tokens, kv=view, owner="")
        for i, (row, position, tokens, view) in enumerate(parts)
    )
    kind = draw(st.sampled_from([StepKind.PREFILL, StepKind.DECODE]))
    plan = StepPlan(step_index=draw(numbers), kind=kind, num_rows=draw(numbers), segments=segments)
    fills = draw(st.lists(st.builds(Fill, numbers, numbers, poisoned=st.booleans()), max_size=3).map(tuple))
    return Run(draw(numbers), fills, plan, draw(ids))


opens = st.builds(
    Open,
    numbers,
    numbers,
    st.builds(ForwardShapes, decode_rows=numbers, prefill_rows=numbers, segment_tokens=numbers),
)


@given(messages=st.lists(st.one_of(runs(), opens, st.builds(Rows, numbers, numbers)), max_size=4))
def test_messages_arrive_as_they_were_sent(messages: list[Run | Open | Rows]) -> None:
    """The processes would run different forwards, and add up numbers of different questions."""
    stream = BytesIO(b"".join(map(encode, messages)))
    assert [read(stream) for _ in messages] == messages
    assert read(stream) is None


@given(message=runs(), data=st.data())
def test_a_message_cut_short_is_refused(message: Run, data: st.DataObject) -> None:
    """Half a plan would be run."""
    whole = encode(message)
    with pytest.raises(InvariantError):
        read(BytesIO(whole[: data.draw(st.integers(1, len(whole) - 1))]))


# ---- what is refused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, "llama")
    return folder


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tensor_parallel": 3}, UnsupportedModelError, "4 heads and 2 KV heads, which 3 processes cannot share"),
        ({"backend": Backend.NATIVE}, ConfigError, "runs on torch"),
        ({"precision": "int8"}, ConfigError, "runs on torch in fp32, bf16 or fp16, got core.precision int8"),
        ({"device": "cuda:1"}, ConfigError, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_cannot_be_spread_is_refused_before_a_process_starts(
    checkpoint: Path, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    """It would end in an error of some library, minutes later."""
    fields: dict[str, object] = {"precision": "fp32", "max_context": 256, "backend": None, "tensor_parallel": 2}
    with pytest.raises(error, match=words):
        load_model(checkpoint, LoadSettings(**{**fields, **changes}))  # type: ignore[arg-type]


def test_a_spread_model_is_one_core() -> None:
    """Every core would start processes of its own, on the same devices."""
    config = load_config(
        {"kev": {"deploy": {"mode": "multi_gpu", "workers": 2}, "core": {"tensor_parallel": 2}}}, env={}
    )
    with pytest.raises(ConfigError, match="choose one"):
        engine_devices(config, 2)


# ---- two processes

TORCH = {"backend": "cpu", "num_threads": 1}
QUESTIONS = [f"question {'and so on ' * (i % 3)}{i}" for i in range(8)]


@pytest.fixture(scope="module")
def parts(checkpoint: Path) -> Iterator[EngineParts]:
    """Starting a process takes seconds, so the tests share one; the last one ends it."""
    core = {"tensor_parallel": 2, "num_threads": 1}
    parts = load_parts(load_config(settings_for(checkpoint, core=core), env={}), SystemClock(), print)
    yield parts
    for node in parts.nodes:
        node.close()


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Iterator[EngineParts]:
    parts = load_parts(load_config(settings_for(checkpoint, core=TORCH), env={}), SystemClock(), print)
    yield parts
    for node in parts.nodes:
        node.close()


def node_of(parts: EngineParts) -> Node:
    [node] = parts.nodes
    assert isinstance(node, Node)
    return node


def test_each_process_holds_a_part(parts: EngineParts, whole: EngineParts) -> None:
    """The keys of a part would lie in another's heads, and semantic routing would know half of the words."""
    spread, alone = node_of(parts).model, node_of(whole).model
    assert (spread.geometry.num_kv_heads, alone.geometry.num_kv_heads) == (1, 2)
    assert torch.equal(spread.embedding_rows(100, 259), alone.embedding_rows(100, 259))
    assert spread.fingerprint != alone.fingerprint, "the last bits may differ"


def test_isolation_is_bitwise_with_two_processes(parts: EngineParts) -> None:
    """A neighbour, a place among the rows or a shared prefix would change bits."""
    node = node_of(parts)
    assert dict(node.report.levels)[IsolationLevel.STRICT] is Verdict.BITWISE
    shapes = node.model.shapes(4, 32, 16)
    checks = {check.name: check for check in verify_isolation(node.model, shapes, 4, print)}
    assert [name for name, check in checks.items() if not check.passed] == []


def test_a_question_leaves_nothing_that_changes_the_next(parts: EngineParts) -> None:
    """Keys of a question would stay in memory and be read by the next one."""
    node = node_of(parts)
    [before] = run_questions(node.bench, [ProbeQuestion(ids=tuple(prompt_ids("hello")), num_tokens=6)])
    assert not any(tensor.any() for tensor in (*node.cache.keys, *node.cache.values))
    [after] = run_questions(node.bench, [ProbeQuestion(ids=tuple(prompt_ids("hello")), num_tokens=6)])
    assert before.same_bits(after)


async def test_two_processes_give_the_answers_of_one_until_one_dies(
    checkpoint: Path, parts: EngineParts, whole: EngineParts
) -> None:
    """A part would be added twice or not at all; or, after a death, everything waits for a sum that never comes."""
    config = load_config(settings_for(checkpoint), env={})
    node = node_of(parts)
    ranks = node.model.ranks
    assert ranks is not None
    async with AsyncEngine(config, whole) as engine:
        expected = await engine.ask(QUESTIONS, timeout_ms=60_000)
    async with AsyncEngine(config, parts) as engine:
        found = await engine.ask(QUESTIONS, timeout_ms=60_000)
        alone = [(await engine.ask([question], timeout_ms=60_000))[0] for question in QUESTIONS]
        assert [r.token_ids for r in found] == [r.token_ids for r in expected] == [r.token_ids for r in alone]
        assert {r.isolation.verdict for r in found} == {Verdict.BITWISE}
        num_before = node.stats().num_completion_tokens
        request_id = await engine.submit(QUESTIONS, max_tokens=200, timeout_ms=60_000)
        while node.stats().num_completion_tokens < num_before + 8:
            await asyncio.sleep(0.001)
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        async with asyncio.timeout(20):
            [outcome] = await asyncio.gather(engine.wait(request_id), return_exceptions=True)
            while engine._task is None or not engine._task.done():
                await asyncio.sleep(0.01)
        if isinstance(outcome, list):
            errors = {r.error.reason for r in outcome if r.finish_reason is FinishReason.ERROR and r.error}
            assert errors and errors <= {"ENGINE_DEAD", "NODE_DRAINING"}
        else:
            assert isinstance(outcome, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await engine.ready()
        assert not node.stats().alive
        with pytest.raises(EngineDeadError, match="the model is spread over processes"):
            ranks.tell(Rows(0, 1))
    for process_id in ranks.process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


async def test_an_idle_engine_ends_with_a_process_and_another_may_start(checkpoint: Path) -> None:
    """It would promise to be ready until the next question; or what it leaves behind keeps others from starting."""
    core = {"tensor_parallel": 2, "num_threads": 1}
    config = load_config(settings_for(checkpoint, core=core), env={})
    parts = load_parts(config, SystemClock(), print)
    ranks = node_of(parts).model.ranks
    assert ranks is not None
    async with AsyncEngine(config, parts) as engine:
        await engine.ready()
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        async with asyncio.timeout(20):
            while engine._task is None or not engine._task.done():
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError):
            await engine.submit(["more"])
