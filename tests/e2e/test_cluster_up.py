"""``kev up`` as a user runs it: every process is real, only the nodes answer from a script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest


class Up:
    """A running ``kev up``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "kev.cli", "up", "--no-model", "--nodes", "2", "--port", "0"]
        self.process = subprocess.Popen([*command, "--dir", str(folder)], stderr=subprocess.PIPE, text=True)
        self.said = ""
        self.url = self._until(r"ready: (http://127\.0\.0\.1:\d+),")

    def _until(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if found := re.search(pattern, line):
                return found[1] if found.groups() else line
        raise AssertionError(self.said)

    def pids(self, module: str) -> list[int]:
        """The processes of this cluster that run a module."""
        parent = self.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
        return [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")]

    def ask(self) -> httpx.Response:
        """Two questions in one request."""
        body = {"queries": ["first", "second"], "timeout_ms": 60_000}
        return httpx.post(f"{self.url}/v1/query", json=body, timeout=90)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.said += self.process.stderr.read()
        return self.process.wait(60)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    up.process.kill()
    up.process.wait()
    assert up.process.stderr is not None
    up.process.stderr.close()


@pytest.mark.timeout(300)
def test_a_cluster_answers_survives_a_node_and_drains(up: Up) -> None:
    """One command does not bring up a cluster that works, or a killed node takes an answer with it."""
    answered = up.ask()
    assert [result["text"] for result in answered.json()["results"]] == ["first", "second"], answered.text
    nodes = up.pids("inference_svc")
    assert len(nodes) == 2
    for pid in nodes:
        os.kill(pid, signal.SIGKILL)
    assert up.ask().json()["state"] == "complete", "both nodes are gone when it is asked"
    until_s = time.monotonic() + 60
    while len(up.pids("inference_svc")) < 2 and time.monotonic() < until_s:
        time.sleep(0.1)
    assert len(up.pids("inference_svc")) == 2, up.said
    assert up.stop() == 0, up.said
    ended = re.findall(r"^kev: (\S+): stopped, ended with exit code 0$", up.said, re.M)
    assert ended[:2] == ["gateway", "router"] and ended[-2:] == ["aggregator", "store"] and len(ended) == 6
    logs = {path.name for path in (up.folder / "logs").iterdir()}
    assert logs == {
        f"{name}.log" for name in ("store", "aggregator", "inference-0", "inference-1", "router", "gateway")
    }
