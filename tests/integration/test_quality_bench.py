"""The quality bench predicts what transformers predicts, several texts at once."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from bench.quality import Predictions, judged, predict
from inference_svc.attention import Backend
from inference_svc.kv_cache import KVCache
from tests.integration.crowd import prompt
from tests.integration.tiny_models import loaded_model, stock_model


def test_predictions_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of different lengths side by side: each token's log-probability and each best token."""
    monkeypatch.setattr("bench.quality._MAX_CONTEXT", 64)
    model = loaded_model("gemma3", torch.float32, Backend.NATIVE)
    texts = [prompt(40, seed=1), prompt(17, seed=2), prompt(55, seed=3)]
    cache = KVCache(model.geometry, 3 * 64, model.dtype, model.device)
    forward = model.forward_over(cache, model.shapes(3, 8, 8))
    found = predict(forward, texts, Console(file=io.StringIO()), "x")
    expected: list[torch.Tensor] = []
    best: list[int] = []
    for text in texts:
        with torch.inference_mode():
            logits = stock_model("gemma3")(torch.tensor([text])).logits[0, :-1].float()
        expected.append(logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0])
        best += logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.cat(expected), atol=1e-3, rtol=0)
    assert found.best == best


def test_a_reading_beside_its_reference() -> None:
    """Perplexity is the exponential of the mean surprise; agreement counts positions."""
    reading = judged("int8", Predictions([-1.0, -3.0], [5, 6]), Predictions([0.0, 0.0], [5, 7]))
    assert reading.perplexity == pytest.approx(7.389, abs=1e-3)
    assert (reading.num_tokens, reading.agreement) == (2, 0.5)
