"""Tiny models run on one thread: two threads that wait for each other take ten times as long as the work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for one forward, as a real deployment has."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
