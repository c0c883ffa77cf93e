"""What is loaded, what is refused, and what is said about it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from common.clock import SystemClock
from common.errors import ConfigError, KevError, ModelError, UnsupportedModelError
from inference_svc.architecture import check_architecture
from inference_svc.attention import Backend
from inference_svc.model_loader import LoadSettings, load_model, wrap_model
from inference_svc.node import Node, NodeSettings
from tests.integration.tiny_models import CONFIGS, MAX_CONTEXT

SETTINGS = LoadSettings(precision="fp32", max_context=MAX_CONTEXT)
_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (T5Config(), "encoder-decoder"),
        (
            MambaConfig(**{k: _SMALL[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}),
            "state outside the KV cache",
        ),
        (JambaConfig(), "state outside the KV cache"),
        (Qwen3NextConfig(), "linear_attention"),
        (Llama4TextConfig(), "chunked_attention"),
        (MixtralConfig(**_SMALL), "experts"),
        (GptOssConfig(), "experts"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_architectures_that_cannot_be_split_by_channel_are_refused(config: PretrainedConfig, words: str) -> None:
    """Recurrent state, encoders, experts and chunked attention: refused at load, with the reason."""
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        check_architecture(config, 128)
    assert config.model_type in str(caught.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_by_the_longest_row_is_refused_beyond_its_border(kind: str) -> None:
    """A long neighbour would switch the rotary factors of a short question; below the border nothing switches."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {"factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    config = Phi3Config(**_SMALL, max_position_embeddings=256, original_max_position_embeddings=64)
    config.rope_parameters = rope
    with pytest.raises(UnsupportedModelError, match=r"core\.max_context: 64"):
        check_architecture(config, 65)
    check_architecture(config, 64)


def test_a_model_outside_the_attention_interface_is_refused() -> None:
    """Bloom adds its own position bias inside its own attention: Kev's hook would never be called."""
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises((UnsupportedModelError, ValueError), match="attention"):
        wrap_model(model, SETTINGS, fingerprint="x")


def test_an_unknown_attention_keyword_is_refused_before_serving() -> None:
    """A layer that passes attention sinks would silently get wrong answers; the node does not start."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, keywords: (args, {**keywords, "s_aux": torch.ones(4)}), with_kwargs=True
        )
    loaded = wrap_model(model, SETTINGS, fingerprint="x")
    with pytest.raises(UnsupportedModelError, match="s_aux"):
        Node(loaded, NodeSettings(node_id="n", max_slots=2, prefill_rows=32, segment_tokens=16), SystemClock())


def test_a_layer_that_bypasses_the_hook_is_noticed() -> None:
    """The start-up canary: a transformers that stops calling Kev's attention must not serve unisolated answers."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    loaded = wrap_model(model, SETTINGS, fingerprint="x")
    with pytest.raises(UnsupportedModelError, match="only 2 of 3 layers"):
        Node(loaded, NodeSettings(node_id="n", max_slots=2, prefill_rows=32, segment_tokens=16), SystemClock())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny bf16 Llama on disk."""
    AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_loading_tells_geometry_context_and_fingerprint(saved: Path) -> None:
    """KV heads and head size come from the configuration; the context is the model's when that is smaller."""
    loaded = load_model(saved, LoadSettings(precision="bf16", max_context=100_000))
    assert loaded.dtype is torch.bfloat16 and loaded.max_context == MAX_CONTEXT
    assert loaded.geometry.position_bytes == 3 * 2 * (16 + 16) * 2
    again = load_model(saved, LoadSettings(precision="bf16", max_context=64))
    assert again.max_context == 64 and again.fingerprint == loaded.fingerprint
    other = load_model(saved, LoadSettings(precision="fp32", max_context=64))
    assert other.fingerprint != loaded.fingerprint and other.dtype is torch.float32


def test_other_weights_have_another_fingerprint(saved: Path) -> None:
    """One changed page of weights is another model."""
    before = load_model(saved, SETTINGS).fingerprint
    file = saved / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load_model(saved, SETTINGS).fingerprint != before


def test_fp16_on_a_model_trained_in_bf16_warns(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values beyond 65,504 overflow in fp16; the operator is told the way out."""
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        load_model(saved, LoadSettings(precision="fp16", max_context=64))
    assert "core.precision: bf16" in caplog.text


@pytest.mark.parametrize("precision", ["fp8", "INT8", ""])
def test_precisions_that_are_not_there_are_refused_in_words(saved: Path, precision: str) -> None:
    """Nothing is silently loaded in another format."""
    with pytest.raises(ConfigError, match="must be one of"):
        load_model(saved, LoadSettings(precision=precision, max_context=64))


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """The message names the directory and stays one line."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read") as caught:
        load_model(tmp_path, SETTINGS)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_missing_weights_are_refused(saved: Path) -> None:
    """A configuration without safetensors does not load random weights."""
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(saved, SETTINGS)


def test_the_reference_backend_refuses_strict() -> None:
    """It mixes questions in one kernel call, so the bitwise promise is not made: fail closed."""
    settings = LoadSettings(precision="fp32", max_context=MAX_CONTEXT, backend=Backend.REFERENCE)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIGS["llama"]().to_dict()), dtype=torch.float32)
    loaded = wrap_model(model.eval(), settings, fingerprint="x")
    with pytest.raises(KevError, match=r"core\.backend: cpu"):
        Node(loaded, NodeSettings(node_id="n", max_slots=2, prefill_rows=32, segment_tokens=16), SystemClock())
