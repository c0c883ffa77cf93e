"""A node: model, KV cache, scheduler and engine thread put together, with its isolation report.

Invariants and semantics: a node is built once, probed before it serves (shortly, where the whole probe has passed on
this machine with this build before) and closed once; after its thread has ended by itself it may be renewed. It *fails
closed*: where the probe fails or the backend cannot keep bits, levels are reported as unverified and ``strict`` is
refused.

Not here: leases and streams (``worker``), loading weights (``model_loader``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.errors import ConfigError, IsolationUnavailableError
from common.ports import Clock
from common.types import ChannelEvent, IsolationLevel, IsolationReport, KVCacheMode, NodeStats, Verdict
from inference_svc.attention import Backend
from inference_svc.engine_core import EngineCore, EngineThread, Runner
from inference_svc.kv_cache import KVCache
from inference_svc.mask_summary import ForwardLog
from inference_svc.model_loader import LoadedModel
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import ForwardShapes
from inference_svc.probe import Bench, ProbeReport, probe_isolation, recheck_isolation
from inference_svc.probe_cache import ProbeCache, probe_facts
from inference_svc.replay import Replayer
from inference_svc.sampler import Sampler
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.slots import KVLedger

_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How a node is laid out."""

    node_id: str
    max_slots: int
    prefill_rows: int = 128
    segment_tokens: int = 64
    kv_cache_bytes: int = 0
    """Budget of the KV arena; 0 = room for ``max_slots`` full contexts."""
    prefix_cache_bytes: int = 0
    """KV beyond which unused prefixes go although there is room; 0 keeps them until room is needed."""
    kv_cache: KVCacheMode = KVCacheMode.SPLIT
    level: IsolationLevel = IsolationLevel.STRICT
    """Default level of the deployment; a node that cannot keep it does not start."""
    forward_log: str = ""
    probe_dir: Path | None = None
    """Where green outcomes of the probe are kept for the next start; None: nowhere."""
    fresh_probe: bool = False
    """Probe as if nothing were kept."""
    replay_rate: float = 0.0
    """Share of the answers that are computed again, alone."""
    eos_ids: frozenset[int] = frozenset()


class Node:
    """One engine with everything it owns."""

    def __init__(self, model: LoadedModel, settings: NodeSettings, clock: Clock) -> None:
        """Lay out the KV arena and probe the machine.

        Raises:
            ConfigError: the KV budget does not hold a single position.
            IsolationUnavailableError: the deployment's level cannot be kept here.
        """
        self.model = model
        self.device = str(model.device)
        self.restartable = model.ranks is None
        """Whether ``renew`` may help: the parts of a spread model cannot do without each other."""
        self._settings = settings
        self._clock = clock
        self._shapes = model.shapes(settings.max_slots, settings.prefill_rows, settings.segment_tokens)
        self._forward_log = ForwardLog(settings.forward_log)
        self._lay_out()
        probe, cached_at = _probed(self.bench, model, settings, clock)
        self.report = _report(model, self._shapes, probe, cached_at)
        verdict = dict(self.report.levels)[settings.level]
        if settings.level is IsolationLevel.STRICT and verdict is not Verdict.BITWISE:
            raise IsolationUnavailableError(self.report.reason)
        self._open_books()
        self.thread: EngineThread | None = None

    def renew(self) -> None:
        """Make everything anew over the same weights: the engine thread has ended by itself, so its books may be wrong.

        Blocking.

        Raises:
            IsolationUnavailableError: isolation was kept here before, and is no more.
            KevError: the model cannot run at all any more.
        """
        self._lay_out()
        if not self.report.strict_refusal and not recheck_isolation(self.bench):
            raise IsolationUnavailableError(
                f"after its restart a question on {self.device} gets other bits in company than alone; run kev verify"
            )
        self._open_books()

    def _lay_out(self) -> None:
        """An empty arena, and a forward over it."""
        model, settings = self.model, self._settings
        alignment = model.alignment_positions
        num_positions = model.geometry.num_positions(
            settings.kv_cache_bytes, settings.max_slots, model.max_context, alignment
        )
        if num_positions <= 0:
            needed = model.geometry.position_bytes * alignment
            raise ConfigError(
                f"core.kv_cache_bytes {settings.kv_cache_bytes} holds no position; at least {needed} needed"
            )
        self.ledger = KVLedger(num_positions, alignment)
        self.cache = KVCache(model.geometry, num_positions, model.dtype, model.device)
        self._forward = model.forward_over(self.cache, self._shapes)
        quiet = ModelRunner(self._forward, self.ledger, Sampler(settings.eos_ids), ForwardLog())
        self.bench = Bench(
            quiet, self.cache, self.ledger, self._shapes, settings.max_slots, model.max_context, model.vocab_size
        )

    def _open_books(self) -> None:
        """Scheduler, runner and replays, with nothing in them."""
        model, settings, clock = self.model, self._settings, self._clock
        scheduler_settings = SchedulerSettings(
            node_id=settings.node_id,
            max_slots=settings.max_slots,
            shapes=self._shapes,
            max_context=model.max_context,
            reserve_context=settings.kv_cache is KVCacheMode.UNIFIED,
            keep_prefixes=settings.kv_cache is KVCacheMode.SHARED_READONLY,
            max_prefix_positions=_prefix_limit(settings.prefix_cache_bytes, model.geometry.position_bytes),
            fingerprint=model.fingerprint,
            unverified=frozenset(level for level, found in self.report.levels if found is not Verdict.BITWISE),
        )
        self.scheduler = Scheduler(scheduler_settings, self.ledger, clock, self.cache.scrub)
        self.runner = ModelRunner(self._forward, self.ledger, Sampler(settings.eos_ids), self._forward_log)
        self._replayer: Replayer | None = None
        if settings.replay_rate:
            self._replayer = Replayer(
                settings.replay_rate, self.runner, self.ledger, scheduler_settings, clock, self.cache.scrub
            )

    def start(
        self, on_events: Callable[[list[ChannelEvent]], None], watch: Callable[[Runner], Runner] | None = None
    ) -> EngineThread:
        """Start the engine thread; ``watch`` may put something in front of the runner."""
        runner = self.runner if watch is None else watch(self.runner)
        self.thread = EngineThread(EngineCore(self.scheduler, runner, self._replayer), on_events)
        self.thread.start()
        if self.model.ranks is not None:
            self.model.ranks.watch(self.thread.fail)
        return self.thread

    def stats(self) -> NodeStats:
        """Counters and gauges; read without a lock, so they may be a step apart."""
        scheduler = self.scheduler
        position_bytes = self.model.geometry.position_bytes
        return NodeStats(
            node_id=self._settings.node_id,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_slots=self._settings.max_slots,
            num_steps=scheduler.num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_completion_tokens=scheduler.num_completion_tokens,
            kv_bytes_used=self.ledger.num_held * position_bytes,
            kv_bytes_total=self.ledger.num_positions * position_bytes,
            num_prefixes=scheduler.num_prefixes,
            num_replayed=0 if self._replayer is None else self._replayer.num_replayed,
            num_skipped_replays=0 if self._replayer is None else self._replayer.num_skipped,
            num_violations=0 if self._replayer is None else self._replayer.num_violations,
            alive=self.thread is not None and self.thread.alive,
        )

    def close(self) -> None:
        """Stop the thread, close the log and end other processes of the model."""
        if self.thread is not None:
            self.thread.stop(_STOP_TIMEOUT_S)
        self._forward_log.close()
        self.model.close()


