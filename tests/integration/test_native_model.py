"""Packed models: the check against transformers, images on disk, memory as the plan says, and fall-backs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from common.errors import UnsupportedModelError
from inference_svc import decoder as decoder_module
from inference_svc.attention import Backend
from inference_svc.kernels.layout import CLayer, CMlp, CModel
from inference_svc.memory_bill import Load, memory_bill, packed_bytes
from inference_svc.model_loader import LoadedModel, LoadSettings, load_model
from inference_svc.native_forward import NativeForward
from inference_svc.native_image import open_image, pointer_offsets, save_image
from inference_svc.weight_files import read_shape, read_tensor_shapes
from tests.integration.crowd import Ask, Crowd, prompt, run_together, same_bits
from tests.integration.tiny_checkpoint import save_checkpoint
from tests.integration.tiny_models import ARCHITECTURES, MAX_CONTEXT, MIXTURES, NATIVE_FORMS, Form, form_id, model_as

ASKS = [Ask(prompt(n, seed=n), max_tokens=5) for n in (3, 20, 41)]


def _load(path: Path, precision: str, image_dir: Path | None = None, backend: Backend | None = None) -> LoadedModel:
    settings = LoadSettings(precision=precision, max_context=MAX_CONTEXT, backend=backend, image_dir=image_dir)
    return load_model(path, settings)


@pytest.mark.parametrize("form", NATIVE_FORMS, ids=form_id)
@pytest.mark.parametrize("name", ["gemma3", "qwen2", "gpt_neox", "qwen3_moe"])
def test_an_image_gives_the_same_bits(name: str, form: Form, tmp_path: Path) -> None:
    """Saved, mapped and run: tokens and logits of the packed model in memory."""
    model = model_as(name, form)
    native = model.native
    assert native is not None
    path = tmp_path / "deep" / "model"
    save_image(native, path, "f")
    restored = open_image(path, "f")
    assert restored is not None and restored.num_bytes == native.num_bytes
    for tensor in restored.tensors:
        assert tensor.data_ptr() % 64 == 0, "the kernels read whole cache lines"
    again = LoadedModel(
        module=None,
        native=restored,
        geometry=model.geometry,
        precision=model.precision,
        dtype=model.dtype,
        device=model.device,
        backend=model.backend,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        fingerprint="f",
    )
    for one, other in zip(run_together(model, ASKS), run_together(again, ASKS), strict=True):
        assert same_bits(one, other)
    assert torch.equal(model.embedding_rows(3, 9), again.embedding_rows(3, 9))


def test_every_pointer_of_the_structures_is_found() -> None:
    """An image misses no pointer: as many as the headers declare."""
    assert len(list(pointer_offsets(CMlp))) == 2 * 3 + 2
    assert len(list(pointer_offsets(CLayer))) == 6 * 2 + 2 * 3 + 7 + 3
    assert len(list(pointer_offsets(CModel))) == 1 + 2 * 3 + 2 + 2
    assert len(list(pointer_offsets(CMlp * 3))) == 3 * 8


def test_an_image_of_another_packing_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version of the kernels would read weights in an order that they no longer have."""
    native = model_as("llama", NATIVE_FORMS[1]).native
    assert native is not None
    save_image(native, tmp_path / "model", "f")
    monkeypatch.setattr("inference_svc.native_image.ABI_VERSION", 999)
    assert open_image(tmp_path / "model", "f") is None


