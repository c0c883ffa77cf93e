"""Green outcomes of the boot probe, kept for the next start on the same machine with the same build.

Invariants and semantics: an outcome counts for one key: processor, kernels, torch, Kev's own files, threads, model,
precision, backend, device and all shapes of the forward. Only outcomes in which every bit was equal are kept; a file
that is damaged, or was made for anything else, is ignored in one line of the log. Failing to write is only logged. When
one is written, those that nobody used for long go, and all but the last used ones.

Not here: the probe itself (``probe``), what a node promises (``node``), names and ages of files (``kept_files``).
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from common.clock import SystemClock
from inference_svc.kept_files import PartialFile, mark_used, sweep
from inference_svc.kernels.library import ABI_VERSION, Library, kernels
from inference_svc.model_loader import LoadedModel
from inference_svc.plan import ForwardShapes

_LOG = logging.getLogger("kev.probe")

_VERSION = 1
_MOST_FILES = 256
_OWN_FILES = ("*.py", "*.so", "*.pyd")


def probe_facts(model: LoadedModel, shapes: ForwardShapes, max_slots: int) -> dict[str, str]:
    """Everything that a probe's outcome may depend on."""
    found = kernels()
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
    return {
        "cpu": _cpu(),
        "kernels": f"{found.variant} abi {ABI_VERSION}" if isinstance(found, Library) else "none",
        "torch": f"{torch.__version__} cuda {torch.version.cuda} {gpu}",
        "build": _build(),
        "threads": str(torch.get_num_threads()),
        "model": model.fingerprint,
        "form": f"{model.precision} {model.backend} {model.device} {model.dtype} {_compiled(model)} {model.geometry}",
        "shapes": f"{shapes} slots {max_slots} context {model.max_context} vocabulary {model.vocab_size}",
    }


class ProbeCache:
    """The outcomes in one folder."""

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        """Look at one key.

        Args:
            folder: where outcomes are kept; made when there is something to keep.
            facts: what the outcome depends on (``probe_facts``).
        """
        self._facts = dict(facts)
        key = sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
        self._path = folder / f"{key[:32]}.json"

    def passed_at(self) -> float | None:
        """When the probe passed here, seconds since the epoch; None when that is not known."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["version"] != _VERSION or content["facts"] != self._facts or content["passed"] is not True:
                raise ValueError("it was made for something else")
            passed_at = content["passed_at"]
            if isinstance(passed_at, bool) or not isinstance(passed_at, int | float) or not 0 < passed_at < 2**40:
                raise ValueError("it has no time")
            with self._path.open("rb") as file:
                mark_used(file)
            return float(passed_at)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("the kept outcome of the probe in %s is not used: %s", self._path, error)
            return None

    def keep(self, passed_at: float) -> None:
        """Remember that the probe passed."""
        content = {"version": _VERSION, "facts": self._facts, "passed": True, "passed_at": passed_at}
        try:
            with closing(PartialFile.beside(self._path)) as partial:
                partial.file.write((json.dumps(content, indent=1) + "\n").encode())
                partial.publish(self._path)
        except OSError as error:
            _LOG.warning("the outcome of the probe could not be kept in %s: %s", self._path, error)
        sweep(self._path.parent, self._path.suffix, SystemClock().time(), most=_MOST_FILES)

    def forget(self) -> None:
        """Drop what is kept: the probe has failed since."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("the outcome of the probe in %s could not be dropped: %s", self._path, error)


def _compiled(model: LoadedModel) -> str:
    return "compiled" if getattr(model, "compiled", None) is not None else "plain"


@cache
def _cpu() -> str:
    """Model and flags of the first processor, as a digest."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        wanted = ("model name", "vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
        lines = [line for line in described.splitlines() if line.split(":")[0].strip() in wanted]
    except OSError:
        lines = [platform.processor(), platform.platform()]
    return sha256("\n".join((platform.machine(), *lines)).encode()).hexdigest()


@cache
def _build() -> str:
    """Kev's own files on the way from a plan to bits, as a digest."""
    digest = sha256()
    room = Path(__file__).parent
    for file in sorted(path for pattern in _OWN_FILES for path in room.rglob(pattern)):
        digest.update(f"{file.relative_to(room)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
