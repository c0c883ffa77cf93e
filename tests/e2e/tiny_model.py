"""A model small enough to run every documented command in seconds: a random Llama that speaks bytes.

Its answers mean nothing; everything around them is real: files on disk, loading, probe, forward, tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kev.testing import EOS_ID, VOCAB_SIZE, save_byte_tokenizer


def save_tiny_model(folder: Path) -> None:
    """Write configuration, weights and tokenizer into an existing directory."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS_ID,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_byte_tokenizer(folder)
