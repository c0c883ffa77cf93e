"""Pages of weight files are let go and come back; memory of any other kind is never touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from inference_svc.file_pages import let_go, let_go_after_use


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """A weight of 4 MiB that is a view of its file."""
    weight = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    save_file({"small": torch.ones(3), "weight": weight}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        return file.get_tensor("weight")  # type: ignore[no-any-return]


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_pages_go_and_come_back(mapped: torch.Tensor) -> None:
    """The numbers are those of the file again, and memory is smaller in between."""
    expected = mapped.clone()
    before = _resident_bytes("RssFile")
    assert let_go([mapped]) > 4_000_000
    assert _resident_bytes("RssFile") <= before - 3_500_000
    assert torch.equal(mapped, expected)
    assert let_go([mapped[3:700]]) > 2_500_000, "a part alone"


def test_other_memory_is_left_alone(mapped: torch.Tensor) -> None:
    """Anonymous pages would read as zero afterwards: nothing but file pages may ever be let go."""
    own = torch.randn(1024, 1024)
    kept = own.clone()
    assert let_go([own, own.T, own[:, 3:], mapped[:, 5:], torch.ones(3)]) == 0
    assert torch.equal(own, kept)


def test_a_model_gives_the_same_while_it_lets_go(mapped: torch.Tensor) -> None:
    """Layers in a list and tables, through two forwards."""
    head = nn.Linear(64, 1024 * 16, bias=False)
    head.weight = nn.Parameter(mapped.view(1024 * 16, 64), requires_grad=False)
    x = torch.randn(3, 64)
    expected = head(x)
    with let_go_after_use(nn.Sequential(head)):
        assert torch.allclose(head(x), expected, rtol=1e-5) and torch.equal(head(x), head(x))
    assert not head._forward_hooks and type(head) is nn.Linear and torch.equal(head(x), expected)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_head_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """The most that was resident since the head began to run, with and without."""
    rows, width = 1 << 17, 64
    save_file({"weight": torch.randn(rows, width)}, tmp_path / "model.safetensors")
    head = nn.Linear(width, rows, bias=False, dtype=torch.float32)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        head.weight = nn.Parameter(file.get_tensor("weight"), requires_grad=False)
    x = torch.randn(1, width)
    head(x)
    as_a_whole = _peak_growth(lambda: head(x), head.weight)
    with let_go_after_use(nn.Sequential(head)):
        in_blocks = _peak_growth(lambda: head(x), head.weight)
    assert as_a_whole > rows * width * 4 * 0.9
    assert in_blocks < rows * width * 4 * 0.4


def _peak_growth(run: Callable[[], object], weight: torch.Tensor) -> int:
    """By how much memory has grown at most, beginning without the weight."""
    let_go([weight])
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak cannot be set back here")
    before = _resident_bytes("VmRSS")
    run()
    return _resident_bytes("VmHWM") - before
