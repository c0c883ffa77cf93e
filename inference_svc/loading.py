"""Opens a node as the configuration says: tokenizer, weights, probe.

Invariants and semantics: takes a model directory that is already on this machine. Blocking; it takes seconds to
minutes.

Not here: finding the model (``kev.models``), running it (``node``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.cache_dir import cache_root
from common.config import Config
from common.ports import Clock
from common.tokenization import Tokenizer
from inference_svc.attention import Backend
from inference_svc.model_loader import LoadSettings, load_model
from inference_svc.node import Node, NodeSettings
from inference_svc.projection import projection_table


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A node with what belongs to its model."""

    node: Node
    tokenizer: Tokenizer
    projection: np.ndarray
    """``[V, planes]`` float32: the table behind ``semantic_hash``."""


def open_node(path: Path, config: Config, node_id: str, clock: Clock) -> OpenedNode:
    """Load the model of a directory and probe the machine.

    Raises:
        ConfigError: a setting that is not offered.
        ModelError: the model cannot be read or isolated.
        IsolationUnavailableError: the configured level cannot be kept here.
    """
    core, router, isolation = config.core, config.router, config.isolation
    tokenizer = Tokenizer.from_dir(
        path, prompt_template=core.prompt_template, knowledge_prefix=isolation.knowledge_prefix
    )
    load_settings = LoadSettings(
        precision=core.precision,
        max_context=core.max_context,
        backend=None if core.backend == "auto" else Backend(core.backend),
        device=core.device,
        num_threads=core.num_threads,
        image_dir=cache_root(core.cache_dir or None, os.environ) / "packed" if core.keep_packed else None,
    )
    model = load_model(path, load_settings)
    settings = NodeSettings(
        node_id=node_id,
        max_slots=router.max_parallel_queries,
        prefill_rows=core.prefill_rows,
        segment_tokens=core.segment_tokens,
        kv_cache_bytes=core.kv_cache_bytes,
        kv_cache=isolation.kv_cache,
        level=isolation.level,
        forward_log=config.debug.forward_log,
        replay_rate=isolation.replay_rate,
        eos_ids=tokenizer.eos_ids,
    )
    projection = projection_table(model, router.semantic_planes, router.hash_key)
    return OpenedNode(Node(model, settings, clock), tokenizer, projection)
