"""``kev verify``: proves the isolation of the configured model on this machine, device by device, and reports it.

Invariants and semantics: a pass means that on every device of the configuration no bit differed in any check, that the
boot probe of each of its engine cores passed, and that all cores answer alike. The report says what was compared; it
promises nothing beyond.

Not here: the checks (``inference_svc.verify``), whether cores are alike (``inference_svc.equality``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from common.clock import SystemClock
from common.config import Config
from common.types import IsolationLevel, IsolationReport, Verdict
from inference_svc.verify import Check
from kev.parts import least

if TYPE_CHECKING:
    from inference_svc.node import Node


@dataclass(frozen=True, slots=True)
class DeviceVerification:
    """What was found on one device."""

    device: str
    num_cores: int
    report: IsolationReport
    """Of the core that can promise least."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Strict can be promised by every core, and every check passed."""
        strict = dict(self.report.levels)[IsolationLevel.STRICT]
        return strict is Verdict.BITWISE and all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found."""

    devices: tuple[DeviceVerification, ...]
    """The first one first: others are compared with it."""
    differing: tuple[str, ...] = ()
    """Devices of which a core answers a question with other bits than the first core."""

    @property
    def passed(self) -> bool:
        """Every device passed, and all answer alike."""
        return not self.differing and all(device.passed for device in self.devices)

    @property
    def num_cores(self) -> int:
        """Engine cores in all."""
        return sum(device.num_cores for device in self.devices)


def verify(config: Config, progress: Callable[[str], None]) -> Verification:
    """Load the model on every device, probe the machine and run every check on each.

    Raises:
        ConfigError: a setting that is not offered.
        ModelError: the model cannot be found, read or isolated.
    """
    from inference_svc.equality import differing
    from inference_svc.loading import open_nodes
    from kev.models import resolve_model

    resolved = resolve_model(config.core.model_path, config.core.cache_dir or None, progress)
    # A machine that fails is to be reported, not refused.
    lenient = config.model_copy(
        update={"isolation": config.isolation.model_copy(update={"level": IsolationLevel.SHARED})}
    )
    nodes = open_nodes(resolved.path, lenient, "verify", SystemClock(), fresh_probe=True).nodes
    try:
        by_device: dict[str, list[Node]] = {}
        names = device_names(config)
        for name, node in zip(names, nodes, strict=True):
            by_device.setdefault(name, []).append(node)
        others = {names[index] for index in differing([node.bench for node in nodes])}
        devices = tuple(_verified(name, cores, config, progress) for name, cores in by_device.items())
    finally:
        for node in nodes:
            node.close()
    return Verification(devices, tuple(sorted(others)))


def device_names(config: Config) -> tuple[str, ...]:
    """The device of each engine core."""
    from inference_svc.devices import engine_devices
    from inference_svc.gpus import visible_gpus

    return engine_devices(config, visible_gpus())


def _verified(
    device: str, cores: Sequence[Node], config: Config, progress: Callable[[str], None]
) -> DeviceVerification:
    """Run every check on a device. Its cores share the weights; the checks have an arena of their own."""
    from inference_svc.verify import verify_isolation

    model, slots = cores[0].model, config.router.max_parallel_queries
    shapes = model.shapes(slots, config.core.prefill_rows, config.core.segment_tokens)
    checks = verify_isolation(model, shapes, slots, lambda name: progress(f"checking on {device}: {name}"))
    return DeviceVerification(device, len(cores), least([core.report for core in cores]), tuple(checks))


def as_data(found: Verification) -> dict[str, object]:
    """The report as JSON data; a difference that is not finite is null."""
    devices = [_device_data(device) for device in found.devices]
    return {"passed": found.passed, "devices": devices, "differing": list(found.differing)}


def _device_data(found: DeviceVerification) -> dict[str, object]:
    report = asdict(found.report)
    report["levels"] = {level.value: verdict.value for level, verdict in found.report.levels}
    checks = []
    for check in found.checks:
        entry = asdict(check) | {"passed": check.passed}
        if not check.max_difference < float("inf"):
            entry["max_difference"] = None
        checks.append(entry)
    return {
        "device": found.device,
        "cores": found.num_cores,
        "passed": found.passed,
        "report": report,
        "checks": checks,
    }


def lines(found: Verification) -> list[str]:
    """The report for people, line by line."""
    shown: list[str] = []
    for device in found.devices:
        if len(found.devices) > 1:
            shown.append(f"{_mark(device.passed)} {device.device}, engine cores: {device.num_cores}")
        shown += _device_lines(device)
    if found.num_cores > 1:
        others = f": {', '.join(found.differing)} not as {found.devices[0].device}" if found.differing else ""
        shown.append(f"{_mark(not found.differing)} alike: {found.num_cores} engine cores answer a question{others}")
    return [*shown, "isolation holds: every compared bit is equal" if found.passed else "isolation does NOT hold here"]


def _device_lines(found: DeviceVerification) -> list[str]:
    report = found.report
    shown = [
        f"backend {report.backend}, {report.precision}, {report.num_threads} threads, "
        f"at most {report.decode_rows} decode and {report.prefill_rows} prefill rows"
    ]
    for name, passed, meaning in (
        ("rows", report.row_independent, "other content in the other rows"),
        ("places", report.position_independent, "another place among the rows"),
        ("prefix", report.prefix_independent, "a prefix that was found instead of computed"),
    ):
        shown.append(f"{_mark(passed)} at every start, {name}: {meaning}")
    for check in found.checks:
        counts = f"{check.num_questions} questions, {check.num_logit_rows} rows of logits, {check.num_changed} changed"
        gap = f", largest difference {check.max_difference:.3g}" if check.max_difference else ""
        shown.append(f"{_mark(check.passed)} {check.name}: {check.meaning}: {check.error or counts + gap}")
    return [*shown, report.reason] if report.reason else shown


def _mark(passed: bool) -> str:
    return "pass" if passed else "FAIL"
