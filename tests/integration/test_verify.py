"""The proof on demand: it passes where isolation holds and fails, with numbers, where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from common.config import load_config
from inference_svc.attention import Backend
from inference_svc.model_loader import LoadedModel, LoadSettings, load_model
from inference_svc.verify import Check, verify_isolation
from kev import verify as kev_verify
from kev.cli import main
from kev.verify import Verification, as_data, lines, verify
from tests.integration.test_node import leaky_model
from tests.integration.tiny_checkpoint import save_checkpoint, settings_for
from tests.integration.tiny_models import Form, form_id, model_as

FORMS = (Form("bf16", Backend.NATIVE), Form("int8", Backend.NATIVE), Form("bf16", Backend.CPU))


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_every_check_passes_and_compared_something(form: Form) -> None:
    """Four checks over more questions than slots; progress is told before each."""
    model = model_as("gemma3", form)
    told: list[str] = []
    checks = verify_isolation(model, model.shapes(4, 32, 16), 4, told.append)
    assert told == ["alone", *(check.name for check in checks)]
    assert [check.name for check in checks] == ["crowd", "places", "prefix", "poison"]
    for check in checks:
        assert check.passed and check.num_questions >= 2 and not check.max_difference, check
        assert check.num_logit_rows == 8 * check.num_questions


@pytest.mark.parametrize("amount", [1e-3, 10.0])
def test_a_leak_is_found_and_measured(amount: float) -> None:
    """Rows that see each other: questions change, by how much is told; poison reaches them."""
    model = leaky_model(amount)
    checks = {check.name: check for check in verify_isolation(model, model.shapes(4, 32, 16), 4, lambda _: None)}
    assert not checks["crowd"].passed and checks["crowd"].num_changed and checks["crowd"].max_difference > 0
    assert not checks["poison"].passed


def _tiny_config(folder: Path, **core: object) -> Path:
    save_checkpoint(folder, "llama", torch.bfloat16)
    path = folder / "kev.yaml"
    path.write_text(yaml.safe_dump(settings_for(folder, core={"precision": "bf16", **core})), encoding="utf-8")
    return path


def test_the_command_reports_and_returns_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table for people, JSON for programs, exit code 0."""
    path = _tiny_config(tmp_path)
    assert main(["verify", "--config", str(path)]) == 0
    assert "every compared bit is equal" in capsys.readouterr().out
    assert main(["verify", "--config", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    [device] = data["devices"]
    assert data["passed"] is device["passed"] is True and data["differing"] == [] and device["device"] == "cpu"
    assert [check["name"] for check in device["checks"]] == ["crowd", "places", "prefix", "poison"]


def test_a_backend_without_the_promise_fails_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference backend mixes questions in one call: exit code 1, reason and way out."""
    path = _tiny_config(tmp_path, backend="reference")
    assert main(["verify", "--config", str(path)]) == 1
    assert "core.backend" in capsys.readouterr().out


def _several(folder: Path) -> Path:
    path = _tiny_config(folder, backend="cpu")
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["kev"]["deploy"] = {"mode": "multi_gpu", "workers": 3, "devices": ["cuda:0", "cuda:1"]}
    tree["kev"]["router"] = {"max_parallel_queries": 2}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def _on_devices(patch: pytest.MonkeyPatch, change: Callable[[str, LoadedModel], LoadedModel]) -> None:
    """Two devices with a model each, all of it on this machine's CPU; ``change`` makes them differ."""

    def load_on(path: Path, settings: LoadSettings) -> LoadedModel:
        return change(settings.device, load_model(path, replace(settings, device="cpu")))

    patch.setattr("inference_svc.loading.load_model", load_on)
    patch.setattr("inference_svc.loading.visible_gpus", lambda: 2)
    patch.setattr(kev_verify, "device_names", lambda config: ("cuda:0", "cuda:1", "cuda:0"))


def test_a_leak_on_the_second_device_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one is well: its line says so, the other's that it is not."""
    leaky = leaky_model(1e-3)
    _on_devices(monkeypatch, lambda device, model: leaky if device == "cuda:1" else model)
    assert main(["verify", "--config", str(_several(tmp_path))]) == 1
    shown = capsys.readouterr().out
    assert "pass cuda:0, engine cores: 2" in shown and "FAIL cuda:1, engine cores: 1" in shown
    assert "FAIL alike: 3 engine cores answer a question: cuda:1 not as cuda:0" in shown and "does NOT hold" in shown


def test_devices_that_only_differ_from_each_other_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each keeps its questions apart, but the answer depends on the device."""

    def changed(device: str, model: LoadedModel) -> LoadedModel:
        if device == "cuda:1":
            assert model.module is not None
            model.module.model.norm.weight.data[0] += 0.5
        return model

    _on_devices(monkeypatch, changed)
    assert main(["verify", "--config", str(_several(tmp_path)), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    found = [(device["device"], device["cores"], device["passed"], len(device["checks"])) for device in data["devices"]]
    assert found == [("cuda:0", 2, True, 4), ("cuda:1", 1, True, 4)]
    assert data["passed"] is False and data["differing"] == ["cuda:1"]


def test_differences_that_are_no_numbers_stay_valid_json(tmp_path: Path) -> None:
    """An infinite difference is null; a check that could not run says why."""
    [device] = verify(load_config(_tiny_config(tmp_path)), lambda _: None).devices
    broken = Check(
        name="crowd",
        meaning="m",
        num_questions=2,
        num_logit_rows=4,
        num_changed=1,
        max_difference=float("inf"),
    )
    stopped = Check(
        name="poison", meaning="m", num_questions=0, num_logit_rows=0, num_changed=0, max_difference=0.0, error="why"
    )
    found = Verification((replace(device, checks=(broken, stopped)),))
    data = json.loads(json.dumps(as_data(found), allow_nan=False))
    assert data["passed"] is False and data["devices"][0]["checks"][0]["max_difference"] is None
    shown = "\n".join(lines(found))
    assert "FAIL crowd" in shown and "why" in shown and "does NOT hold" in shown
