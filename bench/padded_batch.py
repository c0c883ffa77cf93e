"""Kev beside transformers' padded batch: eight short questions, 64 greedy tokens each, in one run.

    python -m bench.padded_batch [--rounds 3] [--model demo] [--json out.json]

Both systems run the same weights in bf16 on all cores, alternating, after a warm-up round each; medians are reported.
It also counts the answers that change when the questions are run together instead of alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

import kev
from common.tokenization import Tokenizer
from common.types import Truncate
from kev.models import resolve_model

QUESTIONS = (
    "Question: What is the capital of France?\nAnswer:",
    "Question: How do I get a refund for an order that arrived damaged?\nAnswer:",
    "The three primary colors are",
    "def quicksort(arr):\n",
    "Question: Explain what a KV cache is in a transformer model.\nAnswer:",
    "Once upon a time, in a small village near the sea, there lived",
    "Translate English to French:\nsea otter => loutre de mer\ncheese =>",
    "Question: Who wrote the play Romeo and Juliet, and in which century was it written?\nAnswer:",
)
NEW_TOKENS = 64
TEMPLATE = "{question}"

Answers = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one system did."""

    system: str
    tokens_per_s: float
    """Median over the rounds, all eight questions together."""
    rounds_s: tuple[float, ...]
    changed_answers: int
    """Of eight, compared with the question alone."""


class KevSystem:
    """Kev, level strict."""

    name = "kev strict bf16"

    def __init__(self, model_path: str) -> None:
        core = {"model_path": model_path, "precision": "bf16", "prompt_template": TEMPLATE, "max_context": 1024}
        router = {"strategy": "round_robin", "normalize": "off"}
        self._engine = kev.Engine.from_config({"kev": {"core": core, "router": router}}, progress=print)

    def run(self, questions: Sequence[str]) -> Answers:
        """Generated ids of all questions."""
        options = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "stop": [], "timeout_ms": 600_000}
        return [result.token_ids for result in self._engine.ask(list(questions), **options)]

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


class PaddedBatch:
    """transformers ``generate`` over a left-padded batch."""

    name = "transformers padded batch bf16"

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_dir(path, prompt_template=TEMPLATE)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def run(self, questions: Sequence[str]) -> Answers:
        """Generated ids of all questions."""
        rendered = [
            self._tokenizer.render(question, "", max_prompt_tokens=1000, truncate=Truncate.NONE).ids
            for question in questions
        ]
        width = max(map(len, rendered))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rendered])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rendered])
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        return [tuple(row[width:].tolist()) for row in made]


def measure(systems: Sequence[KevSystem | PaddedBatch], num_rounds: int, console: Console) -> list[Reading]:
    """Run all systems, alternating."""
    alone = {}
    for system in track(systems, "warm-up and answers alone", console=console):
        system.run(QUESTIONS)
        alone[system.name] = [system.run([question])[0] for question in QUESTIONS]
    rounds: dict[str, list[float]] = {system.name: [] for system in systems}
    together: dict[str, Answers] = {}
    for _ in track(range(num_rounds), "rounds", console=console):
        for system in systems:
            seconds, together[system.name] = _timed(lambda run=system.run: run(QUESTIONS))  # type: ignore[misc]
            rounds[system.name].append(seconds)
    num_tokens = NEW_TOKENS * len(QUESTIONS)
    return [
        Reading(
            system=name,
            tokens_per_s=num_tokens / statistics.median(seconds),
            rounds_s=tuple(seconds),
            changed_answers=sum(a != b for a, b in zip(alone[name], together[name], strict=True)),
        )
        for name, seconds in rounds.items()
    ]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo", help="as core.model_path")
    parser.add_argument("--json", type=Path, help="write the readings here")
    arguments = parser.parse_args()
    console = Console()
    resolved = resolve_model(arguments.model, None, console.print)
    kev_system = KevSystem(arguments.model)
    readings = measure([kev_system, PaddedBatch(resolved.path)], arguments.rounds, console)
    kev_system.close()
    table = Table("system", "tokens/s", "rounds, s", "answers changed by company")
    for reading in readings:
        seconds = " ".join(f"{value:.2f}" for value in reading.rounds_s)
        table.add_row(reading.system, f"{reading.tokens_per_s:.1f}", seconds, f"{reading.changed_answers} of 8")
    console.print(table)
    if arguments.json:
        report = {"machine": _machine(), "readings": [asdict(reading) for reading in readings]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _timed(call: Callable[[], Answers]) -> tuple[float, Answers]:
    start = time.perf_counter()
    answers = call()
    return time.perf_counter() - start, answers


def _machine() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    sys.exit(main())
