"""Packed models: the check against transformers, memory as the plan says, and fall-backs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import UnsupportedModelError
from inference_svc import decoder as decoder_module
from inference_svc.attention import Backend
from inference_svc.memory_bill import Load, memory_bill, packed_bytes
from inference_svc.model_loader import LoadedModel, LoadSettings, load_model
from inference_svc.native_forward import NativeForward
from inference_svc.weight_files import read_shape, read_tensor_shapes
from tests.integration.crowd import Crowd
from tests.integration.tiny_checkpoint import save_checkpoint
from tests.integration.tiny_models import ARCHITECTURES, MAX_CONTEXT, MIXTURES, NATIVE_FORMS, Form, form_id


def _load(path: Path, precision: str, backend: Backend | None = None) -> LoadedModel:
    settings = LoadSettings(precision=precision, max_context=MAX_CONTEXT, backend=backend)
    return load_model(path, settings)


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
