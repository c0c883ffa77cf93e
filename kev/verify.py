"""``kev verify``: proves the isolation of the configured model on this machine and reports it.

Invariants and semantics: a pass means that no bit differed in any check and that the boot probe passed. The report
says what was compared; it promises nothing beyond.

Not here: the checks (``inference_svc.verify``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from common.clock import SystemClock
from common.config import Config
from common.types import IsolationLevel, IsolationReport, Verdict
from inference_svc.verify import Check


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found."""

    report: IsolationReport
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Strict can be promised, and every check passed."""
        strict = dict(self.report.levels)[IsolationLevel.STRICT]
        return strict is Verdict.BITWISE and all(check.passed for check in self.checks)


def verify(config: Config, progress: Callable[[str], None]) -> Verification:
    """Load the model, probe the machine and run every check.

    Raises:
        ConfigError: a setting that is not offered.
        ModelError: the model cannot be found, read or isolated.
    """
    from inference_svc.loading import open_node
    from inference_svc.verify import verify_isolation
    from kev.models import resolve_model

    resolved = resolve_model(config.core.model_path, config.core.cache_dir or None, progress)
    # A machine that fails is to be reported, not refused.
    lenient = config.model_copy(
        update={"isolation": config.isolation.model_copy(update={"level": IsolationLevel.SHARED})}
    )
    node = open_node(resolved.path, lenient, "verify", SystemClock(), fresh_probe=True).node
    try:
        slots = config.router.max_parallel_queries
        shapes = node.model.shapes(slots, config.core.prefill_rows, config.core.segment_tokens)
        checks = verify_isolation(node.model, shapes, slots, lambda name: progress(f"checking: {name}"))
    finally:
        node.close()
    return Verification(node.report, tuple(checks))


def as_data(found: Verification) -> dict[str, object]:
    """The report as JSON data; a difference that is not finite is null."""
    report = asdict(found.report)
    report["levels"] = {level.value: verdict.value for level, verdict in found.report.levels}
    checks = []
    for check in found.checks:
        entry = asdict(check) | {"passed": check.passed}
        if not check.max_difference < float("inf"):
            entry["max_difference"] = None
        checks.append(entry)
    return {"passed": found.passed, "report": report, "checks": checks}


def lines(found: Verification) -> list[str]:
    """The report for people, line by line."""
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
    if report.reason:
        shown.append(report.reason)
    verdict = "isolation holds: every compared bit is equal" if found.passed else "isolation does NOT hold here"
    return [*shown, verdict]


def _mark(passed: bool) -> str:
    return "pass" if passed else "FAIL"