@pytest.mark.parametrize("damage", ["other", "cut", "garbage", "header", "missing"])
def test_an_image_that_does_not_fit_is_not_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another fingerprint is passed over in silence, damage is told; both are made anew."""
    native = model_as("llama", NATIVE_FORMS[1]).native
    assert native is not None
    path = tmp_path / "model"
    save_image(native, path, "f")
    content = path.read_bytes()
    changed = {"cut": content[:-70], "garbage": b"x" * 500, "header": content[:30] + b"\xff" * 200 + content[230:]}
    if damage == "missing":
        path.unlink()
    elif damage != "other":
        path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING, logger="kev.model"):
        assert open_image(path, "g" if damage == "other" else "f") is None
    assert bool(caplog.records) is (damage not in ("other", "missing"))


def test_a_start_writes_an_image_and_the_next_one_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reads no weights and answers alike; a folder that cannot be written is no error."""
    (tmp_path / "m").mkdir()
    save_checkpoint(tmp_path / "m", "qwen3", torch.bfloat16)
    first = _load(tmp_path / "m", "int8", tmp_path / "images")
    assert first.backend is Backend.NATIVE and len(list((tmp_path / "images").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("inference_svc.model_loader._read_module", None)
        second = _load(tmp_path / "m", "int8", tmp_path / "images")
        shorter = load_model(
            tmp_path / "m", LoadSettings(precision="int8", max_context=64, backend=None, image_dir=tmp_path / "images")
        )
    assert shorter.max_context == 64, "a longer table of positions serves a shorter context"
    for one, other in zip(run_together(first, ASKS), run_together(second, ASKS), strict=True):
        assert same_bits(one, other)
    (tmp_path / "file").touch()
    assert _load(tmp_path / "m", "int8", tmp_path / "file" / "below").native is not None


def test_a_model_that_is_read_wrong_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check against transformers notices; left to choose, torch runs the model, else it is refused in words."""
    save_checkpoint(tmp_path, "gemma3")
    with monkeypatch.context() as patch:
        patch.setattr(decoder_module, "_ACTIVATIONS", dict.fromkeys(decoder_module._ACTIVATIONS, 3))
        with pytest.raises(UnsupportedModelError, match="as transformers does"):
            _load(tmp_path, "fp32", backend=Backend.NATIVE)
        assert _load(tmp_path, "fp32").backend is Backend.CPU
    assert _load(tmp_path, "fp32").backend is Backend.NATIVE


def test_without_kernels_torch_runs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto falls back; a demand is refused with the reason and the way out; so is a mixture of experts."""
    for folder, name in (("dense", "llama"), ("experts", "mixtral")):
        (tmp_path / folder).mkdir()
        save_checkpoint(tmp_path / folder, name, torch.bfloat16)
    monkeypatch.setattr("inference_svc.model_loader.kernels", lambda: "they are not built")
    assert _load(tmp_path / "dense", "bf16").backend is Backend.CPU
    with pytest.raises(UnsupportedModelError, match="not built"):
        _load(tmp_path / "dense", "bf16", backend=Backend.NATIVE)
    with pytest.raises(UnsupportedModelError, match="experts"):
        _load(tmp_path / "experts", "bf16")


@pytest.mark.parametrize("form", NATIVE_FORMS, ids=form_id)
@pytest.mark.parametrize("name", (*ARCHITECTURES, *MIXTURES))
def test_memory_is_what_the_bill_says(name: str, form: Form, tmp_path: Path) -> None:
    """Weights, KV and working memory: never below what is allocated, and close above it."""
    save_checkpoint(tmp_path, name, form.dtype)
    model = _load(tmp_path, form.precision, backend=Backend.NATIVE)
    assert model.native is not None
    crowd = Crowd(model, max_slots=8, shapes=model.shapes(8, 32, 16))
    forward = crowd.runner._forward
    assert isinstance(forward, NativeForward)
    shape = read_shape(tmp_path)
    load = Load(
        precision=form.precision,
        max_context=model.max_context,
        num_channels=8,
        channel_tokens=64,
        prefill_rows=32,
        segment_tokens=16,
        num_threads=torch.get_num_threads(),
    )
    bill = memory_bill(shape, load, packed_bytes(read_tensor_shapes(tmp_path), form.precision))
    tables = {tensor.data_ptr(): tensor for tensor in model.native.tensors if tensor.shape[:1] == (MAX_CONTEXT,)}
    table_bytes = sum(4 * tensor.numel() for tensor in tables.values() if tensor.dim() == 2)
    allocated = model.native.num_bytes - table_bytes
    assert allocated <= bill.weight_bytes <= 1.05 * allocated
    logits_bytes = 4 * 8 * model.vocab_size  # made when the first question is sampled
    working = forward.num_bytes + table_bytes + logits_bytes
    everything = allocated + working + crowd.cache.num_bytes
    assert working <= bill.working_bytes
    billed = bill.weight_bytes + bill.working_bytes + crowd.cache.num_positions * bill.position_bytes
    assert everything <= billed <= 1.05 * everything
    assert crowd.cache.num_bytes == crowd.cache.num_positions * bill.position_bytes
