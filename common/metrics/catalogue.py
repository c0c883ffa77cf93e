"""Every metric of Kev: its name, kind, labels and meaning. The only place where names are written.

Invariants and semantics: names start with ``kev_`` and say their unit; a counter ends with ``_total``. Labels come from
small sets: never an id, a text, a tenant or a model. The table in docs/operations.md is made from here, and a test
holds dashboards, alerts and scale rules to it.

Not here: how values are kept (``registry``), where they come from (the rooms' ``metrics`` modules).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a metric's values are."""

    COUNTER = "counter"
    """Only grows, from 0 at the start of the process."""
    GAUGE = "gauge"
    """A reading of the moment."""
    HISTOGRAM = "histogram"
    """Observations in buckets, with their sum and count."""


class Tier(StrEnum):
    """Which process has a metric; the embedded form has those of router, inference, aggregator and gateway."""

    GRPC = "each gRPC service"
    ROUTER = "router"
    INFERENCE = "inference"
    AGGREGATOR = "aggregator"
    GATEWAY = "gateway"


FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets of what should take milliseconds."""
ANSWER_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets of what waits for a model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric; equal only to itself."""

    name: str
    kind: Kind
    tier: Tier
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""
    is_read: bool = False
    """Whether its values are read from somebody who knows them, at every scrape, and not recorded."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which values are read."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def _counter(tier: Tier, name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, tier=tier, meaning=meaning, labels=labels)


def _read_counter(tier: Tier, name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, tier=tier, meaning=meaning, labels=labels, is_read=True)


def _gauge(tier: Tier, name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, tier=tier, meaning=meaning, labels=labels, is_read=True)


def _histogram(tier: Tier, name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = ANSWER_S) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, tier=tier, meaning=meaning, labels=labels, buckets=buckets)


# ---- calls of the gRPC services

GRPC_CALLS = _counter(
    Tier.GRPC,
    "kev_grpc_calls_total",
    "Calls that ended; reason is OK, CANCELLED or the reason of the error.",
    "method",
    "reason",
)
GRPC_SECONDS = _histogram(
    Tier.GRPC, "kev_grpc_call_seconds", "From the arrival of a call to its end.", "method", buckets=FAST_S
)
GRPC_OPEN = _gauge(Tier.GRPC, "kev_grpc_calls_open", "Calls that run; those of StreamResults are streams.", "method")

# ---- router

SUBMISSIONS = _counter(
    Tier.ROUTER,
    "kev_router_submissions_total",
    "Requests that passed the checks; verdict is accepted, abandoned, or the reason of the refusal.",
    "verdict",
)
SUBMIT_SECONDS = _histogram(
    Tier.ROUTER,
    "kev_router_submit_seconds",
    "From the call to the verdict, waiting for room included.",
    "verdict",
    buckets=FAST_S,
)
REQUESTS = _read_counter(
    Tier.ROUTER, "kev_router_requests_total", "Requests registered, joined ones not counted again."
)
QUESTIONS = _read_counter(Tier.ROUTER, "kev_router_questions_total", "Questions of registered requests.")
PUBLICATIONS = _counter(
    Tier.ROUTER,
    "kev_router_publications_total",
    "Questions put on a work stream; outcome is published or the reason of the failure.",
    "outcome",
)
REPUBLICATIONS = _counter(
    Tier.ROUTER, "kev_router_lost_questions_total", "Questions that the store had lost, published again."
)
ROUTED_TOKENS = _counter(Tier.ROUTER, "kev_router_prompt_tokens_total", "Prompt tokens of published questions.")
REMOVED_CHARS = _read_counter(Tier.ROUTER, "kev_router_removed_chars_total", "Characters that normalization removed.")
SAVED_TOKENS = _read_counter(Tier.ROUTER, "kev_router_saved_tokens_total", "Prompt tokens that normalization saved.")
WAITING = _gauge(Tier.ROUTER, "kev_router_questions_waiting", "Questions that wait for a channel.")
IN_FLIGHT = _gauge(
    Tier.ROUTER,
    "kev_router_questions_in_flight",
    "Questions of this router on a channel, published and without an outcome.",
    "channel",
)
DIVERTED = _read_counter(
    Tier.ROUTER, "kev_router_diverted_total", "Questions that the breaker sent to another channel."
)
BREAKERS = _gauge(Tier.ROUTER, "kev_router_breakers_open", "Channels whose breaker diverts questions now.")
BREAKER_STATE = _gauge(
    Tier.ROUTER,
    "kev_router_breaker_state",
    "Breaker of a channel by age and failures: 0 closed, 1 half-open, 2 open.",
    "channel",
)
OLDEST_PLACED = _gauge(
    Tier.ROUTER, "kev_router_oldest_seconds", "Age of the oldest question of this router on a channel; 0 without one."
)
RELEASES = _gauge(
    Tier.ROUTER,
    "kev_router_releases_per_second",
    "Pace at which channels give places back while every one of them has work, behind every Retry-After; 0 while it is "
    "not known.",
)
HEAT_SHARE = _gauge(
    Tier.ROUTER,
    "kev_router_heat_share",
    "Share of the latest questions in the hottest hash buckets, rank 1 being the hottest.",
    "rank",
)
HOT_SPOTS = _gauge(
    Tier.ROUTER, "kev_router_hot_spots", "Hash buckets and channels that are hot spots now; GET /v1/stats names them.",
    "kind",
)  # fmt: skip

# ---- inference node

NODE_ALIVE = _gauge(
    Tier.INFERENCE, "kev_node_alive", "1 while every engine core of the process runs, 0 while loading or dead."
)
NODE_STRICT = _gauge(Tier.INFERENCE, "kev_node_strict", "1 if the probe found that level strict can be kept here.")
SLOTS = _gauge(Tier.INFERENCE, "kev_node_slots", "Slots of the engine.")
SLOTS_USED = _gauge(Tier.INFERENCE, "kev_node_slots_used", "Slots with a question.")
NODE_WAITING = _gauge(Tier.INFERENCE, "kev_node_questions_waiting", "Leased questions without a slot.")
LEASES_HELD = _gauge(Tier.INFERENCE, "kev_node_leases_held", "Leases held.")
LEASES = _counter(
    Tier.INFERENCE,
    "kev_node_leases_total",
    "Leases taken; delivery is first or again (an attempt above 1).",
    "delivery",
)
LEASES_LOST = _counter(
    Tier.INFERENCE, "kev_node_leases_lost_total", "Leases that another node took, found when renewed."
)
HAND_BACKS = _counter(Tier.INFERENCE, "kev_node_hand_backs_total", "Leases given back unstarted.")
COMMITS = _counter(
    Tier.INFERENCE,
    "kev_node_commits_total",
    "Outcomes reported; state is committed, already_committed or stale (refused, the lease was lost).",
    "state",
)
NODE_OUTCOMES = _counter(
    Tier.INFERENCE,
    "kev_node_outcomes_total",
    "Outcomes of this node that were committed; reason is that of the error, or none.",
    "finish_reason",
    "reason",
)
STEP_SECONDS = _histogram(
    Tier.INFERENCE, "kev_node_step_seconds", "Duration of a forward; the count is the number of steps.", "kind",
    buckets=FAST_S,
)  # fmt: skip
TOKENS = _counter(Tier.INFERENCE, "kev_node_tokens_total", "Tokens computed; kind is prefill or decode.", "kind")
QUEUE_SECONDS = _histogram(Tier.INFERENCE, "kev_node_queue_seconds", "From publication to the first forward.")
FIRST_TOKEN_SECONDS = _histogram(Tier.INFERENCE, "kev_node_first_token_seconds", "From publication to the first token.")
QUESTION_SECONDS = _histogram(Tier.INFERENCE, "kev_node_question_seconds", "From publication to the outcome.")
KV_BYTES = _gauge(Tier.INFERENCE, "kev_node_kv_bytes", "Room for KV.")
KV_BYTES_USED = _gauge(Tier.INFERENCE, "kev_node_kv_bytes_used", "KV held by questions and prefixes.")
PREFIXES = _gauge(Tier.INFERENCE, "kev_node_prefixes", "Shared prefixes stored.")
REPLAYS = _read_counter(Tier.INFERENCE, "kev_node_replays_total", "Answers that were computed again, alone.")
SKIPPED_REPLAYS = _read_counter(
    Tier.INFERENCE, "kev_node_replays_skipped_total", "Answers of the share that went out without their replay."
)
VIOLATIONS = _read_counter(
    Tier.INFERENCE, "kev_node_isolation_violations_total", "Replays that gave other bits than the answer in company."
)
RESTARTS = _read_counter(
    Tier.INFERENCE, "kev_node_restarts_total", "Engine cores that had ended by themselves and were started again."
)
LOST_ENTRIES = _read_counter(
    Tier.INFERENCE, "kev_node_lost_entries_total", "Leased entries that somebody else deleted from the store."
)

# ---- aggregator

SETTLED = _counter(
    Tier.AGGREGATOR,
    "kev_aggregator_settled_total",
    "Outcomes that no node gave: time-outs and cancellations settled here. With the nodes' outcomes, all there are.",
    "finish_reason",
    "reason",
)
OUTCOMES = _counter(
    Tier.AGGREGATOR,
    "kev_aggregator_outcomes_total",
    "Outcomes told to those who asked here; a request that is asked for at two aggregators counts at both.",
    "finish_reason",
    "reason",
)
OUTCOME_SECONDS = _histogram(
    Tier.AGGREGATOR, "kev_aggregator_outcome_seconds", "From acceptance to an outcome told here."
)
REPEATED = _counter(
    Tier.AGGREGATOR, "kev_aggregator_repeated_total", "Outcomes told here of a second or later attempt."
)
REFUSED_EVENTS = _read_counter(
    Tier.AGGREGATOR,
    "kev_aggregator_refused_events_total",
    "Events without effect; why is late (a second outcome), unknown (no such request) or malformed.",
    "why",
)
GAPS = _read_counter(
    Tier.AGGREGATOR, "kev_aggregator_gaps_total", "How often events may have been missed, and were looked for again."
)
OPEN_REQUESTS = _gauge(Tier.AGGREGATOR, "kev_aggregator_requests_open", "Requests with an open question.")
KEPT_REQUESTS = _gauge(Tier.AGGREGATOR, "kev_aggregator_requests_kept", "Requests in memory, finished ones included.")

# ---- the store, as the aggregator sees it

STORE_UP = _gauge(Tier.AGGREGATOR, "kev_store_up", "1 if the store answered when these values were read.")
QUEUE_ENTRIES = _gauge(
    Tier.AGGREGATOR,
    "kev_queue_entries",
    "Entries of a channel's work stream, waiting and leased: what KEDA's triggers read.",
    "channel",
)
QUEUE_WAITING = _gauge(Tier.AGGREGATOR, "kev_queue_waiting", "Entries of all work streams that nobody has leased.")
QUEUE_LEASED = _gauge(Tier.AGGREGATOR, "kev_queue_leased", "Entries of all work streams that a node has leased.")
QUEUE_LAG = _gauge(
    Tier.AGGREGATOR, "kev_queue_oldest_seconds", "Age of the oldest entry of all work streams; 0 without one."
)
DEAD_LETTERS = _read_counter(
    Tier.AGGREGATOR, "kev_dead_letters_total", "Entries ever set aside as dead letters, by the store's own count."
)

# ---- gateway

HTTP_REQUESTS = _counter(
    Tier.GATEWAY,
    "kev_http_requests_total",
    "HTTP requests that ended; status 499 is a client that left first.",
    "route",
    "method",
    "status",
)
HTTP_SECONDS = _histogram(
    Tier.GATEWAY, "kev_http_request_seconds", "From the arrival of an HTTP request to the end of its answer.", "route"
)
HTTP_OPEN = _gauge(Tier.GATEWAY, "kev_http_requests_open", "HTTP requests that run.")

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""

LIBRARY_SERIES = frozenset(
    {
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_start_time_seconds",
        "process_open_fds",
        "process_max_fds",
    }
)
"""What every process tells about itself beside Kev's own metrics (Linux)."""
