"""A tokenizer without a model: one token per byte.

Invariants and semantics: token id = byte + 3; 0 pads, 1 begins, 2 ends an answer. The prompt is the question alone.

Not here: what answers in its tokens (``inference_svc.scripted``).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from common.tokenization import Tokenizer

EOS_ID = 2
_OFFSET = 3
VOCAB_SIZE = 256 + _OFFSET
"""Tokens there are."""


def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text, without BOS."""
    return tuple(byte + _OFFSET for byte in text.encode())


def decode(ids: tuple[int, ...]) -> str:
    """Text of token ids; control tokens are left out."""
    return bytes(token_id - _OFFSET for token_id in ids if token_id >= _OFFSET).decode(errors="replace")


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with one token per byte, BOS 1 and EOS 2."""
    with tempfile.TemporaryDirectory() as folder:
        save_byte_tokenizer(Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "vocab_size": VOCAB_SIZE}))
        return Tokenizer.from_dir(folder, prompt_template="{question}")


def save_byte_tokenizer(path: Path) -> None:
    """Write the files of that tokenizer into a model directory."""
    pieces = {"<pad>": 0, "<bos>": 1, "<eos>": EOS_ID}
    pieces |= {character: byte + _OFFSET for byte, character in enumerate(_byte_characters())}
    library = tokenizers.Tokenizer(models.BPE(vocab=pieces, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    library.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
