"""What precision costs in quality: perplexity and agreement of the best token, on texts that come with Kev.

    python -m bench.quality [--model demo] [--precisions fp32 bf16 int8] [--tokens 1500] [--json out.json]

The texts are Kev's own pages. Every token is predicted from all tokens before it in its text; several texts run side by
side, which changes no bit. Agreement is the share of positions at which a precision's best token is that of the first
precision named.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.tokenization import Tokenizer
from common.types import SamplingParams, Truncate
from inference_svc.forward import Forward, WantedRow
from inference_svc.kv_cache import KVCache
from inference_svc.model_loader import LoadSettings, load_model
from inference_svc.plan import KVView, Segment, StepKind, StepPlan
from inference_svc.slots import Extent
from kev.models import resolve_model

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("README.md", "README.zh-CN.md", "docs/isolation.md", "docs/operations.md")
_MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One precision's reading."""

    precision: str
    num_tokens: int
    perplexity: float
    agreement: float
    """Share of positions with the reference's best token."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of all texts, one after the other."""

    logprobs: list[float]
    """Natural logarithm of the probability of each token that came."""
    best: list[int]


def predict(forward: Forward, texts: Sequence[Sequence[int]], console: Console, label: str) -> Predictions:
    """Predict each token of each text from those before it."""
    spans = [Extent(index * _MAX_CONTEXT, _MAX_CONTEXT, 1, f"text:{index}") for index in range(len(texts))]
    logprobs: list[list[float]] = [[] for _ in texts]
    best: list[list[int]] = [[] for _ in texts]
    for position in track(range(max(map(len, texts)) - 1), label, console=console, transient=True):
        running = [index for index, text in enumerate(texts) if position + 1 < len(text)]
        segments = tuple(
            Segment(
                sequence_id=index,
                slot=index,
                row=row,
                position=position,
                token_ids=(texts[index][position],),
                kv=KVView(private=spans[index]),
                owner=spans[index].owner,
                sampling=SamplingParams(),
            )
            for row, index in enumerate(running)
        )
        plan = StepPlan(step_index=position, kind=StepKind.DECODE, num_rows=len(segments), segments=segments)
        rows = forward.run(plan, [WantedRow(segment, greedy=False) for segment in segments])
        for index, row in zip(running, rows, strict=True):
            if not isinstance(row, torch.Tensor):
                raise RuntimeError("the forward gave no logits")
            logprobs[index].append(float(row.float().log_softmax(0)[texts[index][position + 1]]))
            best[index].append(int(row.argmax()))
    return Predictions([value for one in logprobs for value in one], [token for one in best for token in one])


def judged(precision: str, found: Predictions, reference: Predictions) -> Quality:
    """The reading of one precision beside the reference."""
    same = sum(a == b for a, b in zip(found.best, reference.best, strict=True))
    return Quality(
        precision=precision,
        num_tokens=len(found.best),
        perplexity=math.exp(-sum(found.logprobs) / len(found.logprobs)),
        agreement=same / len(found.best),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "int8"])
    parser.add_argument("--tokens", type=int, default=1_500, help="of all texts together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    console = Console()
    path = resolve_model(arguments.model, None, console.print).path
    tokenizer = Tokenizer.from_dir(path, prompt_template="{question}")
    each = arguments.tokens // len(TEXTS)
    texts = []
    for name in TEXTS:
        content = (ROOT / name).read_text(encoding="utf-8")[: 12 * each]
        ids = tokenizer.render(content, "", max_prompt_tokens=each, truncate=Truncate.RIGHT).ids
        texts.append(ids[:each])
    readings: list[Quality] = []
    reference: Predictions | None = None
    for precision in arguments.precisions:
        model = load_model(path, LoadSettings(precision=precision, max_context=_MAX_CONTEXT, backend=None))
        shapes = model.shapes(len(texts), 8, 8)
        cache = KVCache(model.geometry, len(texts) * _MAX_CONTEXT, model.dtype, model.device)
        found = predict(model.forward_over(cache, shapes), texts, console, precision)
        reference = reference or found
        readings.append(judged(precision, found, reference))
    table = Table("precision", "tokens", "perplexity", f"best token as in {readings[0].precision}")
    for reading in readings:
        table.add_row(
            reading.precision, f"{reading.num_tokens:,}", f"{reading.perplexity:.3f}", f"{reading.agreement:.1%}"
        )
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(reading) for reading in readings], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
