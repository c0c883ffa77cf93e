"""Isolation under random schedules: whatever comes, goes and is stored beside a question, its bits are those alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.types import FinishReason, SamplingParams
from inference_svc.attention import Backend
from inference_svc.engine_core import EngineCore
from inference_svc.plan import Segment
from inference_svc.replay import Replayer
from tests.integration.crowd import SEGMENT, Ask, Crowd, Trace, prompt, run_alone, without_sharing
from tests.integration.tiny_models import WINDOW, Form, form_id, model_as

NATIVE = [
    ("gemma3", Form("bf16", Backend.NATIVE)),
    ("gemma2", Form("int8", Backend.NATIVE)),
    ("qwen3_moe", Form("bf16", Backend.NATIVE)),
]
_PREFIX, _OTHER_PREFIX = prompt(SEGMENT + 5, seed=9), prompt(2 * SEGMENT, seed=10)
_STEP_S = 0.5


def _sharing(prefix: tuple[int, ...], num_tokens: int, tenant: str) -> Ask:
    ids = prefix + prompt(num_tokens, seed=num_tokens)
    return Ask(ids, boundaries=(len(prefix),), num_shared=len(prefix), tenant=tenant, max_tokens=7)


CATALOGUE = (
    Ask(prompt(1, seed=1), max_tokens=12),
    Ask(prompt(WINDOW + 2, seed=2), max_tokens=10),
    Ask(prompt(3 * SEGMENT, seed=3), max_tokens=1),
    Ask(prompt(90, seed=4), max_tokens=5),
    Ask(prompt(SEGMENT + 1, seed=5), sampling=SamplingParams(max_tokens=9, temperature=0.9, seed=42)),
    _sharing(_PREFIX, 3, "a"),
    _sharing(_PREFIX, 40, "a"),
    _sharing(_PREFIX, 3, "b"),
    _sharing(_OTHER_PREFIX, 12, "a"),
)
"""What is asked: around the borders of segments and windows, sampled, and with prefixes of two tenants."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One question and what becomes of it."""

    ask: int
    gap_steps: int
    """Steps until the next one comes."""
    fate: str


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        ask=st.integers(0, len(CATALOGUE) - 1),
        gap_steps=st.sampled_from([0, 0, 1, 2, 5]),
        fate=st.sampled_from(["run", "run", "run", "cancel", "timeout"]),
    ),
    min_size=2,
    max_size=12,
)

_ALONE: dict[tuple[str, str, int], Trace] = {}


def _alone(name: str, form: Form, index: int) -> Trace:
    key = name, str(form), index
    if key not in _ALONE:
        _ALONE[key] = run_alone(model_as(name, form), without_sharing(CATALOGUE[index]))
    return _ALONE[key]


def _replaying(crowd: Crowd, rate: float) -> Replayer:
    """Replays run beside the crowd; only what the questions themselves give is recorded."""

    def observe(segment: Segment, row: torch.Tensor) -> None:
        if segment.sequence_id >= 0:
            crowd.traces[segment.sequence_id].logits.append(row.clone())

    crowd.runner.observer = observe
    scheduler = crowd.core.scheduler
    replayer = Replayer(rate, crowd.runner, crowd.ledger, scheduler._settings, crowd.clock, crowd.cache.scrub)
    crowd.core = EngineCore(scheduler, crowd, replayer)
    return replayer


def _is_beginning_of(one: Trace, whole: Trace) -> bool:
    """What one got is, bit for bit, what the other got first."""
    return len(one.logits) <= len(whole.logits) and all(
        torch.equal(a, b) for a, b in zip(one.logits, whole.logits, strict=False)
    )


SCHEDULES = given(
    arrivals=ARRIVALS,
    slots=st.integers(1, 6),
    keep=st.booleans(),
    rate=st.sampled_from([0.0, 0.5, 1.0]),
    num_positions=st.sampled_from([256, 2048]),
)


@pytest.mark.parametrize(("name", "form"), NATIVE, ids=form_id)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@SCHEDULES
def test_random_schedules_change_no_bit(
    name: str, form: Form, arrivals: list[Arrival], slots: int, keep: bool, rate: float, num_positions: int
) -> None:
    """Prompts and answers share forwards, prefixes are found, replays run between the steps."""
    _check(name, form, arrivals, slots, keep, rate, num_positions)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@SCHEDULES
def test_random_schedules_change_no_bit_where_row_counts_are_fixed(
    arrivals: list[Arrival], slots: int, keep: bool, rate: float, num_positions: int
) -> None:
    """The same on torch, whose kernels need it."""
    _check("gemma3", Form("bf16", Backend.CPU), arrivals, slots, keep, rate, num_positions)


def _check(
    name: str, form: Form, arrivals: list[Arrival], slots: int, keep: bool, rate: float, num_positions: int
) -> None:
    """Every question is compared: those that end as asked in whole, those that were stopped as far as they came."""
    crowd = Crowd(model_as(name, form), max_slots=slots, keep_prefixes=keep, num_positions=num_positions)
    replayer = _replaying(crowd, rate)
    for arrival in arrivals:
        budget_ms = 2_000 if arrival.fate == "timeout" else 1_000_000
        index = crowd.add(replace(CATALOGUE[arrival.ask], time_budget_ms=budget_ms))
        for _ in range(arrival.gap_steps):
            crowd.step()
            crowd.clock.advance(_STEP_S)
        if arrival.fate == "cancel" and crowd.traces[index].result is None:
            crowd.core.scheduler.cancel("crowd", index)  # False: it waits for its replay
    traces = crowd.finish()
    for arrival, trace in zip(arrivals, traces, strict=True):
        alone = _alone(name, form, arrival.ask)
        assert trace.result is not None and trace.result.finish_reason is not FinishReason.ERROR
        assert _is_beginning_of(trace, alone)
        if trace.result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert trace.token_ids == alone.token_ids and len(trace.logits) == len(alone.logits)
    assert not replayer.num_violations
    assert keep or crowd.ledger.num_held == 0
