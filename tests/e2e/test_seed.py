"""The article that describes Kev, verbatim: its kev.yaml, its Python, its command line and its HTTP call."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kev.testing import EOS_ID, VOCAB_SIZE, save_byte_tokenizer
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ENV = {**os.environ, "KEV__CORE__NUM_THREADS": "1"}
"""A tiny model is slower on two threads."""
PATIENCE_S = 120
"""For what takes seconds on a machine that does nothing else."""
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


@pytest.fixture(scope="module")
def seed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the article's kev.yaml and a tiny model where it looks for one."""
    folder = tmp_path_factory.mktemp("seed")
    shutil.copy(ROOT / "deploy/examples/seed.yaml", folder / "kev.yaml")
    model_dir = folder / "models/kev-7b"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        dtype="float16",
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(model_dir)
    save_byte_tokenizer(model_dir)
    return folder


def test_the_python_snippet_runs_as_it_stands(seed_dir: Path) -> None:
    """Four channels, each printed with its audit fields."""
    done = subprocess.run(
        [sys.executable, HERE / "seed_snippet.py"],
        cwd=seed_dir,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^channel=(\d+) \| time=(\d+)ms \| tokens=(\d+)$", done.stdout, re.MULTILINE)
    assert len(lines) == 4 and len({channel for channel, _, _ in lines}) == 4, done.stdout
    assert all(int(tokens) > 0 for _, _, tokens in lines)


def test_the_server_and_the_http_call_work_as_they_stand(seed_dir: Path) -> None:
    """kev serve --config kev.yaml --port N, the article's JSON body, and a clean stop."""
    port = free_port()
    command = [Path(sys.executable).parent / "kev", "serve", "--config", "kev.yaml", "--port", str(port)]
    server = subprocess.Popen(command, cwd=seed_dir, env=ENV, stderr=subprocess.PIPE, text=True)
    try:
        base = f"http://localhost:{port}"
        _wait_ready(base, server)
        body = '{"queries": ["问题A", "问题B"], "isolation": "strict"}'
        answer = httpx.post(
            f"{base}/v1/query", content=body.encode(), headers={"Content-Type": "application/json"}, timeout=30
        )
        assert answer.status_code == 200, answer.text
        decoded = json.loads(answer.content)
        assert [result["question_index"] for result in decoded["results"]] == [0, 1]
        assert decoded["request_id"]
        assert {result["isolation"]["verdict"] for result in decoded["results"]} == {"bitwise"}
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=30)
    assert server.returncode == 0, errors


def _wait_ready(base: str, server: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        assert server.poll() is None, server.communicate()[1]
        try:
            if httpx.get(f"{base}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")
