"""Replay of a share of the answers: silent where isolation holds; where it does not, nothing false gets out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import ChannelResult, FinishReason, SamplingParams, Verdict
from inference_svc.engine_core import EngineCore
from inference_svc.model_loader import LoadedModel
from inference_svc.replay import Replayer
from inference_svc.scheduler import SchedulerSettings
from tests.integration.crowd import Ask, Crowd, Trace, prompt, run_together
from tests.integration.test_node import leaky_model
from tests.integration.tiny_models import NATIVE_FORMS, TORCH_FORMS, Form, form_id, model_as

SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, seed=5, logprobs=2)
ASKS = (
    Ask(prompt(20, seed=1), max_tokens=7),
    Ask(prompt(3, seed=2), sampling=SAMPLED),
    Ask(prompt(41, seed=3), max_tokens=2),
    Ask(prompt(17, seed=4), max_tokens=12),
)


def _replaying(model: LoadedModel, rate: float, num_positions: int = 2048) -> tuple[Crowd, Replayer]:
    crowd = Crowd(model, num_positions=num_positions)
    crowd.runner.observer = None
    shapes = crowd.model.shapes(8, 32, 16)
    settings = SchedulerSettings(node_id="test", max_slots=8, shapes=shapes, max_context=model.max_context)
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


@given(rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_the_share_is_the_rate_and_depends_on_ids_alone(rate: float) -> None:
    """Two nodes choose the same questions; about as many as asked for."""
    model = model_as("llama", NATIVE_FORMS[1])
    one, other = _replaying(model, rate)[1], _replaying(model, rate)[1]
    chosen = [one.is_chosen(f"request {index}", index % 7) for index in range(2000)]
    assert chosen == [other.is_chosen(f"request {index}", index % 7) for index in range(2000)]
    assert abs(sum(chosen) / 2000 - rate) < 0.05
