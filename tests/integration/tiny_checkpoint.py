"""A tiny random model on disk, with a byte tokenizer: what ``core.model_path`` may name."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kev.testing import EOS_ID, VOCAB_SIZE, encode, save_byte_tokenizer
from tests.integration.tiny_models import CONFIGS, MAX_CONTEXT

BOS_ID = 1


def save_checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write the model and its tokenizer into an existing directory; returns the model as transformers runs it."""
    config = CONFIGS[name]()
    config.vocab_size = VOCAB_SIZE
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return model.eval()


def settings_for(folder: Path, **sections: dict[str, object]) -> dict[str, object]:
    """A ``kev.yaml`` for the checkpoint, small everywhere, with a few fields changed."""
    core = {
        "model_path": str(folder),
        "precision": "fp32",
        "max_context": MAX_CONTEXT,
        "prompt_template": "{question}",
        "prompt_stop": [],
        "segment_tokens": 16,
        "prefill_rows": 32,
        "max_tokens": 8,
        "keep_packed": False,
    }
    given = {name: dict(section) for name, section in sections.items()}
    return {"kev": {**given, "core": {**core, **given.get("core", {})}}}


def prompt_ids(text: str) -> list[int]:
    """The ids that a question must be given to the model as."""
    return [BOS_ID, *encode(text)]


def greedy_ids(model: PreTrainedModel, text: str, num_tokens: int) -> list[int]:
    """What transformers generates for the question alone."""
    ids = torch.tensor([prompt_ids(text)])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=EOS_ID,
            pad_token_id=0,
        )
    return made[0, ids.shape[1] :].tolist()
