"""A run as JSON, and as the section of RESULTS.md: machine, versions, commit, date, tables.

Not here: the cells (``table``).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.compare.catalogue import ROOT, available_cores
from bench.compare.goals import Outcome, outcomes
from bench.compare.readings import Reading
from bench.compare.rounds import Rules
from bench.compare.table import Table

_TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and on what a run was made."""

    date: str
    processor: str
    instructions: str
    num_cores: int
    memory_gib: float
    system: str
    python: str
    commit: str
    load_at_start: float
    """Processes that wanted a core, over the minute before; other work spoils the numbers."""


@dataclass(slots=True, kw_only=True)
class Run:
    """All of a run, growing while it goes on."""

    machine: Machine
    rules: Rules
    num_threads: int
    clipped_tokens: int | None = None
    """Answers were cut to this length for a try: no goal is judged by such a run."""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the name of the process."""
    titles: dict[str, str] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    sweeps: dict[str, list[list[Reading]]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def outcomes(self) -> list[Outcome]:
        """Goals of the works so far."""
        return outcomes(self.readings) if self.clipped_tokens is None else []

    def json(self) -> str:
        """Everything, for machines."""
        found = [{**asdict(outcome), "reached": outcome.reached} for outcome in self.outcomes()]
        fields = {
            "machine": asdict(self.machine),
            "rules": asdict(self.rules),
            "num_threads": self.num_threads,
            "clipped_tokens": self.clipped_tokens,
            "versions": self.versions,
            "works": self.titles,
            "readings": [asdict(reading) for reading in self.readings],
            "sweeps": {
                name: [[asdict(reading) for reading in column] for column in columns]
                for name, columns in self.sweeps.items()
            },
            "goals": found,
        }
        return json.dumps(fields, indent=2) + "\n"

    def markdown(self, tables: Sequence[Table]) -> str:
        """The section of RESULTS.md."""
        machine, rules = self.machine, self.rules
        versions = "; ".join(
            f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items())
            for name, found in self.versions.items()
        )
        lines = [
            f"## Kev beside its peers on {machine.num_cores} cores, {machine.date[:10]}",
            "",
            f"{machine.processor} ({machine.instructions}), {machine.num_cores} cores, {machine.memory_gib:.0f} GiB, "
            f"{machine.system}, Python {machine.python}, commit {machine.commit}, load before the start "
            f"{machine.load_at_start:.1f}.",
            f"Versions: {versions}.",
            "",
            f"All systems in one run, alternating, one awake at a time, threads for each: {self.num_threads}; "
            f"a warm-up of questions alone, then the median of {rules.num_rounds} round(s), or fewer where one system "
            f"would take more than {rules.limit_s:,.0f} s on one work. Greedy, exactly the tokens asked for, from the "
            "same prompt ids; nothing is cached from round to round. llama.cpp runs the Q4_K_M file that the others' "
            'bf16 weights come from, with the instruction sets listed above. "Changed": answers that differ from the '
            "same question alone. Peak RSS counts mapped files and sums the processes of a system.",
            "",
        ]
        return "\n".join(lines) + "\n" + "\n".join(table.markdown() for table in tables)


def this_machine() -> Machine:
    """The machine as it is now."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in info) if colon}
    flags = set(fields.get("flags", "").split())
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=fields.get("model name", platform.machine()),
        instructions=" ".join(flag for flag in _TELLING_FLAGS if flag in flags),
        num_cores=len(available_cores()),
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        commit=_git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", "-uno") else ""),
        load_at_start=os.getloadavg()[0],
    )


def _git(*arguments: str) -> str:
    made = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return made.stdout.strip()
