"""Replay of a share of the answers: silent where isolation holds; where it does not, nothing false gets out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import EngineDeadError
from common.types import ChannelDelta, ChannelResult, ChannelStarted, FinishReason, SamplingParams, Verdict
from inference_svc.engine_core import EngineCore
from inference_svc.model_loader import LoadedModel
from inference_svc.plan import StepOutput, StepPlan
from inference_svc.replay import Replayer
from inference_svc.scheduler import SchedulerSettings
from tests.integration.crowd import PREFILL_ROWS, SEGMENT, Ask, Crowd, Trace, prompt, run_together
from tests.integration.test_node import leaky_model
from tests.integration.tiny_models import NATIVE_FORMS, TORCH_FORMS, Form, form_id, model_as

SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, seed=5, logprobs=2)
ASKS = (
    Ask(prompt(20, seed=1), max_tokens=7),
    Ask(prompt(3, seed=2), sampling=SAMPLED),
    Ask(prompt(41, seed=3), max_tokens=2),
    Ask(prompt(17, seed=4), max_tokens=12),
)


def _settings(model: LoadedModel) -> SchedulerSettings:
    """Those of a crowd."""
    shapes = replace(model.shapes(8, PREFILL_ROWS, SEGMENT), prefill_rows=PREFILL_ROWS)
    return SchedulerSettings(node_id="test", max_slots=8, shapes=shapes, max_context=model.max_context)


def _replaying(model: LoadedModel, rate: float, num_positions: int = 2048) -> tuple[Crowd, Replayer]:
    crowd = Crowd(model, num_positions=num_positions)
    crowd.runner.observer = None
    settings = _settings(model)
    replayer = Replayer(rate, crowd.runner, crowd.ledger, settings, crowd.clock, crowd.cache.scrub)
    crowd.core = EngineCore(crowd.core.scheduler, crowd, replayer)
    return crowd, replayer


def _run(crowd: Crowd, asks: Sequence[Ask]) -> list[ChannelResult]:
    for ask in asks:
        crowd.add(ask)
    traces: list[Trace] = crowd.finish()
    return [trace.result for trace in traces if trace.result is not None]


@pytest.mark.parametrize("form", [*NATIVE_FORMS, TORCH_FORMS[1]], ids=form_id)
def test_replays_agree_and_change_nothing(form: Form) -> None:
    """Every answer is computed twice; tokens are those of an engine that replays nothing, and no KV stays taken."""
    model = model_as("gemma3", form)
    crowd, replayer = _replaying(model, 1.0)
    results = _run(crowd, ASKS)
    plain = run_together(model, list(ASKS))
    assert [result.token_ids for result in results] == [trace.token_ids for trace in plain]
    assert (replayer.num_replayed, replayer.num_violations) == (len(ASKS), 0)
    assert crowd.ledger.num_held == 0
    assert not crowd.runner._states.keys() - set(range(len(ASKS))), "replays leave no sampler behind"


def test_an_answer_that_company_changed_is_withheld() -> None:
    """Rows that see each other: the caller gets an error that names the question, never the text."""
    crowd, replayer = _replaying(leaky_model(10.0), 1.0)
    results = _run(crowd, ASKS)
    refused = [result for result in results if result.finish_reason is FinishReason.ERROR]
    assert replayer.num_violations == len(refused) > 0
    for result in refused:
        assert result.error is not None and result.error.reason == "ISOLATION_VIOLATION"
        assert f"queries[{result.question_index}]" in result.error.message
        assert not result.text and not result.token_ids and result.logprobs is None
        assert result.receipt is not None and result.receipt.verdict is Verdict.UNVERIFIED


def test_a_replay_without_room_is_skipped() -> None:
    """An arena that is full of running questions has no place for it: the answer goes out as it is."""
    model = model_as("llama", NATIVE_FORMS[1])
    asks = [replace(ASKS[0], max_tokens=4), replace(ASKS[0], max_tokens=40)]
    room = sum(len(ask.ids) + ask.max_tokens for ask in asks)
    crowd, replayer = _replaying(model, 1.0, num_positions=-(-room // 16) * 16)
    results = _run(crowd, asks)
    assert {result.finish_reason for result in results} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert replayer.num_violations == 0
    assert replayer.num_skipped + replayer.num_replayed == len(asks), "each is told"


class Recorder:
    """Runs plans through a crowd's runner and remembers whose they were."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self.forwards: list[set[int]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        self.forwards.append({segment.sequence_id for segment in plan.segments})
        return self._crowd.runner.execute(plan)

    def drop(self, sequence_id: int) -> None:
        self._crowd.runner.drop(sequence_id)


def _recorded(rate: float, keys: Sequence[int] | None = None) -> tuple[Crowd, Recorder, Replayer]:
    """A crowd of which only the named questions are replayed."""
    model = model_as("llama", NATIVE_FORMS[1])
    crowd, _ = _replaying(model, rate)
    recorder = Recorder(crowd)
    replayer = Replayer(rate, recorder, crowd.ledger, _settings(model), crowd.clock, crowd.cache.scrub)
    if keys is not None:
        replayer.is_chosen = lambda request_id, question_index: question_index in keys  # type: ignore[method-assign]
    crowd.core = EngineCore(crowd.core.scheduler, recorder, replayer)
    return crowd, recorder, replayer


