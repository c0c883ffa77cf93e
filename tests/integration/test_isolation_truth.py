"""Isolation truth: a question's tokens and logits are the same bits alone and in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.types import FinishReason, SamplingParams
from inference_svc.attention import Backend
from inference_svc.plan import StepPlan
from tests.integration.crowd import (
    POISON_ID,
    SEGMENT,
    Ask,
    Crowd,
    prompt,
    run_alone,
    run_together,
    same_bits,
    without_sharing,
)
from tests.integration.tiny_models import (
    ARCHITECTURES,
    EVERY_FORM,
    MIXTURES,
    NATIVE_FORMS,
    WINDOW,
    Form,
    form_id,
    loaded_model,
    model_as,
    stock_model,
)

LENGTHS = (1, 2, SEGMENT - 1, SEGMENT, SEGMENT + 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * SEGMENT, 2 * WINDOW + 5, 90)
"""Around the segment, window and forward borders of the tiny models."""

BF16_CPU, BF16_NATIVE = Form("bf16", Backend.CPU), Form("bf16", Backend.NATIVE)
SHARING_FORMS = (BF16_CPU, *NATIVE_FORMS)


def _asks(lengths: tuple[int, ...], max_tokens: int = 6) -> list[Ask]:
    return [Ask(prompt(n, seed=100 + i), max_tokens=max_tokens + i % 3) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(("name", "form"), EVERY_FORM, ids=form_id)
def test_a_crowd_of_mixed_lengths_changes_no_bit(name: str, form: Form) -> None:
    """Eight slots, eleven questions around every border: each equals the question alone."""
    model = model_as(name, form)
    asks = _asks(LENGTHS)
    for ask, together in zip(asks, run_together(model, asks), strict=True):
        assert same_bits(run_alone(model, ask), together), f"{len(ask.ids)} prompt tokens"


@pytest.mark.parametrize(("name", "form"), EVERY_FORM, ids=form_id)
def test_every_slot_gives_the_same_bits(name: str, form: Form) -> None:
    """The same question in all eight slots at once: eight equal traces, equal to the one alone."""
    model = model_as(name, form)
    ask = Ask(prompt(WINDOW + 3, seed=7), max_tokens=8)
    alone = run_alone(model, ask)
    assert all(same_bits(alone, copy) for copy in run_together(model, [ask] * 8))


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, Backend.CPU) for name in ARCHITECTURES] + [(name, Backend.NATIVE) for name in (*ARCHITECTURES, *MIXTURES)],
    ids=form_id,
)
def test_logits_equal_transformers_alone(name: str, backend: Backend) -> None:
    """fp32 logits within 1e-4 of transformers, and greedy tokens equal to generate, also far beyond the window."""
    stock = stock_model(name)
    model = loaded_model(name, torch.float32, backend)
    asks = [Ask(prompt(n, seed=n), max_tokens=40) for n in (3, SEGMENT + 1, WINDOW + 9, 90)]
    for ask, trace in zip(asks, run_together(model, asks), strict=True):
        ids = torch.tensor([ask.ids])
        with torch.inference_mode():
            made = stock.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=2
            )
            whole = torch.tensor([[*ask.ids, *trace.token_ids]])
            logits = stock(whole, attention_mask=torch.ones_like(whole)).logits[0, len(ask.ids) - 1 : -1]
        assert trace.token_ids == tuple(made[0, len(ask.ids) :].tolist())
        torch.testing.assert_close(torch.stack(trace.logits), logits, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", [Backend.NATIVE, Backend.CPU, Backend.FLEX])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_reference_backend_is_the_definition(name: str, backend: Backend) -> None:
    """One dense block-diagonal mask over all questions gives every backend's logits within float tolerance."""
    asks = _asks((5, WINDOW + 4, SEGMENT, 40), max_tokens=4)
    prefix = prompt(SEGMENT + 3, seed=8)
    asks += [Ask(prefix + prompt(n, seed=n), boundaries=(len(prefix),), num_shared=len(prefix)) for n in (3, 20)]
    separate = run_together(loaded_model(name, torch.float32, backend), asks)
    masked = run_together(loaded_model(name, torch.float32, Backend.REFERENCE), asks)
    for one, other in zip(separate, masked, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "form"), EVERY_FORM, ids=form_id)
