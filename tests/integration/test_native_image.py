"""Images of packed models: the same bits, whole or not there, in bounds, and made without a second copy in memory."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from common.errors import UnsupportedModelError
from common.heap import give_back
from inference_svc.attention import Backend
from inference_svc.kept_files import PartialFile
from inference_svc.kernels.layout import CLayer, CMlp, CModel
from inference_svc.kernels.packed import PackedWeight, packed_blocks
from inference_svc.model_loader import LoadedModel, LoadSettings, load_model, wrap_model
from inference_svc.native_check import NativeCheck
from inference_svc.native_image import ImageDraft, ImageName, open_image
from inference_svc.native_model import NativeModel
from inference_svc.native_pointers import pointer_offsets
from tests.integration.crowd import Ask, prompt, run_together, same_bits
from tests.integration.tiny_checkpoint import save_checkpoint
from tests.integration.tiny_models import CONFIGS, MAX_CONTEXT, NATIVE_FORMS, Form, form_id, fresh_module, model_as

ASKS = [Ask(prompt(n, seed=n), max_tokens=5) for n in (3, 20, 41)]


def _name(folder: Path, fingerprint: str = "f", origin: str = "m") -> ImageName:
    return ImageName(folder=folder, fingerprint=fingerprint, origin=origin)


def _draft(name: ImageName, model: str = "llama", form: Form = NATIVE_FORMS[1]) -> tuple[ImageDraft, LoadedModel]:
    """A model that is packed into a draft."""
    draft = ImageDraft.begin(name, 1)
    assert draft is not None
    settings = LoadSettings(precision=form.precision, max_context=MAX_CONTEXT, backend=form.backend)
    return draft, wrap_model(fresh_module(model, form.dtype), settings, fingerprint="f", store=draft)


def _published(name: ImageName) -> None:
    draft, _ = _draft(name)
    with closing(draft):
        draft.publish()


def _load(path: Path, precision: str, image_dir: Path | None, max_context: int = MAX_CONTEXT) -> LoadedModel:
    settings = LoadSettings(precision=precision, max_context=max_context, backend=None, image_dir=image_dir)
    return load_model(path, settings)


def _same(one: LoadedModel, other: LoadedModel) -> bool:
    return all(same_bits(a, b) for a, b in zip(run_together(one, ASKS), run_together(other, ASKS), strict=True))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small model on disk."""
    (tmp_path / "m").mkdir()
    save_checkpoint(tmp_path / "m", "qwen3", torch.bfloat16)
    return tmp_path / "m"


@pytest.mark.parametrize("form", NATIVE_FORMS, ids=form_id)
@pytest.mark.parametrize("name", ["gemma3", "qwen2", "gpt_neox", "qwen3_moe"])
def test_an_image_gives_the_same_bits(name: str, form: Form, tmp_path: Path) -> None:
    """While it is a draft and when it is found again: tokens and logits of the model that is packed in memory."""
    in_memory, image = model_as(name, form), _name(tmp_path / "deep")
    draft, drafted = _draft(image, name, form)
    assert in_memory.native is not None and drafted.native is not None
    with closing(draft):
        assert open_image(image) is None, "a draft has no name"
        draft.publish()
    found = open_image(image)
    assert found is not None and found.num_bytes == drafted.native.num_bytes == in_memory.native.num_bytes
    for tensor in (*found.tensors, *drafted.native.tensors):
        assert tensor.data_ptr() % 64 == 0, "the kernels read whole cache lines"
    for one in (drafted, replace(in_memory, native=found)):
        assert _same(one, in_memory)
        assert torch.equal(one.embedding_rows(3, 9), in_memory.embedding_rows(3, 9))


def test_every_pointer_of_the_structures_is_found() -> None:
    """An image misses no pointer: as many as the headers declare."""
    assert len(list(pointer_offsets(CMlp))) == 2 * 3 + 2
    assert len(list(pointer_offsets(CLayer))) == 6 * 2 + 2 * 3 + 7 + 3
    assert len(list(pointer_offsets(CModel))) == 1 + 2 * 3 + 2 + 2
    assert len(list(pointer_offsets(CMlp * 3))) == 3 * 8


def test_an_image_of_another_packing_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new version of the kernels would read weights in an order that they no longer have, or in another file."""
    _published(_name(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("inference_svc.native_image.ABI_VERSION", 999)
        assert open_image(_name(tmp_path)) is None
    content = _name(tmp_path).path.read_bytes()
    _name(tmp_path).path.write_bytes(content.replace(b"kev packed model 2", b"kev packed model 1", 1))
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        assert open_image(_name(tmp_path)) is None
    assert not caplog.records, "it is not damaged"


@pytest.mark.parametrize("damage", ["cut", "longer", "garbage", "start", "description", "pointer", "empty", "missing"])
def test_an_image_that_does_not_fit_is_not_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damage is told in one line; the image is made anew."""
    name = _name(tmp_path)
    _published(name)
    content = name.path.read_bytes()
    number = content.index(b'"model": "') + 10 + 2 * next(pointer_offsets(CModel))
    second = number + 2 * (list(pointer_offsets(CModel))[1] - next(pointer_offsets(CModel)))
    changed = {
        "cut": content[:-70],
        "longer": content + b"x",
        "garbage": b"x" * 500,
        "start": content[:19] + b"\xff" * 8 + content[27:],
        "description": content[:-30] + b"\xff" * 30,
        "pointer": content[:second] + b"ff" * 2 + content[second + 4 :],
        "empty": b"",
    }
    if damage == "missing":
        name.path.unlink()
    else:
        name.path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        assert open_image(name) is None
    assert len(caplog.records) == (damage != "missing")


