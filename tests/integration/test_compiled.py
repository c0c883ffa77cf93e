"""The forward as compiled code: the same answers, the same isolation, and the module as it is when that fails.

Compiling takes seconds a graph, so the models are as small as they can be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from common.clock import SystemClock
from common.errors import InvariantError, UnsupportedModelError
from common.types import IsolationLevel, Verdict
from inference_svc import compile_model
from inference_svc.attention import Backend
from inference_svc.compile_model import compiled
from inference_svc.compiled import CACHE_VARIABLE, CompiledModule, keep_compiled_in
from inference_svc.model_loader import LoadedModel, LoadSettings, wrap_model
from inference_svc.node import Node, NodeSettings
from inference_svc.plan import ForwardShapes
from inference_svc.probe import ProbeQuestion, probe_prompt, run_questions
from inference_svc.verify import verify_isolation
from tests.integration.tiny_models import MAX_CONTEXT

SETTINGS = NodeSettings(node_id="n", max_slots=4, prefill_rows=32, segment_tokens=16)
SHAPES = ForwardShapes.of(4, 32, 16)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler uses what torch itself calls deprecated
SLOW_S = 400
"""Compiling on a machine that does much else."""


def small_model(backend: Backend, num_layers: int = 2) -> LoadedModel:
    """A Gemma with a layer of each kind."""
    config = Gemma3TextConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
        max_position_embeddings=MAX_CONTEXT,
        layer_types=["sliding_attention", "full_attention"][-num_layers:],
    )
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    settings = LoadSettings(precision="fp32", max_context=MAX_CONTEXT, backend=backend)
    return wrap_model(module, settings, fingerprint=f"small-{backend}")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("backend", [Backend.CPU, Backend.FLEX])
def test_compiled_code_answers_as_the_module_and_is_isolated(backend: Backend) -> None:
    """Fused kernels would let a neighbour, a place or a prefix change bits, under the promise that they do not."""
    plain = small_model(backend, num_layers=1)
    questions = [ProbeQuestion(ids=probe_prompt(160, f"{n}", n), num_tokens=5) for n in (3, 16, 40)]
    expected = run_questions(Node(plain, SETTINGS, SystemClock()).bench, questions)
    model = compiled(plain, SHAPES)
    assert model.compiled is not None and model.compiled.num_graphs == 2, "a graph for prefill and one for decode"
    assert model.fingerprint != plain.fingerprint
    node = Node(model, SETTINGS, SystemClock())
    assert dict(node.report.levels)[IsolationLevel.STRICT] is Verdict.BITWISE
    found = run_questions(node.bench, questions)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    checks = verify_isolation(model, SHAPES, 4, print)
    apart = {"prefix"} if backend is Backend.FLEX else set()  # a prefix stored apart is other blocks there
    assert {check.name for check in checks if not check.passed} <= apart
    assert model.compiled.num_graphs == 2, "nothing was compiled while it served"
    with pytest.raises(Exception, match="not compiled at the start"):
        Node(model, replace(SETTINGS, prefill_rows=64), SystemClock())


def test_a_flex_node_promises_strict_and_says_what_it_does_not() -> None:
    """A GPU would refuse strict because of prefixes, which strict does not share; or promise shared as well."""
    node = Node(small_model(Backend.FLEX), SETTINGS, SystemClock())
    levels = dict(node.report.levels)
    assert levels[IsolationLevel.STRICT] is Verdict.BITWISE and node.report.strict_refusal == ""
    assert levels[IsolationLevel.SHARED] is levels[IsolationLevel.LOOSE]
    assert (
        (levels[IsolationLevel.SHARED] is Verdict.BITWISE) == node.report.prefix_independent == (not node.report.reason)
    )


def test_without_a_compiler_the_module_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kev would not start on a machine without a compiler, or fail the first question."""

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found\nwith many lines")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", no_compiler)
    plain = small_model(Backend.CPU, num_layers=1)
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        model = compiled(plain, SHAPES)
    assert model is plain
    [line] = [record.getMessage() for record in caplog.records if record.name == "kev.model"]
    assert line.startswith("core.compile: the forward runs uncompiled: ") and "\n" not in line
    assert "No working C++ compiler found" in line
    node = Node(model, SETTINGS, SystemClock())
    assert dict(node.report.levels)[IsolationLevel.STRICT] is Verdict.BITWISE


def test_code_that_gives_other_logits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake of the compiler would change every answer."""

    class Wrong(CompiledModule):
        def __call__(self, context: object, **inputs: object) -> object:
            module = plain.module
            assert module is not None
            module.set_attn_implementation(Backend.CPU.attention_name)
            output = module(**inputs, kev_context=context)
            output.logits = output.logits.flip(-1)
            return output

    monkeypatch.setattr(compile_model, "CompiledModule", Wrong)
    plain = small_model(Backend.CPU, num_layers=1)
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        assert compiled(plain, SHAPES) is plain
    assert "gives other logits (relative difference" in caplog.text


def test_what_the_module_does_not_allow_is_refused_before_it_is_compiled() -> None:
    """An attention keyword that Kev does not know would be left out of the graph."""
    model = small_model(Backend.CPU, num_layers=1)
    assert model.module is not None
    for layer in model.module.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, keywords: (args, {**keywords, "s_aux": torch.ones(4)}), with_kwargs=True
        )
    with pytest.raises(UnsupportedModelError, match="s_aux"):
        compiled(model, SHAPES)


def test_compiled_code_without_a_plan_is_a_mistake() -> None:
    """It would write into the arena of an earlier forward."""
    query = torch.zeros(1, 2, 8, 16)
    with pytest.raises(InvariantError, match="without a step plan"):
        torch.ops.kev.attend(query, query, query, 0, 1.0, 0, 0.0)


def test_the_environment_decides_where_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own setting would be ignored."""
    monkeypatch.setenv(CACHE_VARIABLE, "elsewhere")
    keep_compiled_in(tmp_path)
    monkeypatch.delenv(CACHE_VARIABLE)
    import os

    keep_compiled_in(tmp_path)
    assert os.environ[CACHE_VARIABLE] == str(tmp_path)