def test_neighbours_that_come_and_go_change_no_bit(name: str, form: Form) -> None:
    """Neighbours finish, are cancelled, time out and arrive late; the target's bits do not move."""
    model = model_as(name, form)
    target = Ask(prompt(WINDOW + 6, seed=3), max_tokens=30)
    alone = run_alone(model, target)
    crowd = Crowd(model, max_slots=4)
    crowd.add(Ask(prompt(4, seed=1), max_tokens=2))
    index = crowd.add(target)
    doomed = crowd.add(Ask(prompt(50, seed=2), max_tokens=60))
    endless = SamplingParams(max_tokens=60, ignore_eos=True)
    late = crowd.add(Ask(prompt(30, seed=4), sampling=endless, time_budget_ms=5_000))
    for step in range(12):
        crowd.step()
        if step == 5:
            crowd.cancel(doomed)
        if step == 7:
            crowd.clock.advance(6.0)
        if step % 3 == 0:
            crowd.add(Ask(prompt(10 + step, seed=50 + step), max_tokens=4))
    traces = crowd.finish()
    assert same_bits(alone, traces[index])
    assert [traces[i].result.finish_reason for i in (doomed, late)] == [  # type: ignore[union-attr]
        FinishReason.CANCELLED,
        FinishReason.TIMEOUT_RUNNING,
    ]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("name", "form"), [one for one in EVERY_FORM if one[0] in ("llama", "gemma3")], ids=form_id)
def test_threads_change_no_bit(name: str, form: Form) -> None:
    """With two threads per forward the crowd still equals the question alone."""
    model = model_as(name, form)
    asks = _asks((1, SEGMENT + 1, WINDOW + 1, 50), max_tokens=3)
    for ask, together in zip(asks, run_together(model, asks), strict=True):
        assert same_bits(run_alone(model, ask), together)


def _poison_others(target: int) -> object:
    """Before each forward: NaN in every KV position the target does not own, and in every other row's embedding."""

    def poison(crowd: Crowd, plan: StepPlan) -> None:
        own = torch.zeros(crowd.ledger.num_positions, dtype=torch.bool)
        rows = torch.zeros(plan.num_rows, dtype=torch.bool)
        for segment in plan.segments:
            if segment.sequence_id == target:
                rows[segment.row : segment.row + segment.num_rows] = True
                for start, end in segment.kv.ranges(0, segment.end):
                    own[start:end] = True
        if not own.any():
            own = crowd.own_positions(target)
        for tensor in (*crowd.cache.keys, *crowd.cache.values):
            tensor[~own] = float("nan")
        crowd.poisoned_rows = ~rows
        crowd.poisoned_sequences = {s.sequence_id for s in plan.segments} - {target}

    return poison