def test_a_start_writes_an_image_and_the_next_one_uses_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start reads no weights and answers alike, with a shorter context too."""
    images = tmp_path / "images"
    first = _load(checkpoint, "int8", images)
    assert first.backend is Backend.NATIVE and len(list(images.iterdir())) == 1
    monkeypatch.setattr("inference_svc.model_loader.read_module", None)
    assert _same(_load(checkpoint, "int8", images), first)
    assert _load(checkpoint, "int8", images, max_context=64).max_context == 64


def _no_folder(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    folder.write_bytes(b"")


def _no_room(folder: Path, patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder.parent)
    patch.setattr("inference_svc.native_image.shutil.disk_usage", lambda _: usage._replace(free=1))


def _full_disk(after: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """The disk is full after so many bytes."""

    def fill(_folder: Path, patch: pytest.MonkeyPatch) -> None:
        begin = PartialFile.beside

        def limited(target: Path, *, buffer_bytes: int) -> PartialFile:
            partial = begin(target, buffer_bytes=buffer_bytes)
            write = partial.file.write
            left = [after]

            class Limited:
                def write(self, data: bytes) -> int:
                    left[0] -= len(data)
                    if left[0] < 0:
                        raise OSError(28, "No space left on device")
                    return write(data)

                def __getattr__(self, name: str) -> object:
                    return getattr(partial.file, name)

            return PartialFile(partial.path, Limited())  # type: ignore[arg-type]

        patch.setattr(PartialFile, "beside", limited)

    return fill


def _failing(call: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """A system call fails."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    return lambda _folder, patch: patch.setattr(call, fail)


@pytest.mark.parametrize(
    "trouble",
    [
        _no_folder,
        _no_room,
        _full_disk(0),
        _full_disk(50_000),
        _failing("inference_svc.native_image.os.fsync"),
        _failing("inference_svc.native_image.mmap.mmap"),
        _failing("pathlib.Path.replace"),
    ],
    ids=["no folder", "no room", "full at once", "full on the way", "sync", "map", "rename"],
)
def test_where_nothing_can_be_kept_the_model_runs_all_the_same(
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same bits, one line in the log, and no file that is left."""
    expected, images = _load(checkpoint, "int8", None), tmp_path / "images"
    trouble(images, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        model = _load(checkpoint, "int8", images)
    assert model.native is not None and _same(model, expected)
    assert [record for record in caplog.records if "not kept" in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1
    assert not images.is_dir() or not list(images.iterdir())


def test_a_model_that_fails_the_check_leaves_no_image(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later starts would take it for one that has passed."""

    def refuse(*_: object) -> None:
        raise UnsupportedModelError("other numbers")

    monkeypatch.setattr(NativeCheck, "check_packed", refuse)
    assert _load(checkpoint, "int8", tmp_path / "images").backend is Backend.CPU
    assert not list((tmp_path / "images").iterdir())


def test_two_that_pack_at_once_do_not_meet(tmp_path: Path) -> None:
    """Each runs on what it wrote, whoever is first, and what stays is whole."""
    (one, first), (other, second) = _draft(_name(tmp_path)), _draft(_name(tmp_path))
    with closing(one), closing(other):
        other.publish()
        one.publish()
    expected = model_as("llama", NATIVE_FORMS[1])
    assert _same(first, expected) and _same(second, expected)
    assert [path.suffix for path in tmp_path.iterdir()] == [".kevmodel"] and open_image(_name(tmp_path)) is not None


def _kept(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def test_a_newer_image_replaces_the_older_ones_of_its_model(tmp_path: Path) -> None:
    """Not those of other models, of other forms, or of another version of Kev; and not while one is mapped."""
    _published(_name(tmp_path, "1"))
    _published(_name(tmp_path, "2", origin="another"))
    (tmp_path / "3.kevmodel").write_bytes(b"kev packed model 1\n")
    mapped: NativeModel | None = open_image(_name(tmp_path, "1"))
    assert mapped is not None
    _published(_name(tmp_path, "4"))
    assert _kept(tmp_path) == {"1", "2", "3", "4"}
    del mapped
    gc.collect()
    _published(_name(tmp_path, "5"))
    assert _kept(tmp_path) == {"2", "3", "5"}
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert open_image(_name(tmp_path, "5")) is not None, "which counts as use"
    _published(_name(tmp_path, "6", origin="a third"))
    assert _kept(tmp_path) == {"5", "6"}


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_start_holds_no_second_copy(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are not in memory, and blocks leave nothing behind; without an image the test would see them."""
    shape = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}
    monkeypatch.setitem(CONFIGS, "wide", lambda: LlamaConfig(**{**CONFIGS["llama"]().to_dict(), **shape}))
    monkeypatch.setattr("tests.integration.tiny_checkpoint.VOCAB_SIZE", 120_000)
    save_checkpoint(tmp_path, "wide", torch.bfloat16)
    grown: list[int] = []

    def noted_blocks(*arguments: Any) -> Iterator[PackedWeight]:
        for block in packed_blocks(*arguments):
            yield block
            grown.append(_anonymous_bytes() - start)

    monkeypatch.setattr("inference_svc.native_model.packed_blocks", noted_blocks)
    most: list[int] = []
    for image_dir in (None, tmp_path / "images"):
        grown.clear()
        gc.collect()
        give_back()
        start = _anonymous_bytes()
        native = _load(tmp_path, precision, image_dir).native
        assert native is not None
        num_bytes = native.num_bytes
        most.append(max(grown))
        del native
    assert most[1] < 120_000 * 256 * 2, "less than the source has on disk"
    assert most[1] < most[0] - 0.5 * num_bytes


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("this system does not tell anonymous memory")
