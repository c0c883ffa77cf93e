"""What a node and a router say about themselves, as protobuf.

Invariants and semantics: see the package.

Not here: what a node says about a question (``common.codec.results``).
"""

from __future__ import annotations

from common.codec.wire import (
    BREAKER_STATE,
    DIVERSION,
    HEAT_UNIT,
    HOT_SPOT_KIND,
    LEVEL,
    STRATEGY,
    VERDICT,
    optional,
    to_duration,
    to_maybe_timestamp,
    to_time_s,
    to_whole_ms,
)
from common.types import (
    BreakerState,
    BucketHeat,
    ChannelSnapshot,
    HeatUnit,
    HotSpot,
    IsolationReport,
    NodeStats,
    RouterStats,
)
from kev.v1 import types_pb2 as pb


def encode_node_stats(value: NodeStats) -> pb.NodeStats:
    """The wire form of a node's counters and gauges."""
    return pb.NodeStats(
        node_id=value.node_id,
        num_running=value.num_running,
        num_waiting=value.num_waiting,
        max_slots=value.max_slots,
        num_steps=value.num_steps,
        num_prompt_tokens=value.num_prompt_tokens,
        num_completion_tokens=value.num_completion_tokens,
        kv_bytes_used=value.kv_bytes_used,
        kv_bytes_total=value.kv_bytes_total,
        num_prefixes=value.num_prefixes,
        num_replayed=value.num_replayed,
        num_violations=value.num_violations,
        num_restarts=value.num_restarts,
        num_skipped_replays=value.num_skipped_replays,
        alive=value.alive,
    )


def decode_node_stats(message: pb.NodeStats) -> NodeStats:
    """A node's counters and gauges."""
    return NodeStats(
        node_id=message.node_id,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        max_slots=message.max_slots,
        num_steps=message.num_steps,
        num_prompt_tokens=message.num_prompt_tokens,
        num_completion_tokens=message.num_completion_tokens,
        kv_bytes_used=message.kv_bytes_used,
        kv_bytes_total=message.kv_bytes_total,
        num_prefixes=message.num_prefixes,
        num_replayed=message.num_replayed,
        num_violations=message.num_violations,
        num_restarts=message.num_restarts,
        num_skipped_replays=message.num_skipped_replays,
        alive=message.alive,
    )


def encode_isolation_report(value: IsolationReport) -> pb.IsolationReport:
    """The wire form of what a process can promise."""
    return pb.IsolationReport(
        levels=[
            pb.LevelVerdict(level=LEVEL.encode(level), verdict=VERDICT.encode(verdict))
            for level, verdict in value.levels
        ],
        backend=value.backend,
        precision=value.precision,
        num_threads=value.num_threads,
        decode_rows=value.decode_rows,
        prefill_rows=value.prefill_rows,
        row_independent=value.row_independent,
        position_independent=value.position_independent,
        prefix_independent=value.prefix_independent,
        fingerprint=value.fingerprint,
        reason=value.reason,
        probe_cache_time=to_maybe_timestamp(value.probe_cached_at),
    )


def decode_isolation_report(message: pb.IsolationReport, path: str = "report") -> IsolationReport:
    """What a process can promise.

    Raises:
        InvalidRequestError: a level or verdict is not known here.
    """
    return IsolationReport(
        levels=tuple(
            (
                LEVEL.decode(entry.level, f"{path}.levels[{i}].level"),
                VERDICT.decode(entry.verdict, f"{path}.levels[{i}].verdict"),
            )
            for i, entry in enumerate(message.levels)
        ),
        backend=message.backend,
        precision=message.precision,
        num_threads=message.num_threads,
        decode_rows=message.decode_rows,
        prefill_rows=message.prefill_rows,
        row_independent=message.row_independent,
        position_independent=message.position_independent,
        prefix_independent=message.prefix_independent,
        fingerprint=message.fingerprint,
        reason=message.reason,
        probe_cached_at=to_time_s(message.probe_cache_time) if message.HasField("probe_cache_time") else None,
    )


def encode_channel_snapshot(value: ChannelSnapshot) -> pb.ChannelSnapshot:
    """The wire form of a channel's occupancy."""
    return pb.ChannelSnapshot(
        channel_id=value.channel_id,
        num_queued=value.num_queued,
        num_total=value.num_total,
        num_diverted=value.num_diverted,
        breaker_open=value.breaker_open,
        breaker=BREAKER_STATE.encode(value.breaker),
        breaker_why=DIVERSION.encode_maybe(value.breaker_why),
        num_bytes=value.num_bytes,
        oldest_duration=to_duration(value.oldest_ms),
        num_recent=value.num_recent,
        num_recent_failures=value.num_recent_failures,
        main_failure=value.main_failure,
        num_recent_tokens=value.num_recent_tokens,
    )