@pytest.mark.parametrize(("name", "form"), EVERY_FORM, ids=form_id)
def test_nan_everywhere_else_changes_no_bit(name: str, form: Form) -> None:
    """All other slots' KV and embeddings are NaN: nothing of it reaches the target."""
    model = model_as(name, form)
    asks = (Ask(prompt(WINDOW + 6, seed=seed), max_tokens=20) for seed in range(3, 40))
    runs = ((ask, run_alone(model, ask)) for ask in asks)
    # An answer with the poisoned token in it would meet that token's embedding by itself.
    target, alone = next((ask, run) for ask, run in runs if POISON_ID not in run.token_ids)
    crowd = Crowd(model, max_slots=4, before_forward=_poison_others(1))  # type: ignore[arg-type]
    with crowd.poisoned_embeddings():
        for ask in (Ask(prompt(30, seed=1), max_tokens=9), target, Ask(prompt(60, seed=2), max_tokens=30)):
            crowd.add(ask)
        traces = crowd.finish()
    assert same_bits(alone, traces[1])
    assert traces[0].result is not None and traces[0].result.finish_reason is FinishReason.ERROR
    assert traces[0].result.error is not None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("form", SHARING_FORMS, ids=form_id)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_levels_store_differently_and_give_equal_bits(name: str, form: Form, keep: bool) -> None:
    """A prefix stored once (built by one question, read by others, hit again later) equals the strict form."""
    model = model_as(name, form)
    prefix = prompt(SEGMENT + 5, seed=9)
    asks = [
        Ask(prefix + prompt(n, seed=n), boundaries=(7, len(prefix)), num_shared=len(prefix), max_tokens=8)
        for n in (1, SEGMENT, 40, 3, 12)
    ]
    alone = [run_alone(model, without_sharing(ask)) for ask in asks]
    crowd = Crowd(model, max_slots=3, keep_prefixes=keep)
    for ask in asks:
        crowd.add(ask)
    traces = crowd.finish()
    again = crowd.add(asks[0])
    crowd.finish()
    for one, other in zip([*alone, alone[0]], [*traces[: len(asks)], crowd.traces[again]], strict=True):
        assert same_bits(one, other)
        assert one.result is not None and other.result is not None
        assert one.result.receipt == other.result.receipt, "the mask digest tells what was visible, not where it lay"
    reused = [trace.result.num_cached_tokens for trace in traces if trace.result is not None]
    assert set(reused) == {0, len(prefix)} and (reused.count(0) == 1 or not keep)
    assert (crowd.ledger.num_held >= len(prefix)) is keep, "a kept prefix stays, any other goes with its last user"


def test_a_prefix_is_never_shared_across_tenants() -> None:
    """The same ids of another tenant are stored and computed again."""
    prefix = prompt(SEGMENT, seed=9)
    ask = Ask(prefix + prompt(4, seed=1), boundaries=(len(prefix),), num_shared=len(prefix), tenant="a")
    traces = run_together(loaded_model("llama"), [ask, replace(ask, tenant="b")])
    assert [trace.result.num_cached_tokens for trace in traces if trace.result] == [0, 0]
    assert same_bits(*traces)


@pytest.mark.parametrize("form", SHARING_FORMS, ids=form_id)
def test_a_builder_that_leaves_hands_the_prefix_on(form: Form) -> None:
    """The question that was writing the prefix is cancelled half way; the next one goes on where it stopped."""
    model = model_as("gemma3", form)
    prefix = prompt(5 * SEGMENT, seed=9)
    ask = Ask(prefix + prompt(4, seed=1), boundaries=(len(prefix),), num_shared=len(prefix))
    crowd = Crowd(model)
    first, second = crowd.add(ask), crowd.add(ask)
    crowd.step()
    crowd.cancel(first)
    trace = crowd.finish()[second]
    assert same_bits(run_alone(model, without_sharing(ask)), trace)
    assert trace.result is not None and 0 < trace.result.num_cached_tokens < len(prefix)


@pytest.mark.parametrize("form", SHARING_FORMS, ids=form_id)
def test_a_seed_gives_the_same_text_in_any_company(form: Form) -> None:
    """Sampled answers depend on the channel's own seed only."""
    model = model_as("qwen3", form)
    sampling = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=42)
    target = Ask(prompt(12, seed=1), sampling=sampling)
    others = [Ask(prompt(9 + i, seed=i), sampling=replace(sampling, seed=1000 + i)) for i in range(6)]
    alone = run_alone(model, target)
    for place in (0, 5):
        traces = run_together(model, [*others[:place], target, *others[place:]])
        assert same_bits(alone, traces[place])
    assert run_alone(model, replace(target, sampling=replace(sampling, seed=43))).token_ids != alone.token_ids
