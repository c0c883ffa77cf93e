"""What a model directory says of its size, without reading a weight.

Invariants and semantics: reads ``config.json`` and the headers of the safetensors files only.

Not here: what that costs in memory (``memory_bill``), loading (``model_loader``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from common.errors import ModelError
from inference_svc.memory_bill import ModelShape

_MAX_HEADER_BYTES = 100_000_000
_EXPERT_COUNTS = ("num_local_experts", "num_experts")


def read_shape(path: Path) -> ModelShape:
    """The shape of the model in a directory.

    Raises:
        ModelError: config.json cannot be read or lacks a size.
    """
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the model in {path} cannot be read: config.json: {type(error).__name__}") from None
    text = content.get("text_config", content) if isinstance(content, dict) else {}
    heads = _size(text, path, "num_attention_heads")
    hidden = _size(text, path, "hidden_size")
    return ModelShape(
        num_layers=_size(text, path, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_size(text, path, "num_key_value_heads", heads),
        head_size=_size(text, path, "head_dim", hidden // heads),
        mlp_width=_size(text, path, "intermediate_size"),
        vocabulary=_size(text, path, "vocab_size"),
        num_rotary_tables=len(set(text.get("layer_types") or ["full_attention"])),
        num_experts=max(_size(text, path, name, 1) for name in _EXPERT_COUNTS),
    )


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name in a directory; a tied head is stored once.

    Raises:
        ModelError: there is no safetensors file, or its header is broken.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"there are no safetensors files in {path}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as handle:
                header_bytes = int.from_bytes(handle.read(8), "little")
                if header_bytes > _MAX_HEADER_BYTES:
                    raise ValueError("header too long")
                header = json.loads(handle.read(header_bytes))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is not a safetensors file: {error}") from None
    return shapes


def _size(text: Mapping[str, object], path: Path, name: str, default: int | None = None) -> int:
    value = text.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"the model in {path} has no usable {name} in its config.json")
    return value
