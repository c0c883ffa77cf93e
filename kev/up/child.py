"""One supervised process: started, asked for its health, started again after a crash, stopped.

Invariants and semantics: at most one process of a child lives at a time. Its output goes to its own log file, which is
only ever appended to. It leads a process group of its own, so that Ctrl-C in the terminal reaches the supervisor
alone, and gets SIGTERM when the supervisor dies.

Not here: when it may start (``kev.up.supervisor``), its states (``kev.up.lifecycle``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from common.health_check import health_problem
from common.ports import Clock
from kev.up.lifecycle import Lifecycle, RestartPolicy, State
from kev.up.plan import Health, ProcessSpec

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127
"""What a shell says of a program that it cannot start."""
_TAIL_BYTES = 4096
_LIBC = ctypes.CDLL(None)

HealthProbe = Callable[[Health], str | None]
"""Blocks; returns why a process is not healthy, or None."""


def probe(health: Health) -> str | None:
    """Ask a real process."""
    return health_problem(health.target, health.service, tls=health.tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """What all children have in common."""

    logs: Path
    """Folder of the log files; must exist."""
    env: Mapping[str, str]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    starting_poll_s: float = 0.2
    """Time between two health checks before it is ready."""
    running_poll_s: float = 2.0
    """The same, afterwards."""
    probe: HealthProbe = probe


class Child:
    """One process of the cluster; all methods on the event loop."""

    def __init__(
        self, spec: ProcessSpec, settings: ChildSettings, clock: Clock, on_change: Callable[[Child], None]
    ) -> None:
        self.spec = spec
        self.lifecycle = Lifecycle(settings.policy, clock)
        self.note = ""
        """Why it is in its state, in words; empty when there is nothing to say."""
        self.log_path = settings.logs / f"{spec.name}.log"
        self._settings = settings
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_ordered = asyncio.Event()
        self._was_killed = False
        self._exit_code: int | None = None

    @property
    def pid(self) -> int | None:
        """Id of the living process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self) -> None:
        """Run it until it is told to stop or is given up."""
        self._task = asyncio.create_task(self._run(), name=f"kev-up-{self.spec.name}")

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        if self.pid is not None:
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Tell it to drain and wait for its end; kill it when it takes too long or ``hurry`` is set.

        Returns:
            Whether it ended by itself and in order.
        """
        needs_drain = self.lifecycle.state in (State.READY, State.NOT_READY)
        is_running = self.lifecycle.is_running
        self.lifecycle.on_stop()
        self._stop_ordered.set()
        if self._task is None:
            self._settle()
            return True
        self._on_change(self)
        self._terminate()
        hurrying = asyncio.create_task(hurry.wait())
        watched: set[asyncio.Task[None] | asyncio.Task[bool]] = {self._task, hurrying}
        await asyncio.wait(watched, timeout=self.spec.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not self._task.done():
            self._was_killed = True
            self.kill()
        await self._task
        allowed = (0,) if needs_drain else (0, -signal.SIGTERM)
        return not self._was_killed and (not is_running or self._exit_code in allowed)

    # ---- the life of one process after the other

    async def _run(self) -> None:
        while not self._stop_ordered.is_set():
            self.lifecycle.on_start()
            self._on_change(self)
            await self._run_once()
            if self.lifecycle.state is not State.BACKING_OFF:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.lifecycle.start_delay_s):
                    await self._stop_ordered.wait()
        self._settle()

    async def _run_once(self) -> None:
        with self.log_path.open("ab") as log:
            try:
                self._process = await self._spawn(log)
            except OSError as error:
                self._process = None
                log.write(f"{error}\n".encode())
        if self._process is None:
            self._ended(_NOT_STARTED)
            return
        if self._stop_ordered.is_set():
            self._terminate()
        watching = asyncio.create_task(self._watch())
        try:
            code = await self._process.wait()
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        self._ended(code)

    async def _spawn(self, log: BinaryIO) -> asyncio.subprocess.Process:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        log.write(f"=== {now} start {self.lifecycle.num_starts}: {shlex.join(self.spec.argv)}\n".encode())
        log.flush()
        return await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._settings.env, **self.spec.env},
            process_group=0,
            preexec_fn=_end_with_parent,
        )

    async def _watch(self) -> None:
        while True:
            problem = await asyncio.to_thread(self._settings.probe, self.spec.health)
            if self.lifecycle.on_health(problem is None):
                self.note = problem or ""
                self._on_change(self)
            if self.lifecycle.is_hung:
                self.kill()
            is_starting = self.lifecycle.state is State.STARTING
            await asyncio.sleep(self._settings.starting_poll_s if is_starting else self._settings.running_poll_s)

    def _ended(self, code: int) -> None:
        self._exit_code = code
        was_ordered = self._stop_ordered.is_set()
        self.lifecycle.on_exit()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = "" if was_ordered or code < 0 else last_line(self.log_path)
        self.note = f"ended with {how}" + (f": {last}" if last else "")
        self._on_change(self)

    def _settle(self) -> None:
        """Enter the last state when no process was there to end."""
        if self.lifecycle.state is State.STOPPING:
            self.lifecycle.on_exit()
            self._on_change(self)

    def _terminate(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def last_line(path: Path) -> str:
    """The last line of a log that says something; empty when there is none but the heading of the start."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = log.read().decode("utf-8", "replace").splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "" if said.startswith("=== ") else said


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
