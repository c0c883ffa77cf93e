"""Opens nodes as the configuration says: tokenizer, weights, probe.

Invariants and semantics: takes a model directory that is already on this machine. Blocking; it takes seconds to
minutes. Nodes on the same device share one copy of the weights. Each node is probed by itself, those on equal devices
too: a device may be faulty. Several nodes answer alike bit for bit, or do not serve ``strict``.

Not here: finding the model (``kev.models``), running it (``node``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.cache_dir import cache_root
from common.config import Config
from common.errors import IsolationUnavailableError
from common.model_files import projection_path
from common.ports import Clock
from common.tokenization import Tokenizer
from common.types import IsolationLevel
from inference_svc.attention import Backend
from inference_svc.compiled import keep_compiled_in
from inference_svc.devices import engine_devices, threads_per_core
from inference_svc.equality import differing
from inference_svc.gpus import visible_gpus
from inference_svc.model_loader import LoadedModel, LoadSettings, load_model
from inference_svc.node import Node, NodeSettings
from inference_svc.projection import projection_table

_LOG = logging.getLogger("kev.model")


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A node with what belongs to its model."""

    node: Node
    tokenizer: Tokenizer
    projection: np.ndarray
    """``[V]`` uint32: the table behind ``semantic_hash``."""


@dataclass(frozen=True, slots=True)
class OpenedNodes:
    """The nodes of one process, with what belongs to their model."""

    nodes: tuple[Node, ...]
    tokenizer: Tokenizer
    projection: np.ndarray
    """``[V]`` uint32: the table behind ``semantic_hash``."""


def open_node(path: Path, config: Config, node_id: str, clock: Clock, *, fresh_probe: bool = False) -> OpenedNode:
    """Load the model of a directory on the first device of the configuration, and probe the machine.

    Raises:
        ConfigError: a setting that is not offered.
        ModelError: the model cannot be read or isolated.
        IsolationUnavailableError: the configured level cannot be kept here.
    """
    tokenizer = _tokenizer(path, config)
    device, *_ = engine_devices(config, visible_gpus())
    model = _loaded(path, config, device, config.core.num_threads)
    with _closed_on_error(model):
        settings = _node_settings(config, tokenizer, node_id, config.debug.forward_log)
        node = Node(model, replace(settings, fresh_probe=fresh_probe), clock)
        return OpenedNode(node, tokenizer, _projection(path, model, config))


def open_nodes(path: Path, config: Config, name: str, clock: Clock, *, fresh_probe: bool = False) -> OpenedNodes:
    """Load the model of a directory onto every device of the configuration, and probe each engine core.

    Args:
        path: directory of the model.
        config: says how many cores there are, and where.
        name: begins the node ids, ``<name>-0`` for the first.
        clock: source of time.
        fresh_probe: probe as if no outcome were kept.

    Raises:
        ConfigError: a setting that is not offered, or a device that is not there.
        ModelError: the model cannot be read or isolated.
        IsolationUnavailableError: the configured level cannot be kept here, or not by all devices alike.
    """
    tokenizer = _tokenizer(path, config)
    devices = engine_devices(config, visible_gpus())
    num_threads = threads_per_core(config.core.num_threads, devices, len(os.sched_getaffinity(0)))
    models: dict[str, LoadedModel] = {}
    nodes: list[Node] = []
    for index, device in enumerate(devices):
        if device not in models:
            models[device] = _loaded(path, config, device, num_threads)
        node_id = f"{name}-{index}" if len(devices) == 1 else f"{name}-{index}-{device}"
        forward_log = config.debug.forward_log + (f".{node_id}" if config.debug.forward_log and index else "")
        with _closed_on_error(models[device]):
            settings = _node_settings(config, tokenizer, node_id, forward_log)
            nodes.append(Node(models[device], replace(settings, fresh_probe=fresh_probe), clock))
        if len(devices) > 1:
            _LOG.info("engine core %d of %d is ready on %s", index + 1, len(devices), device)
    _require_equal(nodes, devices, config.isolation.level)
    return OpenedNodes(tuple(nodes), tokenizer, _projection(path, nodes[0].model, config))


@contextmanager
def _closed_on_error(model: LoadedModel) -> Iterator[None]:
    """Leave no process of the model behind when it cannot be used."""
    try:
        yield
    except BaseException:
        model.close()
        raise


def _require_equal(nodes: list[Node], devices: tuple[str, ...], level: IsolationLevel) -> None:
    others = sorted({devices[index] for index in differing([node.bench for node in nodes])})
    if not others:
        return
    message = f"the same question gets other bits on {', '.join(others)} than on {devices[0]}"
    if level is IsolationLevel.STRICT:
        way_out = "name equal devices in deploy.devices, or set isolation.level to loose or shared"
        raise IsolationUnavailableError(f"isolation strict cannot be kept here: {message}; {way_out}")
    _LOG.warning("%s; an answer depends on the device that gives it", message)


def _tokenizer(path: Path, config: Config) -> Tokenizer:
    return Tokenizer.from_dir(
        path, prompt_template=config.core.prompt_template, knowledge_prefix=config.isolation.knowledge_prefix
    )


def _projection(path: Path, model: LoadedModel, config: Config) -> np.ndarray:
    """The table that a node has left beside the model, else a new one, which takes about a second."""
    with suppress(OSError, ValueError):
        kept = np.load(projection_path(path, config), mmap_mode="r", allow_pickle=False)
        if kept.shape == (model.vocab_size,):
            return np.asarray(kept)
    return projection_table(model, config.router.semantic_planes, config.router.hash_key)


def _loaded(path: Path, config: Config, device: str, num_threads: int) -> LoadedModel:
    model = load_model(path, _load_settings(config, device, num_threads))
    if not config.core.compile:
        return model
    from inference_svc.compile_model import compiled

    keep_compiled_in(cache_root(config.core.cache_dir or None, os.environ) / "compiled")
    shapes = model.shapes(config.router.max_parallel_queries, config.core.prefill_rows, config.core.segment_tokens)
    return compiled(model, shapes)


def _load_settings(config: Config, device: str, num_threads: int) -> LoadSettings:
    core = config.core
    return LoadSettings(
        precision=core.precision,
        max_context=core.max_context,
        backend=None if core.backend == "auto" else Backend(core.backend),
        device=device,
        num_threads=num_threads,
        tensor_parallel=core.tensor_parallel,
        image_dir=cache_root(core.cache_dir or None, os.environ) / "packed" if core.keep_packed else None,
    )


def _node_settings(config: Config, tokenizer: Tokenizer, node_id: str, forward_log: str) -> NodeSettings:
    core, isolation = config.core, config.isolation
    return NodeSettings(
        node_id=node_id,
        max_slots=config.router.max_parallel_queries,
        prefill_rows=core.prefill_rows,
        segment_tokens=core.segment_tokens,
        kv_cache_bytes=core.kv_cache_bytes,
        prefix_cache_bytes=core.prefix_cache_bytes,
        kv_cache=isolation.kv_cache,
        level=isolation.level,
        forward_log=forward_log,
        probe_dir=cache_root(core.cache_dir or None, os.environ) / "probes",
        replay_rate=isolation.replay_rate,
        eos_ids=tokenizer.eos_ids,
    )
