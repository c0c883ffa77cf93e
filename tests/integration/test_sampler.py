"""Sampling against transformers' logits processors, and each question's independence of its company."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.errors import NonFiniteLogitsError
from common.types import SamplingParams
from inference_svc.sampler import Sampler, SamplerState

V = 3_000
EOS = 7
SAMPLER = Sampler(frozenset({EOS}))


class ScriptedState(SamplerState):
    """Random numbers from a list."""

    def __init__(self, params: SamplingParams, prompt_ids: list[int], numbers: list[float]) -> None:
        super().__init__(params, prompt_ids)
        self._numbers = iter(numbers)

    def draw(self) -> float:
        return next(self._numbers)


def row(seed: int, size: int = V, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def expected_probs(logits: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The distribution as transformers shapes it; presence and frequency as in the OpenAI interface."""
    scores = logits.clone()[None]
    ids = torch.tensor([[*prompt, *answer]])
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token_id in set(answer):
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(token_id)
    steps = LogitsProcessorList(
        [MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, [EOS], device="cpu")]
    )
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(ids, scores)[0].softmax(0).double()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 0.8, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 5, 50, V, 2 * V]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.9, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.4]),
        min_tokens=st.sampled_from([0, 2, 9]),
    ),
    answer=st.lists(st.integers(0, 20), max_size=5),
)
def test_draws_follow_the_distribution_of_transformers(
    seed: int, scale: float, params: SamplingParams, answer: list[int]
) -> None:
    """A parameter would mean something else here than everywhere else, or steps would come in another order."""
    logits, prompt = row(seed, scale=scale), [1, 5, 5, EOS]
    sums = expected_probs(logits, params, prompt, answer).cumsum(0)
    for number in (0.0, 0.1, 0.5, 0.999):
        state = ScriptedState(params, prompt, [number])
        for token_id in answer:
            state.record(token_id)
        found = SAMPLER.sample(logits, state).token_id
        low, high = (sums[found - 1].item() if found else 0.0), sums[found].item()
        assert low - 1e-4 <= number <= high + 1e-4
        assert high > low, "a token that the limits exclude"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    """Two equal logits, as bf16 often has, would make the answer depend on the kernel."""
    logits = torch.zeros(V, dtype=dtype)
    logits[[9, 4, 2_000]] = 3.0
    before = logits.clone()
    assert SAMPLER.sample(logits, SAMPLER.state(SamplingParams(), [])).token_id == 4
    assert torch.equal(logits, before)


def test_penalties_change_greedy_and_leave_the_row_alone() -> None:
    """A shared logits buffer would carry one question's penalties to whoever reads it next."""
    logits = row(3)
    before = logits.clone()
    state = SAMPLER.state(SamplingParams(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=5.0), [1])
    tokens = [SAMPLER.sample(logits, state).token_id for _ in range(6)]
    assert len(set(tokens)) == 6
    assert torch.equal(logits, before)


def test_end_tokens_wait_for_min_tokens() -> None:
    """An answer would end before the length that was asked for, by an end token or one of its own stop tokens."""
    logits = torch.zeros(V)
    logits[EOS], logits[11], logits[3] = 9.0, 8.0, 7.0
    state = SAMPLER.state(SamplingParams(min_tokens=2, stop_token_ids=(11, V + 50)), [])
    assert [SAMPLER.sample(logits, state).token_id for _ in range(3)] == [3, 3, EOS]


def test_logprobs_are_the_models_own() -> None:
    """Log-probabilities after penalties, masks and temperature say nothing about the model."""
    logits = row(5)
    params = SamplingParams(temperature=0.7, top_k=3, presence_penalty=1.0, min_tokens=3, logprobs=4)
    state = SAMPLER.state(params, [])
    own = logits.log_softmax(0)
    for _ in range(3):
        sampled = SAMPLER.sample(logits, state)
        assert sampled.logprob is not None and sampled.logprob.token_id == sampled.token_id
        assert sampled.logprob.logprob == own[sampled.token_id].item()
        assert [token_id for token_id, _ in sampled.logprob.top] == own.topk(4).indices.tolist()
        assert [value for _, value in sampled.logprob.top] == own.topk(4).values.tolist()
    alone = SAMPLER.sample(logits, SAMPLER.state(SamplingParams(logprobs=0), [])).logprob
    assert alone is not None and alone.top == ()
    assert SAMPLER.sample(logits, SAMPLER.state(SamplingParams(), [])).logprob is None


