"""A peer as a process that is stopped whenever it is not its turn.

Invariants and semantics: between turns every process of the peer's session is held by SIGSTOP, so that only one system
uses the cores. A peer that does not reply in time, or ends, is killed and answers ``Failed`` from then on. Memory is
the sum of the peaks (VmHWM) of its processes since the turn began, file mappings included; pages that two of them
share count twice. Linux only.

Not here: what is said (``wire``), in what order systems take turns (``rounds``).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.compare.wire import Failed, Message, WireError, decode, encode

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RESET_PEAK = "5"
"""What /proc/PID/clear_refs takes to start VmHWM anew (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one order led to."""

    reply: Message
    peak_rss_bytes: int
    cpu_s: float
    """Processor time of all its processes."""


class PeerProcess:
    """One peer. Use it as a context manager."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start it; ``log`` gets all that it prints."""
        self._log = log
        self._failed: Failed | None = None
        self._buffer = b""
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,
            )
        _signal_session(self._process.pid, signal.SIGSTOP)

    @property
    def pid(self) -> int:
        """Process, and session."""
        return self._process.pid

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self, order: Message, limit_s: float) -> Turn:
        """Wake the peer for one order."""
        if self._failed is not None:
            return Turn(reply=self._failed, peak_rss_bytes=0, cpu_s=0.0)
        session = self._process.pid
        with self._awake():
            _reset_peaks(session)
            cpu_s = _cpu_s(session)
            reply = self._exchange(order, limit_s)
            peak_rss_bytes, cpu_s = _peak_rss_bytes(session), max(0.0, _cpu_s(session) - cpu_s)
        return Turn(reply=reply, peak_rss_bytes=peak_rss_bytes, cpu_s=cpu_s)

    def close(self) -> None:
        """End all its processes."""
        self._failed = self._failed or Failed(message="the process was ended")
        _signal_session(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                _opened(pipe).close()

    def _exchange(self, order: Message, limit_s: float) -> Message:
        try:
            pipe = _opened(self._process.stdin)
            pipe.write(encode(order).encode() + b"\n")
            pipe.flush()
            return decode(self._line(limit_s))
        except (OSError, EOFError, WireError) as error:
            self._failed = Failed(message=f"{error or type(error).__name__}; its log: {self._log}")
            self.close()
            return self._failed

    def _line(self, limit_s: float) -> str:
        pipe = _opened(self._process.stdout)
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no reply in {limit_s:,.0f} s")
                piece = os.read(pipe.fileno(), 1 << 20)
                if not piece:
                    raise EOFError("the process ended")
                self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode(errors="replace")

    @contextmanager
    def _awake(self) -> Iterator[None]:
        _signal_session(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            _signal_session(self._process.pid, signal.SIGSTOP)


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise OSError("the process has no pipe")
    return pipe


def _signal_session(session: int, number: signal.Signals) -> None:
    for pid in _members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(session: int) -> list[int]:
    """Processes of a session."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _stat(pid)[3:4] == [str(session)]]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on, past the name, which may hold anything; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _reset_peaks(session: int) -> None:
    for pid in _members(session):
        with suppress(OSError):  # Not allowed everywhere: the peak then is the one since the start.
            Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def _peak_rss_bytes(session: int) -> int:
    return sum(map(_high_water_bytes, _members(session)))


def _high_water_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _cpu_s(session: int) -> float:
    fields = filter(None, map(_stat, _members(session)))
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS_PER_S
