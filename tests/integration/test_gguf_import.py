"""A GGUF file becomes a plain model directory with the same weights and a working tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from common.errors import ModelError
from common.tokenization import Tokenizer
from common.types import Truncate
from kev.models import resolve_model

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOKENS = ["<|endoftext|>", *"abcdefgh", "Ġ", "ab"]


def tiny() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def write_gguf(path: Path, model: Qwen2ForCausalLM, without: str = "") -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, weight in model.state_dict().items():
        if gguf_name(name) != without:
            writer.add_tensor(gguf_name(name), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_and_tokenizer_survive(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Converted weights would be permuted, missing or still packed, or the output full of the library's noise."""
    model = tiny()
    write_gguf(tmp_path / "tiny.gguf", model)
    found = resolve_model(str(tmp_path / "tiny.gguf"), str(tmp_path / "cache"), lambda _: None)
    weights = load_file(found.path / "model.safetensors")
    expected = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    config = json.loads((found.path / "config.json").read_text())
    assert "quantization_config" not in config and config["num_key_value_heads"] == 2
    tokenizer = Tokenizer.from_dir(found.path, prompt_template="{question}")
    prompt = tokenizer.render("abc", "", max_prompt_tokens=9, truncate=Truncate.NONE)
    assert tokenizer.decode(prompt.ids) == "abc" and tokenizer.eos_ids == {0}
    assert capfd.readouterr().err == ""


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    """A truncated or foreign file would load with random numbers in the gaps, and answer nonsense."""
    write_gguf(tmp_path / "tiny.gguf", tiny(), without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks weights: .*up_proj"):
        resolve_model(str(tmp_path / "tiny.gguf"), str(tmp_path / "cache"), lambda _: None)


def test_an_unreadable_file_is_an_error_in_words(tmp_path: Path) -> None:
    """A broken download would end in a traceback of the reader."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted"):
        resolve_model(str(tmp_path / "broken.gguf"), str(tmp_path / "cache"), lambda _: None)