def draws(params: SamplingParams, num_tokens: int = 12, neighbours: int = 0) -> list[int]:
    state = SAMPLER.state(params, [])
    others = [SAMPLER.state(SamplingParams(temperature=1.0, seed=100 + i), []) for i in range(neighbours)]
    found = []
    for step in range(num_tokens):
        for i, other in enumerate(others):
            SAMPLER.sample(row(1_000 * step + i), other)
        found.append(SAMPLER.sample(row(step), state).token_id)
    return found


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """A seed would be ignored beside unseeded questions, or one generator shared by the whole step."""
    params = SamplingParams(temperature=0.8, seed=42)
    assert draws(params) == draws(params, neighbours=7)
    assert draws(params) != draws(SamplingParams(temperature=0.8, seed=43))


def test_randomness_moves_on_from_token_to_token() -> None:
    """A generator made anew for each step repeats the same random number for ever."""
    state = SAMPLER.state(SamplingParams(temperature=1.0, seed=1), [])
    flat = torch.zeros(V)
    assert len({SAMPLER.sample(flat, state).token_id for _ in range(20)}) > 15


def test_the_global_generator_is_untouched() -> None:
    """Whatever else the process draws would change with the questions it answers."""
    before = torch.get_rng_state()
    draws(SamplingParams(temperature=1.0, seed=2**63 - 1, top_p=0.9))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [V, 262_144])
def test_draws_do_not_depend_on_where_the_row_lies(size: int) -> None:
    """A row's place in the step's logits must not change its token or its log-probability."""
    logits = row(8, size)
    params = SamplingParams(temperature=0.9, top_p=0.97, seed=5, logprobs=2)
    alone = SAMPLER.sample(logits, SAMPLER.state(params, []))
    for place in range(3):
        step = torch.full((3, size), 50.0)
        step[place] = logits
        assert SAMPLER.sample(step[place], SAMPLER.state(params, [])) == alone


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.7])
@pytest.mark.parametrize("bad", ["one nan", "all nan", "all -inf", "inf", "nan at a masked end token"])
def test_unusable_logits_fail_this_question(bad: str, temperature: float) -> None:
    """An overflow of fp16 would end as an answer of padding tokens, or an exception take down the step."""
    logits = row(1)
    if bad.startswith("all"):
        logits[:] = math.nan if bad == "all nan" else -math.inf
    else:
        logits[EOS if "masked" in bad else 1_234] = math.inf if bad == "inf" else math.nan
    state = SAMPLER.state(SamplingParams(temperature=temperature, min_tokens=1), [])
    with pytest.raises(NonFiniteLogitsError, match="no usable number"):
        SAMPLER.sample(logits, state)


def test_masking_the_only_possible_token_is_an_error() -> None:
    """A row without any token left would draw from nothing."""
    logits = torch.full((V,), -math.inf)
    logits[EOS] = 1.0
    with pytest.raises(NonFiniteLogitsError):
        SAMPLER.sample(logits, SAMPLER.state(SamplingParams(min_tokens=1, temperature=1.0), []))


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_impossible_tokens_are_never_drawn(number: float) -> None:
    """The ends of the random range would pick a token of probability 0."""
    logits = torch.full((V,), -math.inf)
    logits[[10, 20, 30]] = torch.tensor([0.1, 0.7, 0.3])
    for top_p in (1.0, 0.999):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        assert SAMPLER.sample(logits, ScriptedState(params, [], [number])).token_id in {10, 30}


def test_extreme_temperatures_stay_finite() -> None:
    """Dividing by a small temperature overflows; a large one must still be a distribution."""
    logits = row(2) * 100
    best = int(logits.argmax())
    assert SAMPLER.sample(logits, SAMPLER.state(SamplingParams(temperature=2e-5), [])).token_id == best
    assert 0 <= SAMPLER.sample(logits, SAMPLER.state(SamplingParams(temperature=100.0), [])).token_id < V
