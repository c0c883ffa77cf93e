"""Fakes that ship with Kev: an engine that answers from a script, without a model and without torch.

Invariants and semantics: everything but the model is real: validation, router, streams, scheduler, ledger, worker,
aggregator.

Not here: the fakes themselves (``inference_svc.scripted``, ``common.byte_tokenizer``, ``common.clock``).
"""

from __future__ import annotations

from collections.abc import Mapping

from common.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer, encode, save_byte_tokenizer
from common.clock import ManualClock, SystemClock
from common.config import load_config
from common.ports import Clock
from inference_svc.scripted import Script, ScriptedNode, ScriptedRunner
from kev.engine import AsyncEngine
from kev.parts import EngineParts

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
    return AsyncEngine(loaded, EngineParts(byte_tokenizer(), (node,)), clock)
