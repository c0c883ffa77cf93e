"""Fakes that ship with Kev: an engine that answers from a script, without a model and without torch.

Invariants and semantics: everything but the model is real: validation, router, streams, scheduler, ledger, worker,
aggregator. The scripted "model" speaks bytes: token id = byte + 3, 0 pads, 1 begins, 2 ends an answer.

Not here: speed; a script takes as long as its steps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from common.clock import ManualClock, SystemClock
from common.config import Config, load_config
from common.ports import Clock
from common.tokenization import Tokenizer
from common.types import ChannelEvent, IsolationLevel, IsolationReport, NodeStats, Verdict
from inference_svc.engine_core import EngineCore, EngineThread
from inference_svc.plan import ForwardShapes, Segment, StepOutput, StepPlan
from inference_svc.sampled import SampledToken
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.slots import KVLedger
from kev.engine import AsyncEngine, EngineParts

__all__ = [
    "EOS_ID",
    "VOCAB_SIZE",
    "ManualClock",
    "ScriptedNode",
    "ScriptedRunner",
    "byte_tokenizer",
    "encode",
    "save_byte_tokenizer",
    "scripted_engine",
]

EOS_ID = 2
_OFFSET = 3
VOCAB_SIZE = 256 + _OFFSET
"""Tokens of the scripted model."""

Script = Callable[[str], str]
"""From the rendered prompt to the answer."""


def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text in the scripted model's vocabulary."""
    return tuple(byte + _OFFSET for byte in text.encode())


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with one token per byte, BOS 1 and EOS 2."""
    with tempfile.TemporaryDirectory() as folder:
        save_byte_tokenizer(Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "vocab_size": VOCAB_SIZE}))
        return Tokenizer.from_dir(folder, prompt_template="{question}")


def save_byte_tokenizer(path: Path) -> None:
    """Write the files of that tokenizer into a model directory."""
    pieces = {"<pad>": 0, "<bos>": 1, "<eos>": EOS_ID}
    pieces |= {character: byte + _OFFSET for byte, character in enumerate(_byte_characters())}
    library = tokenizers.Tokenizer(models.BPE(vocab=pieces, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    library.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class ScriptedRunner:
    """Answers every question by a script, one byte per step, then EOS."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._answers: dict[int, tuple[int, ...]] = {}
        self._num_given: dict[int, int] = {}
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        """One token for every question that wants one."""
        self.num_steps += 1
        wanted = [segment for segment in plan.segments if segment.sampling is not None]
        return StepOutput(tokens={segment.sequence_id: self._next(segment) for segment in wanted})

    def _next(self, segment: Segment) -> SampledToken:
        if segment.sequence_id not in self._answers:
            prompt = bytes(token_id - _OFFSET for token_id in segment.prompt_ids if token_id >= _OFFSET)
            self._answers[segment.sequence_id] = (*encode(self._script(prompt.decode())), EOS_ID)
        given = self._num_given.get(segment.sequence_id, 0)
        self._num_given[segment.sequence_id] = given + 1
        answer = self._answers[segment.sequence_id]
        return SampledToken(answer[min(given, len(answer) - 1)], None)


class ScriptedNode:
    """An inference node whose forward is a script."""

    def __init__(self, config: Config, runner: ScriptedRunner, clock: Clock) -> None:
        slots = config.router.max_parallel_queries
        shapes = ForwardShapes.of(slots, config.core.prefill_rows, config.core.segment_tokens)
        settings = SchedulerSettings(
            node_id="scripted-0",
            max_slots=slots,
            shapes=shapes,
            max_context=config.core.max_context,
            verdict=Verdict.BITWISE,
        )
        self.ledger = KVLedger(slots * config.core.max_context)
        self._max_slots = slots
        self._scheduler = Scheduler(settings, self.ledger, clock, lambda extent: None)
        self._core = EngineCore(self._scheduler, runner)
        self._thread: EngineThread | None = None
        self.report = IsolationReport(
            levels=tuple((level, Verdict.BITWISE) for level in IsolationLevel),
            backend="scripted",
            precision="none",
            num_threads=1,
            decode_rows=shapes.decode_rows,
            prefill_rows=shapes.prefill_rows,
            row_independent=True,
            position_independent=True,
            fingerprint="scripted",
        )

    def start(self, on_events: Callable[[list[ChannelEvent]], None]) -> EngineThread:
        """Start the engine thread."""
        self._thread = EngineThread(self._core, on_events)
        self._thread.start()
        return self._thread

    def stats(self) -> NodeStats:
        """Counters and gauges; bytes are positions."""
        scheduler = self._scheduler
        return NodeStats(
            node_id="scripted-0",
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_slots=self._max_slots,
            num_steps=scheduler.num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_completion_tokens=scheduler.num_completion_tokens,
            kv_bytes_used=self.ledger.num_held,
            kv_bytes_total=self.ledger.num_positions,
            num_prefixes=scheduler.num_prefixes,
            alive=self._thread is not None and self._thread.alive,
        )

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.stop(5.0)


def scripted_engine(
    script: Script,
    config: Mapping[str, object] | None = None,
    *,
    clock: Clock | None = None,
    runner: ScriptedRunner | None = None,
) -> AsyncEngine:
    """An engine whose answers come from ``script``.

    Args:
        script: from the rendered prompt to the answer.
        config: content of a ``kev.yaml``; None for the defaults.
        clock: time of everything but sleeping; None for the system's.
        runner: a runner of your own; ``script`` is not used then.

    Raises:
        ConfigError: the configuration is wrong.
    """
    loaded = load_config(config or {"kev": {}}, env={})
    clock = clock or SystemClock()
    node = ScriptedNode(loaded, runner or ScriptedRunner(script), clock)
    return AsyncEngine(loaded, EngineParts(byte_tokenizer(), node), clock)
