"""Makes the peers' environments, and tells which are there.

Invariants and semantics: one virtual environment per peer under the bench's cache, filled by pip from wherever pip is
set up to look; a second run costs little. A peer that cannot be installed stays "not installed"; the others go on.

Not here: which packages (``catalogue``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.compare.catalogue import Environment, Worker

NEEDED_BYTES = 8 * 10**9
"""Free room that an environment may want while it is made: vLLM's is the largest."""


class NotInstalledError(Exception):
    """An environment could not be made."""


def is_installed(worker: Worker, cache: Path) -> bool:
    """Whether the peer can be started."""
    if worker.environment is None:
        return True
    python = worker.interpreter(cache)
    if not python.exists():
        return False
    script = f"import importlib.util as u, sys; sys.exit(u.find_spec({worker.environment.imports!r}) is None)"
    return subprocess.run([python, "-c", script], check=False, capture_output=True).returncode == 0


def install(environment: Environment, cache: Path, tell: Callable[[str], None]) -> None:
    """Make or complete one environment.

    Raises:
        NotInstalledError: there is too little room, or a command failed; names it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(cache).free
    if free_bytes < NEEDED_BYTES:
        room = f"{free_bytes / 1e9:.1f} GB free in {cache}, {NEEDED_BYTES / 1e9:.0f} GB wanted"
        raise NotInstalledError(f"{environment.name}: {room}; make room, or set KEV_CACHE_DIR")
    directory = cache / environment.name
    python = directory / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(directory)], tell)
    for step in environment.steps:
        _run([str(python), "-m", "pip", "--disable-pip-version-check", *step], tell)


def _run(command: list[str], tell: Callable[[str], None]) -> None:
    tell(" ".join(command))
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalledError(str(error)) from error