def test_neighbours_go_on_during_a_replay() -> None:
    """A replay's forwards hold the replay alone, and between two of them the others take a step."""
    crowd, recorder, replayer = _recorded(1.0, keys=[0])
    results = _run(crowd, [replace(ASKS[0], max_tokens=6), replace(ASKS[3], max_tokens=40)])
    replays = [index for index, sequences in enumerate(recorder.forwards) if min(sequences) < 0]
    assert len(replays) >= 6 and replayer.num_replayed == 1
    assert all(len(recorder.forwards[index]) == 1 for index in replays)
    assert all(recorder.forwards[index + 1] == {1} for index in replays[:-1])
    assert [len(result.token_ids) for result in results] == [6, 40]
    order = [event.question_index for event in crowd.events if isinstance(event, ChannelResult)]
    assert order == [0, 1], "the replayed answer goes out before its neighbour has ended"


def test_replays_go_on_side_by_side_each_alone_in_its_forwards() -> None:
    """Under load answers would wait for each other's replays until their time is up, and go out unchecked."""
    crowd, recorder, replayer = _recorded(1.0)
    asks = [replace(ASKS[0], max_tokens=6)] * 4
    results = _run(crowd, asks)
    replays = [sequences for sequences in recorder.forwards if min(sequences) < 0]
    assert replayer.num_replayed == len(asks) == len(results) and not replayer.num_skipped
    assert all(len(sequences) == 1 for sequences in replays)
    order = [min(sequences) for sequences in replays]
    assert order.index(-2) < len(order) - 1 - order[::-1].index(-1), "the second begins before the first has ended"
    assert crowd.ledger.num_held == 0


def test_nothing_of_an_answer_leaves_before_its_replay() -> None:
    """Text waits as well: what is withheld later must not have been streamed before."""
    _, _, replayer = _recorded(1.0, keys=[0])
    started = ChannelStarted(request_id="r", question_index=0, channel_id=0, slot=0, attempt=1, node_id="n")
    deltas = [
        ChannelDelta(
            request_id="r", question_index=index, channel_id=0, attempt=1, seq=0, text=f"text {index}", num_tokens=1
        )
        for index in (0, 1)
    ]
    assert replayer.hold_back([started, *deltas], ()) == [started, deltas[1]]
    cancelled = ChannelResult(
        request_id="r", question_index=0, channel_id=0, finish_reason=FinishReason.CANCELLED, finished_at=0.0
    )
    assert replayer.hold_back([cancelled], ()) == [deltas[0], cancelled], "what is not replayed goes out in order"
    assert not replayer.has_work


def test_a_refuted_answer_streams_nothing() -> None:
    """Neither delta nor token of it is among the events of the run."""
    crowd, replayer = _replaying(leaky_model(10.0), 1.0)
    _run(crowd, ASKS)
    assert replayer.num_violations
    for event in crowd.events:
        assert not isinstance(event, ChannelDelta)


def test_a_budget_ends_the_wait_for_a_replay() -> None:
    """An answer that is ready in time is not made late: it goes out without its replay."""
    crowd, _, replayer = _recorded(1.0)
    crowd.add(replace(ASKS[3], time_budget_ms=1000))
    while not replayer.has_work:
        crowd.step()
    crowd.clock.advance(2.0)
    crowd.step()
    result = crowd.traces[0].result
    assert result is not None and len(result.token_ids) == 12 and result.error is None
    assert (
        replayer.num_replayed == 0
        and replayer.num_skipped == 1
        and crowd.ledger.num_held == 0
        and not crowd.core.has_work
    )


def test_a_replay_that_fails_refutes_nothing() -> None:
    """Memory that runs out in the replay says nothing of the answer."""
    crowd, recorder, replayer = _recorded(1.0)
    crowd.add(ASKS[0])
    while not replayer.has_work:
        crowd.step()

    def broken(plan: StepPlan) -> StepOutput:
        raise MemoryError("no")

    recorder.execute = broken  # type: ignore[method-assign]
    crowd.finish()
    result = crowd.traces[0].result
    assert result is not None and result.error is None and result.token_ids
    assert (replayer.num_replayed, replayer.num_skipped, replayer.num_violations) == (0, 1, 0)
    assert crowd.ledger.num_held == 0


def test_an_engine_that_ends_keeps_no_answer_back() -> None:
    """Answers that wait for their replay go out, in order, with those that it has to fail."""
    crowd, _, replayer = _recorded(1.0)
    crowd.add(replace(ASKS[0], max_tokens=3))
    crowd.add(replace(ASKS[3], max_tokens=40))
    while not replayer.has_work:
        crowd.step()
    events = crowd.core.fail_all(EngineDeadError("the engine was shut down"))
    results = {event.question_index: event for event in events if isinstance(event, ChannelResult)}
    assert results[0].finish_reason is not FinishReason.ERROR and results[1].finish_reason is FinishReason.ERROR
    assert not crowd.core.has_work and crowd.ledger.num_held == 0


@settings(deadline=None)
@given(rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_the_share_is_the_rate_and_depends_on_ids_alone(rate: float) -> None:
    """Two nodes choose the same questions; about as many as asked for."""
    model = model_as("llama", NATIVE_FORMS[1])
    one, other = _replaying(model, rate)[1], _replaying(model, rate)[1]
    chosen = [one.is_chosen(f"request {index}", index % 7) for index in range(2000)]
    assert chosen == [other.is_chosen(f"request {index}", index % 7) for index in range(2000)]
    assert abs(sum(chosen) / 2000 - rate) < 0.05