def _prefix_limit(prefix_cache_bytes: int, position_bytes: int) -> int | None:
    return prefix_cache_bytes // position_bytes if prefix_cache_bytes else None


def _probed(bench: Bench, model: LoadedModel, settings: NodeSettings, clock: Clock) -> tuple[ProbeReport, float | None]:
    """The probe's outcome, and when an earlier start had it if this one only checked it again."""
    if settings.probe_dir is None:
        return probe_isolation(bench), None
    kept = ProbeCache(settings.probe_dir, probe_facts(model, bench.shapes, settings.max_slots))
    passed_at = None if settings.fresh_probe else kept.passed_at()
    if passed_at is not None and recheck_isolation(bench):
        return ProbeReport(row_independent=True, position_independent=True, prefix_independent=True), passed_at
    probe = probe_isolation(bench)
    if passed_at is not None:  # bits that differ now and then are no grounds for a promise, whatever this run says
        probe = replace(probe, row_independent=False)
    if probe.passed:
        kept.keep(clock.time())
    else:
        kept.forget()
    return probe, None


def _report(
    model: LoadedModel, shapes: ForwardShapes, probe: ProbeReport, probe_cached_at: float | None
) -> IsolationReport:
    broken = ""
    if model.backend is Backend.REFERENCE:
        broken = "the reference backend mixes questions in one kernel call; strict needs core.backend: cpu"
    elif not probe.keeps_strict:
        broken = (
            f"on this machine {probe.culprit} a question's bits in {model.precision}; set core.precision to another "
            "type, or isolation.level to loose or shared to run without the bitwise promise"
        )
    apart = "" if probe.passed else f"on this machine {probe.culprit} a question's bits: only strict is promised"
    levels = dict.fromkeys(IsolationLevel, Verdict.UNVERIFIED if broken or apart else Verdict.BITWISE)
    if not broken:  # shares nothing
        levels[IsolationLevel.STRICT] = Verdict.BITWISE
    return IsolationReport(
        levels=tuple(levels.items()),
        backend=model.backend.value,
        precision=model.precision,
        num_threads=torch.get_num_threads(),
        decode_rows=shapes.decode_rows,
        prefill_rows=shapes.prefill_rows,
        row_independent=probe.row_independent,
        position_independent=probe.position_independent,
        prefix_independent=probe.prefix_independent,
        fingerprint=model.fingerprint,
        reason=broken or apart,
        probe_cached_at=probe_cached_at,
    )
