"""A digest that tells models apart without reading all of their files.

Invariants and semantics: it covers config.json, every safetensors header and 64 evenly spaced pages of each file.

Not here: what else a fingerprint depends on (``model_loader``).
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

_PAGES = 64
_PAGE_BYTES = 4096


def files_digest(path: Path, form: str) -> str:
    """SHA-256 over the files of a model directory and the form in which the model is run."""
    digest = sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as handle:
            header_bytes = int.from_bytes(handle.read(8), "little")
            digest.update(handle.read(min(header_bytes, size)))
            for page in range(_PAGES):
                handle.seek(max(0, size - _PAGE_BYTES) * page // (_PAGES - 1))
                digest.update(handle.read(_PAGE_BYTES))
    digest.update(form.encode())
    return digest.hexdigest()
