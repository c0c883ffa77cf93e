"""Pages of weight files are let go and come back; memory of any other kind is never touched."""

from __future__ import annotations

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


def _resident_file_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_pages_go_and_come_back(mapped: torch.Tensor) -> None:
    """The numbers are those of the file again, and memory is smaller in between."""
    expected = mapped.clone()
    before = _resident_file_bytes()
    assert let_go([mapped]) > 4_000_000
    assert _resident_file_bytes() <= before - 3_500_000
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
        assert torch.equal(head(x), expected) and torch.equal(head(x), expected)
    assert not head._forward_hooks
