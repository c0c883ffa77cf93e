"""The profile bench: all of a step's time has a name, and the work is counted from the plan."""

from __future__ import annotations

import pytest

from bench import profile
from bench.profile import Load, Machine, Run
from tests.integration.tiny_models import NATIVE_FORMS, model_as


def test_a_profile_accounts_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts behind a common text: lines that add up to the step, rows that add up to the tokens."""
    monkeypatch.setattr(profile, "_FIRST_ID", 3)
    monkeypatch.setattr(profile, "_LAST_ID", 150)
    model = model_as("gemma3", NATIVE_FORMS[1])
    load = Load(questions=2, tokens=20, shared=30, new_tokens=4, prefill_rows=16)
    found = Run(model, load).profiles(Machine(100.0, 100.0, 10.0))
    for one in found:
        assert sum(line.ms for line in one.lines) == pytest.approx(one.step_ms)
        assert all(line.ms >= 0.0 for line in one.lines[:-1])
    assert {one.kind for one in found} >= {"prefill", "decode"}
    assert sum(one.rows * one.num_steps for one in found) == pytest.approx(30 + 2 * 20 + 2 * 3)
    decode = next(one for one in found if one.kind == "decode")
    mlp = next(line for line in decode.lines if line.work == "linear gate and up")
    assert model.native is not None
    up = model.native.mlps[0].up
    assert mlp.gigaops == pytest.approx(2e-9 * decode.rows * up.n * up.k * model.geometry.num_layers)
    assert mlp.floor_ms == pytest.approx(max(mlp.gigaops / 100 * 1e3, mlp.megabytes / 10))
    prefill = next(one for one in found if one.kind == "prefill")
    used = next(line for line in prefill.lines if line.work == "linear gate and up")
    assert used.gigaops < 2e-9 * prefill.rows * up.n * up.k * model.geometry.num_layers, (
        "the last layer is not all needed"
    )
