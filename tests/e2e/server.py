"""``kev serve`` as a process of its own, as a reader starts it, but on a free port."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.ports import free_port

_START_TIMEOUT_S = 100.0


class ServerProcess:
    """One running server."""

    def __init__(self, arguments: Sequence[str], folder: Path, name: str) -> None:
        """Start ``kev`` with ``arguments``; the value of ``--port`` is replaced by a free port."""
        self.port = free_port()
        given = list(arguments)
        self.documented_port = given[given.index("--port") + 1]
        given[given.index("--port") + 1] = str(self.port)
        self._log_path = folder / f"{name}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "kev.cli", *given], cwd=folder, stderr=log)

    @property
    def log(self) -> str:
        """What it has written to standard error."""
        return self._log_path.read_text(encoding="utf-8")

    def local(self, text: str) -> str:
        """``text`` with the documented address replaced by the real one."""
        return text.replace(f"localhost:{self.documented_port}", f"127.0.0.1:{self.port}")

    def wait_ready(self) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: it ended or did not become ready.
        """
        until = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"kev serve did not become ready: {self.log}")

    def begin_stop(self) -> None:
        """Tell it to end, as an operator does; not before it listens to that."""
        self.wait_ready()
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Wait until it has ended; returns its exit code."""
        try:
            return self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
