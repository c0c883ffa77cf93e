"""The cluster that most trials are made on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two nodes, a router, an aggregator and Valkey, with a proxy at every joint."""
    async with Cluster(tmp_path) as cluster:
        yield cluster
