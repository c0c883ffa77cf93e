"""The outcome of sampling one token.

Invariants and semantics: plain data, so that the sequence can take it without touching a tensor.

Not here: how it was chosen (``inference_svc.sampler``).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token."""

    token_id: int
    logprob: TokenLogprob | None = None
    """Set when the question asked for log-probabilities."""
    logit: float = 0.0
    """The model's own logit of the token; 0 where there is no model."""
