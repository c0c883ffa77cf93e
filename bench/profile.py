"""Where each millisecond of a step goes: long prompts in prefill, then decode, beside what the machine could do.

    python -m bench.profile [--model demo] [--precisions bf16 int8] [--questions 8] [--tokens 1500] [--json out.json]

The engine core runs here without its thread: schedule, forward, update. Times are those of the native forward's own
clocks, per step, averaged over all steps of a kind; "Python" is what the steps took beside the forward. The floor of a
line is the larger of its operations at the peak and its bytes at the bandwidth, both of which are options: the defaults
are readings of two Zen 4 cores at 3.66 GHz, one 64-byte dot product per cycle and core. Bytes count weights and visible
keys and values once per step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common.clock import SystemClock
from common.types import IsolationLevel, Prompt, SamplingParams, WorkItem
from inference_svc.answer import AnswerText, NoText
from inference_svc.kernels.layout import CLayer, CModel, CWeight, Precision, Work
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog
from inference_svc.model_loader import LoadedModel, LoadSettings, load_model
from inference_svc.model_runner import ModelRunner
from inference_svc.native_forward import NativeForward
from inference_svc.native_model import NativeModel
from inference_svc.plan import StepKind, StepPlan
from inference_svc.sampler import Sampler
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.sequence import Sequence as Question
from inference_svc.slots import KVLedger
from kev.models import resolve_model

_LABELS = {
    Work.EMBED: "embedding",
    Work.NORM: "norms, residuals",
    Work.PREPARE: "rounding, quantizing",
    Work.QKV: "linear qkv",
    Work.ROTATE: "head norms, rotation, storing",
    Work.ATTENTION: "attention",
    Work.OUT: "linear out",
    Work.UP: "linear gate and up",
    Work.ACTIVATE: "activation",
    Work.DOWN: "linear down",
    Work.EXPERTS: "choosing experts",
    Work.HEAD: "head and best token",
    Work.WAIT: "threads waiting",
}
_ELEMENT_BYTES = {Precision.F32: 4.0, Precision.BF16: 2.0, Precision.I8: 1.0}
_CONTEXT = 4096
_FIRST_ID, _LAST_ID = 100, 30_000
"""Of random prompts: no control tokens."""


@dataclass(slots=True)
class Line:
    """One kind of work, per step."""

    work: str
    ms: float = 0.0
    megabytes: float = 0.0
    gigaops: float = 0.0
    floor_ms: float = 0.0


@dataclass(slots=True)
class Profile:
    """Steps of one kind in one precision."""

    precision: str
    kind: str
    num_steps: int = 0
    rows: float = 0.0
    """Of a step."""
    step_ms: float = 0.0
    lines: list[Line] = field(default_factory=list)

    @property
    def rows_per_s(self) -> float:
        """Tokens computed."""
        return 1e3 * self.rows / self.step_ms


@dataclass(frozen=True, slots=True)
class Machine:
    """What the arithmetic and the memory can do."""

    gigaops: float
    """Of all threads, in the precision at hand."""
    attention_gigaops: float
    gigabytes: float

    def floor_ms(self, work: Work, gigaops: float, megabytes: float) -> float:
        """Milliseconds that the work cannot go below."""
        peak = self.attention_gigaops if work is Work.ATTENTION else self.gigaops
        return max(gigaops / peak * 1e3, megabytes / self.gigabytes)


def work_of(model: NativeModel, plan: StepPlan) -> Iterator[tuple[Work, float, float]]:
    """Operations (1e9) and bytes (1e6) that a step needs, by kind.

    Of the last layer that is keys and values of all rows, and the rest for the rows whose next token is wanted.
    """
    shape, rows = model.model, plan.num_used
    everywhere = [(segment.position, segment.end) for segment in plan.segments]
    wanted = [(segment.end - 1, segment.end) for segment in plan.segments if segment.sampling is not None]
    for index in range(shape.num_layers):
        layer: CLayer = model.layers[index]
        mlp = model.mlps[index]
        last = index == shape.num_layers - 1
        needed, spans = (len(wanted), wanted) if last else (rows, everywhere)
        queries = shape.num_heads * shape.head_size
        yield Work.QKV, *_linear(layer.qkv, rows)
        yield Work.QKV, -2.0 * (rows - needed) * queries * layer.qkv.k / 1e9, 0.0
        for work, weight in ((Work.OUT, layer.out), (Work.UP, mlp.up), (Work.DOWN, mlp.down)):
            yield work, *_linear(weight, needed)
        yield Work.ATTENTION, *_attention(shape, layer.window, spans)
    yield Work.HEAD, *_linear(shape.head, len(wanted))


def _linear(weight: CWeight, rows: int) -> tuple[float, float]:
    size = weight.n * weight.k
    return 2.0 * rows * size / 1e9, size * _ELEMENT_BYTES[Precision(weight.precision)] / 1e6 if rows else 0.0


def _attention(shape: CModel, window: int, spans: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Of queries at positions ``[start, end)``, span by span."""
    visible = sum(min(p + 1, window or p + 1) for start, end in spans for p in range(start, end))
    seen = sum(min(end, (window or end) + end - start - 1) for start, end in spans)
    row_bytes = 2.0 * shape.num_kv_heads * shape.head_size * _ELEMENT_BYTES[Precision(shape.kv_type)]
    return 4.0 * visible * shape.num_heads * shape.head_size / 1e9, seen * row_bytes / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, all at once."""

    questions: int = 8
    tokens: int = 1500
    """Of a question, without the shared ones."""
    shared: int = 0
    """Tokens before them, common to all questions."""
    new_tokens: int = 16
    prefill_rows: int = 128


class Run:
    """Questions through one engine core, step by step."""

    def __init__(self, model: LoadedModel, load: Load) -> None:
        """Lay out an engine without its thread.

        Raises:
            SystemExit: the model has no native forward.
        """
        shapes = model.shapes(load.questions, load.prefill_rows, min(64, load.prefill_rows))
        context = load.shared + load.tokens + load.new_tokens
        num_positions = load.questions * (context + model.alignment_positions)
        ledger = KVLedger(num_positions, model.alignment_positions)
        cache = KVCache(model.geometry, num_positions, model.dtype, model.device)
        forward = model.forward_over(cache, shapes)
        if model.native is None or not isinstance(forward, NativeForward):
            raise SystemExit("this model has no native forward to look into")
        self._native, self._forward = model.native, forward
        self._runner = ModelRunner(forward, ledger, Sampler(frozenset()), ForwardLog())
        settings = SchedulerSettings(
            node_id="profile", max_slots=load.questions, shapes=shapes, max_context=model.max_context
        )
        self._scheduler = Scheduler(settings, ledger, SystemClock(), cache.scrub)
        self._precision = model.precision
        self._load = load

    def profiles(self, machine: Machine) -> list[Profile]:
        """All questions to their end; what they cost, by kind of step."""
        for index in range(self._load.questions):
            self._scheduler.add(_question(index, self._load))
        found: dict[StepKind, Profile] = {}
        while True:
            before, start = self._forward.work_ms(), time.perf_counter()
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._scheduler.update(plan, self._runner.execute(plan))
            took_ms, after = (time.perf_counter() - start) * 1e3, self._forward.work_ms()
            profile = found.setdefault(plan.kind, _empty(self._precision, plan.kind))
            self._add(profile, plan, took_ms, {work: after[work] - before[work] for work in Work})
        for profile in found.values():
            _average(profile, machine)
        return list(found.values())

    def _add(self, profile: Profile, plan: StepPlan, took_ms: float, spent: dict[Work, float]) -> None:
        threads = torch.get_num_threads()
        profile.num_steps += 1
        profile.rows += plan.num_used
        profile.step_ms += took_ms
        for work in Work:
            profile.lines[work].ms += spent[work] / threads
        profile.lines[-1].ms += took_ms - sum(spent.values()) / threads
        for work, gigaops, megabytes in work_of(self._native, plan):
            profile.lines[work].gigaops += gigaops
            profile.lines[work].megabytes += megabytes


def _question(index: int, load: Load) -> Question:
    num_shared = load.shared
    ids = _random_ids(num_shared, seed=99) + _random_ids(load.tokens, seed=100 + index)
    sampling = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True)
    item = WorkItem(
        request_id="profile",
        question_index=index,
        channel_id=index,
        prompt=Prompt(ids=tuple(ids), boundaries=(num_shared,) if num_shared else ()),
        num_shared=num_shared,
        sampling=sampling,
        isolation=IsolationLevel.SHARED if num_shared else IsolationLevel.STRICT,
        max_parallel=64,
        time_budget_ms=3_600_000,
        tenant="",
    )
    return Question(
        sequence_id=index,
        item=item,
        attempt=1,
        published_s=time.monotonic(),
        answer=AnswerText(NoText(), sampling),
        eos_ids=frozenset(),
    )


def _random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = torch.randint(_FIRST_ID, _LAST_ID, (count,), generator=generator).tolist()
    return made


def _empty(precision: str, kind: StepKind) -> Profile:
    lines = [Line(_LABELS[work]) for work in Work]
    return Profile(precision=precision, kind=kind.value, lines=[*lines, Line("Python")])


def _average(profile: Profile, machine: Machine) -> None:
    count = profile.num_steps
    profile.rows /= count
    profile.step_ms /= count
    for work, line in zip([*Work, None], profile.lines, strict=True):
        line.ms, line.gigaops, line.megabytes = line.ms / count, line.gigaops / count, line.megabytes / count
        line.floor_ms = 0.0 if work is None else machine.floor_ms(work, line.gigaops, line.megabytes)


def _table(profile: Profile) -> Table:
    title = f"{profile.precision}, {profile.kind}: {profile.num_steps} steps of {profile.rows:.0f} rows"
    table = Table(title=f"{title}, {profile.step_ms:.1f} ms, {profile.rows_per_s:,.0f} tokens/s")
    for column in ("work", "ms", "of the step", "MB", "GOP", "GOP/s", "floor, ms", "floor / ms"):
        table.add_column(column, justify="left" if column == "work" else "right")
    total = Line("all", profile.step_ms)
    for line in profile.lines:
        total.gigaops += line.gigaops
        total.megabytes += line.megabytes
        total.floor_ms += line.floor_ms
    for line in [*profile.lines, total]:
        if line.ms < 0.0005:
            continue
        table.add_row(
            line.work,
            f"{line.ms:.2f}",
            f"{line.ms / profile.step_ms:.1%}",
            f"{line.megabytes:.1f}" if line.megabytes else "",
            f"{line.gigaops:.2f}" if line.gigaops else "",
            f"{line.gigaops / line.ms * 1e3:.0f}" if line.gigaops else "",
            f"{line.floor_ms:.2f}" if line.floor_ms else "",
            f"{line.floor_ms / line.ms:.0%}" if line.floor_ms else "",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    arguments = _arguments(argv)
    console = Console(width=110)
    path = resolve_model(arguments.model, None, console.print).path
    torch.set_num_threads(arguments.threads)
    load = Load(**{name: getattr(arguments, name) for name in Load.__dataclass_fields__})
    found: list[Profile] = []
    for precision in arguments.precisions:
        model = load_model(path, LoadSettings(precision=precision, max_context=_CONTEXT, backend=None))
        per_core = arguments.gigaops_int8 if precision == "int8" else arguments.gigaops_bf16
        threads = arguments.threads
        machine = Machine(per_core * threads, arguments.gigaops_bf16 * threads, arguments.gigabytes)
        run = Run(model, load)
        run.profiles(machine)
        found += run.profiles(machine)
    for profile in found:
        console.print(_table(profile))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(profile) for profile in found], indent=2) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    load = Load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "int8"], default=["bf16", "int8"])
    parser.add_argument("--questions", type=int, default=load.questions)
    parser.add_argument("--tokens", type=int, default=load.tokens, help="of a question, without the shared ones")
    parser.add_argument("--shared", type=int, default=load.shared, help="tokens before them, common to all questions")
    parser.add_argument("--new-tokens", type=int, default=load.new_tokens)
    parser.add_argument("--prefill-rows", type=int, default=load.prefill_rows)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gigaops-bf16", type=float, default=234.0, help="peak of one core")
    parser.add_argument("--gigaops-int8", type=float, default=468.0, help="peak of one core")
    parser.add_argument("--gigabytes", type=float, default=45.0, help="read per second by all threads")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
