"""Servers for the tests that need Redis.

Not here: what is tested.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from common.redis_keys import RedisKeys
from tests.contract.redis_harness import RedisHarness
from tests.contract.redis_servers import BINARIES, running_server


@pytest.fixture(scope="session", params=sorted(BINARIES))
def server_name(request: pytest.FixtureRequest) -> str:
    """A kind of server that is here."""
    return str(request.param)


@pytest.fixture(scope="session")
def redis_url(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server shared by all tests; each has a deployment of its own."""
    with running_server(server_name, tmp_path_factory.mktemp(server_name)) as url:
        yield url


@pytest.fixture
def nothing_stays_for_ever(redis_url: str) -> Iterator[None]:
    """Keys that live for ever, other than the documented ones of bounded size, would fill the server."""
    yield
    forgotten = []
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(match="{kev:test-*", count=1000):
            name = key.decode()
            kind = RedisKeys(name[len("{kev:") : name.index("}")]).kind_of(name)
            lives_for_ever = kind is not None and kind.ttl_ms is None and not kind.by_settings
            if client.ttl(key) == -1 and not lives_for_ever:
                forgotten.append(name)
            client.unlink(key)
    assert forgotten == []


@pytest.fixture
async def deployment(redis_url: str, nothing_stays_for_ever: None) -> AsyncIterator[RedisHarness]:
    """A deployment on the shared server, without processes yet."""
    harness = RedisHarness(redis_url)
    yield harness
    await harness.close()
