"""The node: probe, fail closed, and what one forward may cost its neighbours."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.clock import SystemClock
from common.errors import ConfigError, InvariantError, IsolationUnavailableError, NonFiniteLogitsError
from common.types import FinishReason, IsolationLevel, Verdict
from inference_svc.mask_summary import overlapping, segment_digest, summary
from inference_svc.model_loader import LoadedModel
from inference_svc.node import Node, NodeSettings
from inference_svc.plan import KVView, Segment, StepKind, StepPlan
from inference_svc.slots import Extent
from tests.integration.crowd import Ask, Crowd, prompt, run_alone, same_bits
from tests.integration.tiny_models import loaded_model

SETTINGS = NodeSettings(node_id="n", max_slots=4, prefill_rows=32, segment_tokens=16)


def leaky_model(amount: float) -> LoadedModel:
    """A model whose last norm lets rows see each other."""
    model = loaded_model("llama")
    module = copy.deepcopy(model.module)
    assert module is not None

    def leak(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + amount * output.mean(dim=1, keepdim=True)

    module.model.norm.register_forward_hook(leak)
    return replace(model, module=module)


def test_the_probe_passes_on_this_machine() -> None:
    """Both shapes of the engine are independent of other rows and of the place among them."""
    node = Node(loaded_model("gemma3", torch.bfloat16), SETTINGS, SystemClock())
    assert node.report.row_independent and node.report.position_independent
    assert dict(node.report.levels) == dict.fromkeys(IsolationLevel, Verdict.BITWISE)
    assert (node.report.decode_rows, node.report.prefill_rows) == (8, 32)
    assert node.ledger.num_held == 0, "the probe leaves nothing behind"
    node.close()


def test_strict_is_refused_where_rows_see_each_other() -> None:
    """A leak too small for any tolerance still changes bits: the node does not start, and says the way out."""
    with pytest.raises(IsolationUnavailableError, match=r"core\.precision") as caught:
        Node(leaky_model(1e-6), SETTINGS, SystemClock())
    assert "other rows change" in str(caught.value)


def test_a_lower_level_runs_without_the_promise() -> None:
    """loose on the same machine starts, and every answer says unverified."""
    node = Node(leaky_model(1e-6), replace(SETTINGS, level=IsolationLevel.LOOSE), SystemClock())
    assert set(dict(node.report.levels).values()) == {Verdict.UNVERIFIED} and node.report.reason
    node.close()


def test_a_renewed_node_must_still_keep_questions_apart() -> None:
    """After a fault of the device it would serve under a promise that it was given before."""
    model = loaded_model("llama")
    module = copy.deepcopy(model.module)
    assert module is not None
    node = Node(replace(model, module=module), SETTINGS, SystemClock())
    former = node.ledger, node.cache, node.scheduler
    node.renew()
    assert not any(part is old for part, old in zip((node.ledger, node.cache, node.scheduler), former, strict=True))
    assert node.ledger.num_held == 0
    module.model.norm.register_forward_hook(lambda _m, _i, output: output + 1e-6 * output.mean(dim=1, keepdim=True))
    with pytest.raises(IsolationUnavailableError, match="after its restart"):
        node.renew()
    node.close()


def test_a_budget_without_room_for_one_position_is_refused() -> None:
    """The message names the setting and the least that would do."""
    with pytest.raises(ConfigError, match=r"kv_cache_bytes 5 .* at least \d+"):
        Node(loaded_model("llama"), replace(SETTINGS, kv_cache_bytes=5), SystemClock())


def test_released_memory_is_zero() -> None:
    """Nothing of a question stays in the arena after it ended; a free arena is all zeros."""
    crowd = Crowd(loaded_model("llama"))
    for n in (3, 20, 40):
        crowd.add(Ask(prompt(n, seed=n)))
    crowd.step()
    assert any(tensor.abs().sum() > 0 for tensor in crowd.cache.keys)
    crowd.finish()
    assert all(not tensor.any() for tensor in (*crowd.cache.keys, *crowd.cache.values))


def test_kv_memory_is_what_the_plan_says() -> None:
    """Allocated bytes equal positions times the geometry's bytes per position."""
    crowd = Crowd(loaded_model("gemma3", torch.bfloat16), num_positions=512)
    assert crowd.cache.num_bytes == 512 * crowd.model.geometry.position_bytes


def test_logits_are_made_for_the_last_rows_only() -> None:
    """A prefill of many tokens gives decode_rows rows of logits, never one per token."""
    crowd = Crowd(loaded_model("llama"))
    seen: list[int] = []
    handle = crowd.model.module.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    try:
        for n in (60, 90, 3):
            crowd.add(Ask(prompt(n, seed=n), max_tokens=3))
        crowd.finish()
    finally:
        handle.remove()
    assert seen and set(seen) == {8}


