"""Memory that is free, but lies below something in use, goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from common.heap import give_back


def _anonymous_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    pytest.skip("this system does not tell anonymous memory")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_is_given_back() -> None:
    """Blocks of 32 KiB, and one in use on top of them, which keeps glibc from shrinking the heap by itself."""
    blocks = [bytes(32 << 10) for _ in range(1_000)]
    on_top = bytes(32 << 10)
    full = _anonymous_kib()
    del blocks
    give_back()
    assert _anonymous_kib() < full - 24_000 and len(on_top) == 32 << 10
