"""Which native kernels are used: the switch, and what is said when there are none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common.errors import ConfigError
from inference_svc.kernels.library import Library, kernels

find = kernels.__wrapped__


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kev then runs on torch alone, and says why."""
    monkeypatch.setenv("KEV_KERNELS", "off")
    assert find() == "they are switched off by KEV_KERNELS=off"


def test_an_unknown_variant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name must not run another variant than was meant."""
    monkeypatch.setenv("KEV_KERNELS", "avx1024")
    with pytest.raises(
        ConfigError, match=r"KEV_KERNELS=avx1024 names no variant.*off, avx512_bf16_vnni, avx2, portable"
    ):
        find()


def test_a_build_that_is_missing_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without a C++ compiler leaves none."""
    monkeypatch.delenv("KEV_KERNELS", raising=False)
    monkeypatch.setattr("inference_svc.kernels.library.EXTENSION_SUFFIXES", [".no-such-suffix"])
    assert find() == "they are not built; install Kev again where a C++ compiler is at hand"


def test_the_switch_chooses_the_variant() -> None:
    """In a process of its own: a variant is chosen once."""
    if not isinstance(kernels(), Library):
        pytest.skip(str(kernels()))
    code = "from inference_svc.kernels.library import kernels; print(kernels().variant)"
    env = {**os.environ, "KEV_KERNELS": "portable"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "portable\n"
