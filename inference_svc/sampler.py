"""Chooses one token from one row of logits.

Invariants and semantics: a row is handled alone, with its own state and its own generator, so neither another
question's logits nor its randomness can matter; the global generator is never touched. One random number is drawn per
sampled token, from the question's own seed, whatever the vocabulary or device. Order, as in transformers' logits
processors: repetition, presence and frequency penalty, end tokens masked before min_tokens, temperature, top-k, top-p,
min-p; every limit keeps the tokens that tie with the last one kept. Log-probabilities are the model's own, before all
of that. Shapes: ``V`` is the width of the logits row.

Not here: which rows are sampled (``inference_svc.model_runner``), when an answer ends (``inference_svc.sequence``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from common.errors import NonFiniteLogitsError
from common.types import SamplingParams, TokenLogprob
from inference_svc.sampled import SampledToken

_MIN_TEMPERATURE = 1e-5
"""Below this a distribution is its best token; fp32 could not hold the scaled logits."""

_NUCLEUS_SIZES = (1024, 16_384)
"""Most likely tokens to try before sorting the whole row: 1 ms against 21 ms at V = 262,144 on one core."""


class SamplerState:
    """What one sequence's next token depends on besides its logits.

    Attributes:
        params: how its tokens are chosen.
        num_generated: tokens sampled so far.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self.params = params
        self.num_generated = 0
        self._counts: dict[int, int] = {}
        self._generator: torch.Generator | None = None
        self._prompt_ids = frozenset(prompt_ids if params.repetition_penalty != 1.0 else ())

    def record(self, token_id: int) -> None:
        """Count a generated token."""
        self.num_generated += 1
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def draw(self) -> float:
        """The question's next random number, in [0, 1)."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.params.seed)
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def seen_ids(self) -> list[int]:
        """Tokens in prompt or answer, each once."""
        return list(self._prompt_ids | self._counts.keys())

    def counts(self) -> tuple[list[int], list[int]]:
        """Generated tokens, each once, and how often each was generated."""
        return list(self._counts), list(self._counts.values())


class Sampler:
    """Samples rows for any number of sequences; holds no state of theirs."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids

    def state(self, params: SamplingParams, prompt_ids: Iterable[int]) -> SamplerState:
        """Fresh state of a sequence. Its random numbers start over, so a repeated attempt repeats its draws."""
        return SamplerState(params, prompt_ids)

    def is_greedy(self, state: SamplerState) -> bool:
        """Whether the next token is the one with the largest logit and nothing else is asked about the row."""
        params = state.params
        return (
            params.temperature < _MIN_TEMPERATURE
            and params.logprobs is None
            and state.num_generated >= params.min_tokens
            and params.repetition_penalty == 1.0
            and not params.presence_penalty
            and not params.frequency_penalty
        )

    def take(self, token_id: int, value: float, state: SamplerState) -> SampledToken:
        """Count a token that was found to have the largest logit, ``value``.

        Raises:
            NonFiniteLogitsError: ``value`` is NaN or infinite.
        """
        _require_finite(value)
        state.record(token_id)
        return SampledToken(token_id, logit=value)

    def sample(self, logits: torch.Tensor, state: SamplerState) -> SampledToken:
        """Choose the next token and count it in ``state``.

        Args:
            logits: [V], any float type; not changed.
            state: the sequence's own.

        Raises:
            NonFiniteLogitsError: NaN or infinity among the logits, or no token left to choose.
        """
        params = state.params
        row = logits.detach().float()
        token_id = _finite_argmax(row)
        shaped = self._shaped(row, state)
        if shaped is not row:
            token_id = _finite_argmax(shaped)
        if params.temperature >= _MIN_TEMPERATURE:
            token_id = _drawn(shaped, shaped[token_id], state)
        state.record(token_id)
        return SampledToken(token_id, _logprob(row, token_id, params.logprobs), row[token_id].item())

    def _shaped(self, row: torch.Tensor, state: SamplerState) -> torch.Tensor:
        """Logits [V] after penalties and masks: ``row`` itself when there are none, else a copy."""
        params = state.params
        masked = state.num_generated < params.min_tokens
        penalized = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        if not masked and not penalized:
            return row
        shaped = row.clone()
        if params.repetition_penalty != 1.0:
            # Source: CTRL, Keskar 2019, sec. 4.1; the sign rule is transformers'.
            ids = torch.tensor(state.seen_ids(), dtype=torch.long, device=row.device)
            seen = shaped[ids]
            penalty = params.repetition_penalty
            shaped[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
        if params.presence_penalty or params.frequency_penalty:
            generated, counts = state.counts()
            ids = torch.tensor(generated, dtype=torch.long, device=row.device)
            times = torch.tensor(counts, dtype=torch.float32, device=row.device)
            shaped[ids] -= params.presence_penalty + params.frequency_penalty * times
        if masked:
            ends = [i for i in self._eos_ids.union(params.stop_token_ids) if i < row.shape[0]]
            shaped[torch.tensor(ends, dtype=torch.long, device=row.device)] = -math.inf
        return shaped


def _finite_argmax(row: torch.Tensor) -> int:
    """Index of the largest logit, the lowest one if several tie."""
    # NumPy's takes a tenth of the time of torch's on a CPU (0.02 ms against 0.23 ms at V = 262,144) and, like it,
    # finds NaN before any number; either way one look at the winner tells whether the row can be used.
    best = int(row.numpy().argmax()) if row.device.type == "cpu" else int(row.argmax())
    _require_finite(row[best].item())
    return best


def _require_finite(value: float) -> None:
    if not math.isfinite(value):
        raise NonFiniteLogitsError(
            f"the model gave no usable number for the next token (best logit: {value}); "
            "if core.precision is fp16, use bf16 or fp32"
        )


def _drawn(row: torch.Tensor, best: torch.Tensor, state: SamplerState) -> int:
    """A token drawn from the tempered and limited distribution of ``row`` [V], by inverse transform sampling."""
    params = state.params
    scaled = (row - best) / params.temperature
    floor = _floor(scaled, params)
    ids = (scaled >= floor).nonzero()[:, 0] if floor > -math.inf else None
    weights = (scaled if ids is None else scaled[ids]).exp()
    sums = weights.cumsum(0, dtype=torch.float64)
    # The first sum that is strictly greater: never that of a token of weight 0.
    index = int(torch.searchsorted(sums, sums[-1] * state.draw(), right=True))
    if index == len(sums):  # The product may round up to the whole sum.
        index = int(weights.nonzero()[-1])
    return index if ids is None else int(ids[index])


def _floor(scaled: torch.Tensor, params: SamplingParams) -> float:
    """Smallest scaled logit that top-k, top-p and min-p allow; the best one is 0."""
    floor = -math.inf
    if 0 < params.top_k < scaled.shape[0]:
        floor = scaled.topk(params.top_k).values[-1].item()
    if params.top_p < 1.0:
        allowed = scaled[scaled >= floor]
        floor = max(floor, _nucleus_floor(allowed, params.top_p))
    if params.min_p > 0.0:
        floor = max(floor, math.log(params.min_p))
    return floor


def _nucleus_floor(allowed: torch.Tensor, top_p: float) -> float:
    """Smallest of the most likely logits whose probability reaches ``top_p``. Source: Holtzman 2020, sec. 3.1."""
    num_allowed = allowed.shape[0]
    target = allowed.exp().sum(dtype=torch.float64) * top_p
    for size in (*_NUCLEUS_SIZES, num_allowed):
        likely = allowed.topk(min(size, num_allowed)).values
        sums = likely.exp().cumsum(0, dtype=torch.float64)
        if sums[-1] >= target:
            return likely[int(torch.searchsorted(sums, target))].item()
    return -math.inf


def _logprob(row: torch.Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    logprobs = row.log_softmax(0)
    values, ids = logprobs.topk(min(num_top, row.shape[0]))
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token_id=token_id, logprob=logprobs[token_id].item(), top=tuple(top))
