"""A whole cluster of real processes, started as ``kev up`` starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import kev
from common.types import FinishReason
from tests.e2e.tiny_model import save_tiny_model

KEV = Path(sys.executable).parent / "kev"
QUESTIONS = ["Kev的隔离通道是如何实现的？", "帮我总结一下Transformer的注意力机制", "short", "解释一下什么是KV Cache"]


class Cluster:
    """A running ``kev up`` and where it listens."""

    def __init__(self, process: subprocess.Popen[str], lines: list[str], folder: Path) -> None:
        self.process = process
        self.lines = lines
        self.folder = folder
        found = re.search(r"ready: (http://\S+), gRPC router (\S+)", "".join(lines))
        assert found is not None
        self.url, self.router = found.groups()
        config = (folder / "kev.yaml").read_text(encoding="utf-8")
        aggregator = re.search(r"aggregator_address: '?([0-9.:]+)", config)
        assert aggregator is not None
        self.aggregator = aggregator.group(1)

    def client(self) -> kev.Client:
        return kev.Client(self.router, self.aggregator)

    def pids(self, module: str) -> list[int]:
        """Process ids of this cluster's processes of a kind."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if module in command and str(self.folder / "kev.yaml") in command:
                found.append(int(entry.name))
        return found


@contextmanager
def cluster(folder: Path, *options: str) -> Iterator[Cluster]:
    """Start, hand out, stop in order."""
    command = [KEV, "up", "--port", "0", "--dir", folder, *options]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "ready: http" in line:
                break
        try:
            assert process.poll() is None, "".join(lines) + _logs(folder)
            yield Cluster(process, lines, folder)
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            process.wait(60)
        assert process.returncode == 0, "".join(lines) + rest + _logs(folder)


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted((folder / "logs").glob("*.log")))


def _until(reached: Callable[[], bool], timeout_s: float = 30.0) -> None:
    ends_at = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < ends_at, "it did not come to that"
        time.sleep(0.05)


@pytest.mark.timeout(150)
def test_the_cluster_answers_as_the_engine_does(tmp_path: Path) -> None:
    """Tokens and audit fields of the same request through three services and through one process are equal."""
    model_dir = tmp_path / "model"
    save_tiny_model(model_dir)
    config = {
        "kev": {
            "core": {"model_path": str(model_dir), "precision": "fp32", "max_context": 512, "num_threads": 1},
            "router": {"max_parallel_queries": 4, "channel_pool_size": 8},
        }
    }
    options = {"max_tokens": 12, "isolation": "strict", "timeout_ms": 60_000, "request_id": "same"}
    with kev.Engine.from_config(config) as engine:
        expected = engine.ask(QUESTIONS, **options)
    config_path = tmp_path / "kev.yaml"
    config_path.write_text(_yaml(config), encoding="utf-8")
    with cluster(tmp_path / "cluster", "--nodes", "2", "--config", str(config_path)) as running:
        with running.client() as client:
            results = client.ask(QUESTIONS, **options)
            report = client.isolation()
        answer = httpx.post(f"{running.url}/v1/query", json={"queries": QUESTIONS, "max_tokens": 12}, timeout=60)
    for one, other in zip(expected, results, strict=True):
        for name in ("token_ids", "text", "finish_reason", "tokens", "prompt_tokens", "hash_bucket", "strategy"):
            assert getattr(one, name) == getattr(other, name), name
        assert (one.channel_id, one.diverted_from) == (other.channel_id, other.diverted_from)
        assert one.isolation == other.isolation and other.node_id.startswith("node-")
    assert report.row_independent and report.position_independent
    assert [result["text"] for result in answer.json()["results"]] == [result.text for result in expected]


@pytest.mark.timeout(150)
def test_a_killed_node_costs_no_question(tmp_path: Path) -> None:
    """kill -9 in the middle of answers: another node gives them, each question has one outcome, the node comes back."""
    with cluster(tmp_path / "cluster", "--no-model", "--nodes", "2") as running, running.client() as client:
        texts = [f"question {i} " + "tells its number at length " * 12 for i in range(24)]
        request_id = client.submit(texts, timeout_ms=60_000, max_tokens=1000, strategy="round_robin")
        nodes = running.pids("inference_svc")
        assert len(nodes) == 2
        _until(lambda: client.stats().node.num_running > 0)
        os.kill(nodes[0], signal.SIGKILL)
        results = client.wait(request_id, timeout=60)
        assert [result.text.strip() for result in results] == [text.strip() for text in texts]
        assert {result.finish_reason for result in results} == {FinishReason.STOP}
        _until(lambda: len(running.pids("inference_svc")) == 2)
        assert {result.node_id for result in client.ask(texts[:16], max_tokens=1000, timeout_ms=60_000)}


def _yaml(config: object) -> str:
    import yaml

    return str(yaml.safe_dump(config))