def decode_channel_snapshot(message: pb.ChannelSnapshot) -> ChannelSnapshot:
    """A channel's occupancy."""
    return ChannelSnapshot(
        channel_id=message.channel_id,
        num_queued=message.num_queued,
        num_total=message.num_total,
        num_diverted=message.num_diverted,
        breaker_open=message.breaker_open,
        breaker=BREAKER_STATE.decode_maybe(message.breaker) or BreakerState.CLOSED,
        breaker_why=DIVERSION.decode_maybe(message.breaker_why),
        num_bytes=message.num_bytes,
        oldest_ms=to_whole_ms(message.oldest_duration),
        num_recent=message.num_recent,
        num_recent_failures=message.num_recent_failures,
        main_failure=message.main_failure,
        num_recent_tokens=message.num_recent_tokens,
    )


def encode_router_stats(value: RouterStats) -> pb.RouterStats:
    """The wire form of a router's counters."""
    return pb.RouterStats(
        num_requests=value.num_requests,
        num_questions=value.num_questions,
        num_rejected=value.num_rejected,
        num_overflow=value.num_overflow,
        num_removed_chars=value.num_removed_chars,
        num_saved_tokens=value.num_saved_tokens,
        buckets=[pb.BucketCount(hash_bucket=bucket, num_questions=num) for bucket, num in value.bucket_counts],
        window=to_duration(value.window_ms),
        num_recent=value.num_recent,
        num_recent_tokens=value.num_recent_tokens,
        bucket_heat=[
            pb.BucketHeat(
                strategy=STRATEGY.encode(heat.strategy),
                hash_bucket=heat.hash_bucket,
                num_questions=heat.num_questions,
                num_tokens=heat.num_tokens,
            )
            for heat in value.bucket_heat
        ],
        hot_spots=[_encode_hot_spot(spot) for spot in value.hot_spots],
        releases_per_s=value.releases_per_s,
    )


def _encode_hot_spot(value: HotSpot) -> pb.HotSpot:
    return pb.HotSpot(
        kind=HOT_SPOT_KIND.encode(value.kind),
        channel_id=value.channel_id,
        num_questions=value.num_questions,
        share=value.share,
        remedy=value.remedy,
        strategy=STRATEGY.encode_maybe(value.strategy),
        hash_bucket=value.hash_bucket,
        num_tokens=value.num_tokens,
        token_share=value.token_share,
        hot_by=HEAT_UNIT.encode(value.hot_by),
    )


def _decode_hot_spot(message: pb.HotSpot) -> HotSpot | None:
    kind = HOT_SPOT_KIND.decode_maybe(message.kind)
    if kind is None:
        return None
    return HotSpot(
        kind=kind,
        channel_id=message.channel_id,
        num_questions=message.num_questions,
        share=message.share,
        remedy=message.remedy,
        strategy=STRATEGY.decode_maybe(message.strategy),
        hash_bucket=optional(message, "hash_bucket"),
        num_tokens=message.num_tokens,
        token_share=message.token_share,
        hot_by=HEAT_UNIT.decode_maybe(message.hot_by) or HeatUnit.QUESTIONS,
    )


def decode_router_stats(message: pb.RouterStats) -> RouterStats:
    """A router's counters; hot spots and buckets of a kind that only a newer router knows are left out."""
    return RouterStats(
        num_requests=message.num_requests,
        num_questions=message.num_questions,
        num_rejected=message.num_rejected,
        num_overflow=message.num_overflow,
        num_removed_chars=message.num_removed_chars,
        num_saved_tokens=message.num_saved_tokens,
        bucket_counts=tuple((entry.hash_bucket, entry.num_questions) for entry in message.buckets),
        window_ms=to_whole_ms(message.window),
        num_recent=message.num_recent,
        num_recent_tokens=message.num_recent_tokens,
        bucket_heat=tuple(
            BucketHeat(
                strategy=strategy,
                hash_bucket=heat.hash_bucket,
                num_questions=heat.num_questions,
                num_tokens=heat.num_tokens,
            )
            for heat in message.bucket_heat
            if (strategy := STRATEGY.decode_maybe(heat.strategy)) is not None
        ),
        hot_spots=tuple(spot for entry in message.hot_spots if (spot := _decode_hot_spot(entry)) is not None),
        releases_per_s=optional(message, "releases_per_s"),
    )
