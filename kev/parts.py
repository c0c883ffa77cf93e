"""What an engine is made of and takes long to make: tokenizer and nodes.

Not here: putting it together (``kev.tiers``), loading weights (``inference_svc.loading``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.config import Config
from common.ports import Clock
from common.tokenization import Tokenizer
from common.types import ChannelEvent, IsolationReport, NodeStats, Verdict
from inference_svc.engine_core import EngineThread, Runner

_NODE_NAME = "embedded"


class EmbeddedNode(Protocol):
    """What an engine needs of an inference node (``inference_svc.node.Node``; ``kev.testing.ScriptedNode``)."""

    report: IsolationReport
    device: str
    restartable: bool
    """Whether ``renew`` may help after its thread has ended by itself."""

    def renew(self) -> None:
        """Make everything but the weights anew, and see that isolation holds; before it starts again. Blocking.

        Raises:
            KevError: it cannot run any more.
        """
        ...

    def start(
        self, on_events: Callable[[list[ChannelEvent]], None], watch: Callable[[Runner], Runner] | None = None
    ) -> EngineThread:
        """Start the engine thread; ``watch`` may put something in front of the runner."""
        ...

    def stats(self) -> NodeStats:
        """Counters and gauges."""
        ...

    def close(self) -> None:
        """Stop the thread."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Tokenizer and nodes of one engine."""

    tokenizer: Tokenizer
    nodes: tuple[EmbeddedNode, ...]
    """One per engine core."""
    projection: np.ndarray | None = None
    """``[V]`` uint32, the table behind ``semantic_hash``; None falls back to a lexical hash."""
    max_context: int | None = None
    """Positions of one channel when the model allows fewer than the configuration."""

    @property
    def report(self) -> IsolationReport:
        """What every node can promise: the report of one that can promise least."""
        return least([node.report for node in self.nodes])

    def max_context_under(self, config: Config) -> int:
        """Positions of one channel."""
        return config.core.max_context if self.max_context is None else self.max_context


def least(reports: Sequence[IsolationReport]) -> IsolationReport:
    """The report that promises the fewest levels, or has a reason why it might promise less."""

    def promises(report: IsolationReport) -> tuple[int, bool]:
        return sum(verdict is Verdict.BITWISE for _, verdict in report.levels), not report.reason

    return min(reports, key=promises)


def load_parts(config: Config, clock: Clock, progress: Callable[[str], None]) -> EngineParts:
    """Resolve and load the model of a configuration, and probe the machine.

    Raises:
        ConfigError: a setting this form does not offer.
        ModelError: the model cannot be found, read or isolated.
        IsolationUnavailableError: the configured level cannot be kept here.
    """
    from inference_svc.loading import open_nodes
    from kev.models import resolve_model

    resolved = resolve_model(config.core.model_path, config.core.cache_dir or None, progress)
    if resolved.license:
        progress(resolved.license)
    opened = open_nodes(resolved.path, config, _NODE_NAME, clock)
    return EngineParts(opened.tokenizer, opened.nodes, opened.projection, opened.nodes[0].model.max_context)