def test_a_question_whose_logits_are_nan_fails_alone() -> None:
    """An overflow in one question is its error, not an empty success; the neighbour's bits do not move."""
    model = loaded_model("llama")
    target, sick = Ask(prompt(9, seed=1), max_tokens=8), Ask(prompt(9, seed=2), max_tokens=8)
    crowd = Crowd(model)
    index, other = crowd.add(target), crowd.add(sick)

    def spoil(_crowd: Crowd, plan: StepPlan) -> None:
        for segment in plan.segments:
            if segment.sequence_id == other and segment.position > 9:
                for start, end in segment.kv.ranges(0, segment.end):
                    crowd.cache.values[0][start:end] = float("inf")

    crowd.before_forward = spoil
    traces = crowd.finish()
    assert same_bits(run_alone(model, target), traces[index])
    result = traces[other].result
    assert result is not None and result.finish_reason is FinishReason.ERROR and result.error is not None
    assert result.error.reason == NonFiniteLogitsError.reason


def test_running_out_of_memory_fails_the_forward_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The questions of that forward get OUT_OF_MEMORY; the next question is answered."""
    crowd = Crowd(loaded_model("llama"))
    doomed = crowd.add(Ask(prompt(5, seed=1)))

    def starve(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(crowd.model.module, "forward", starve)
        crowd.step()
    result = crowd.traces[doomed].result
    assert result is not None and result.error is not None and result.error.reason == "OUT_OF_MEMORY"
    healthy = crowd.add(Ask(prompt(5, seed=1)))
    assert crowd.finish()[healthy].result.finish_reason is not FinishReason.ERROR  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["stale", "foreign", "too far"])
def test_a_plan_that_leaves_its_extent_fails_that_question_only(fault: str) -> None:
    """Had the scheduler a bug, the ledger would stop the row before it touched a neighbour's KV."""
    model = loaded_model("llama")
    target = Ask(prompt(12, seed=1), max_tokens=6)
    crowd = Crowd(model)
    index, broken = crowd.add(target), crowd.add(Ask(prompt(12, seed=2), max_tokens=6))
    plan = crowd.core.scheduler.schedule()
    assert plan is not None

    def tampered(segment: Segment) -> Segment:
        if segment.sequence_id != broken:
            return segment
        private = segment.kv.private
        neighbours = next(s.kv.private for s in plan.segments if s.sequence_id == index)
        views = {
            "stale": KVView(private=replace(private, epoch=private.epoch + 7)),
            "foreign": KVView(private=neighbours),
            "too far": KVView(private=private),
        }
        position = 10_000 if fault == "too far" else segment.position
        return replace(segment, kv=views[fault], position=position)

    bad = replace(plan, segments=tuple(tampered(segment) for segment in plan.segments))
    output = crowd.runner.execute(bad)
    if fault != "foreign":
        assert set(output.errors) == {broken}
    assert isinstance(output.errors[broken], InvariantError)
    if fault != "foreign":
        for event in crowd.core.scheduler.update(plan, output):
            assert getattr(event, "finish_reason", None) in (None, FinishReason.ERROR)
        assert same_bits(run_alone(model, target), crowd.finish()[index])


def test_the_forward_log_has_one_line_per_forward(tmp_path: Path) -> None:
    """Rows, KV ranges, prefix, overlaps and truncations of every forward are on disk as JSON."""
    from inference_svc.mask_summary import ForwardLog

    crowd = Crowd(loaded_model("llama"))
    log = ForwardLog(str(tmp_path / "forward.jsonl"))
    crowd.runner._log = log
    for n in (20, 3):
        crowd.add(Ask(prompt(n, seed=n), max_tokens=4))
    crowd.finish()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "forward.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(crowd.plans)))
    assert all(line["overlaps"] == line["cross_visible_pairs"] == line["truncations"] == 0 for line in lines)
    first = lines[0]
    assert (first["kind"], first["rows"], first["used_rows"]) == ("prefill", 32, 23)
    assert [channel["rows"] for channel in first["channels"]] == [[0, 3], [3, 19], [19, 23]]
    assert all(len(line["digest"]) == 64 for line in lines)


def _segment(sequence_id: int, extent: Extent, prefix: Extent | None = None) -> Segment:
    kv = KVView(private=extent, prefix=prefix, num_prefix=prefix.length if prefix else 0)
    return Segment(
        sequence_id=sequence_id, slot=sequence_id, row=0, position=0, token_ids=(5,) * 4, kv=kv, owner=f"s{sequence_id}"
    )


def test_overlaps_between_questions_are_counted() -> None:
    """The summary is able to say no: two extents that touch are reported for both questions."""
    segments = (
        _segment(1, Extent(0, 100, 1, "s1")),
        _segment(2, Extent(10, 5, 2, "s2")),
        _segment(3, Extent(90, 20, 3, "s3")),
        _segment(4, Extent(110, 5, 4, "s4")),
    )
    plan = StepPlan(step_index=0, kind=StepKind.PREFILL, num_rows=32, segments=segments)
    assert set(overlapping(plan)) == {1, 2, 3}
    assert summary(plan)["overlaps"] == 3


def test_a_segments_digest_tells_what_it_sees_not_where_it_lies() -> None:
    """The same rows in another extent, or behind a shared prefix, have the same digest."""
    moved = segment_digest(_segment(1, Extent(640, 10, 9, "s1")))
    assert segment_digest(_segment(1, Extent(0, 10, 1, "s1"))) == moved
    inside_prefix = _segment(1, Extent(50, 10, 1, "s1"), prefix=Extent(100, 8, 2, "prefix:x"))
    assert segment_digest(inside_prefix) == moved
