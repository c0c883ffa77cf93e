"""Domain values that cross between rooms.

Invariants and semantics: every value here is immutable and holds plain Python data only (no tensors, no protobuf, no
clock). Counts start with ``num_``, limits with ``max_``, durations end in ``_ms`` or ``_s``, positions in ``_index``.
Token positions count from 0 inside one question; times of day are Unix seconds (``float``, UTC).

Not here: validation of what a user sent (``common.request``), the wire form (``common.codec``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class IsolationLevel(StrEnum):
    """What channels may share. All levels give equal bits; they differ in where prefix KV is stored."""

    STRICT = "strict"
    """Nothing is shared: a common prefix is computed and stored once per channel."""
    LOOSE = "loose"
    """The operator's knowledge prefix is stored once, read-only; everything else is private."""
    SHARED = "shared"
    """The caller's common prefix (system prompt) is stored once as well, within one tenant."""


class KVCacheMode(StrEnum):
    """How KV positions are reserved for a channel."""

    SPLIT = "split"
    """Exactly prompt + max_tokens positions; a shared prefix lives as long as a question uses it."""
    SHARED_READONLY = "shared_readonly"
    """As split, and read-only prefixes are kept for later requests until their room is needed."""
    UNIFIED = "unified"
    """max_context positions per slot, whatever the question needs."""


class Strategy(StrEnum):
    """How the router picks a channel for a question."""

    SEMANTIC_HASH = "semantic_hash"
    ROUND_ROBIN = "round_robin"
    LENGTH_AWARE = "length_aware"
    CONSISTENT_HASH = "consistent_hash"
    PREBUCKET = "prebucket"


DEFAULT_CLASS = "default"
"""Class of the questions that are of no other (strategy ``prebucket``)."""


class OverflowPolicy(StrEnum):
    """What happens to a question whose channel has no room."""

    WAIT = "wait"
    """The submit call waits its turn (back-pressure, first come first served)."""
    QUEUE = "queue"
    """The question goes to one bounded overflow queue, drained in order; a full queue refuses."""
    REJECT = "reject"
    """The whole request is refused at once with a retry-after."""


class Durability(StrEnum):
    """What the store must keep when it crashes; less than that is refused at the start."""

    MEMORY = "memory"
    """Nothing: what it loses of requests that somebody waits for is registered and published again."""
    AOF = "aof"
    """All but the last second or two: an append-only file that is synced every second."""
    DURABLE = "durable"
    """Everything it has acknowledged: an append-only file that is synced before every reply."""


class Diversion(StrEnum):
    """Why a question is not on the channel that its strategy picked first."""

    QUEUE_LENGTH = "queue_length"
    """The channel had too many outstanding questions beside the shortest one."""
    FULL = "full"
    """The channel had no room."""
    AGE = "age"
    """The channel's oldest outstanding question was too old."""
    FAILURES = "failures"
    """Too many of the channel's latest questions failed."""
    SHARE = "share"
    """The channel had more than its share of the latest questions."""
    WAITED = "waited"
    """The question waited for a place, and found it on another channel."""


class BreakerState(StrEnum):
    """What the breaker of a channel does with new questions."""

    CLOSED = "closed"
    """Lets them in."""
    OPEN = "open"
    """Sends them to other channels."""
    HALF_OPEN = "half_open"
    """Lets one in, to see whether it succeeds."""


class AggregateMode(StrEnum):
    """In which order the results of a request are returned."""

    SLOT_MAP = "slot_map"
    """Question order, whatever finishes first."""
    SEQ_APPEND = "seq_append"
    """Completion order."""
    PRIORITY = "priority"
    """Higher priority first, then completion order."""


class Truncate(StrEnum):
    """Which end of an over-long question may be cut."""

    NONE = "none"
    """Refuse the question with both numbers."""
    LEFT = "left"
    """Drop the oldest tokens of the question."""
    RIGHT = "right"
    """Drop the newest tokens of the question."""


class NormalizeLevel(StrEnum):
    """How much of a question's wording the router may remove."""

    OFF = "off"
    LIGHT = "light"
    """Repeated punctuation and blanks only."""
    FULL = "full"
    """Also filler words and empty prefixes of Chinese and English."""


class FinishReason(StrEnum):
    """Why a question ended. Exactly one per question."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT_QUEUED = "timeout_queued"
    TIMEOUT_RUNNING = "timeout_running"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    ERROR = "error"


class RequestState(StrEnum):
    """Lifecycle of a request as the aggregator sees it."""

    PENDING = "pending"
    """Accepted; at least one question has no outcome yet."""
    COMPLETE = "complete"
    """Every question was answered."""
    PARTIAL = "partial"
    """Every question has an outcome; some are timeouts, cancellations or errors."""
    FAILED = "failed"
    """Every question has an outcome; none is an answer."""


class Verdict(StrEnum):
    """What is known about the isolation of one answer."""

    BITWISE = "bitwise"
    """The probe of this machine, model and shapes passed: equal, bit for bit, to the question alone."""
    UNVERIFIED = "unverified"
    """No probe has passed for this answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one question's tokens are chosen and when it stops. Values are already validated.

    ``temperature`` 0 is greedy. ``seed`` is the channel's own seed; its random numbers depend on nothing else.
    """

    max_tokens: int = 64
    """Most tokens to generate, at least 1."""
    temperature: float = 0.0
    """0 = greedy; at most 100."""
    top_p: float = 1.0
    """Nucleus: smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the best one, in [0, 1]."""
    seed: int = 0
    """Seed of this channel's generator, 0 to 2^63 - 1."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the answer is cut before the earliest one."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Keep going past the model's end-of-sequence tokens."""
    min_tokens: int = 0
    """End-of-sequence and stops are not honoured before this many tokens."""
    logprobs: int | None = None
    """Also return the log-probabilities of this many most likely tokens per position (0 = the chosen one only)."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens already in prompt or answer; 1 = off. Source: Keskar 2019, CTRL, sec. 4.1."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens already generated, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logits of tokens already generated, -2 to 2."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question as a caller writes it; ``None`` means the request's or the configuration's default.

    Fields are checked when the question is submitted, so that an error can name its index.
    """

    text: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    timeout_ms: int | None = None
    priority: int | None = None
    category: str | None = None
    truncate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSpec:
    """One validated question, every default filled in."""

    text: str
    sampling: SamplingParams
    timeout_ms: int
    """Time budget from acceptance to outcome."""
    priority: int = 0
    category: str = ""
    truncate: Truncate = Truncate.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One validated request: what ``submit`` hands to the router."""

    request_id: str
    questions: tuple[QuestionSpec, ...]
    isolation: IsolationLevel
    strategy: Strategy
    mode: AggregateMode
    max_parallel: int
    """Most questions of this request in one forward."""
    system_prompt: str = ""
    tenant: str = ""
    content_digest: str = ""
    """SHA-256 of the caller's content: the same id with another digest is a conflict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of one question, with the places where a reusable prefix ends."""

    ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    """Ascending token counts at which a prefix ends (knowledge, then system prompt). Prefill is always cut there."""
    num_truncated: int = 0
    """Tokens of the question that were cut off because ``truncate`` asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the router sent a question and why; kept for the audit."""

    channel_id: int
    strategy: Strategy
    hash_bucket: int
    """Bucket of the strategy's hash; for strategies without one, the channel id."""
    diverted_from: int | None = None
    """Channel the strategy had picked, when the breaker sent the question elsewhere."""
    normalized_text: str = ""
    removed: tuple[str, ...] = ()
    """Pieces that normalization removed, in order."""
    diverted_why: Diversion | None = None
    """Why the breaker did; None when it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One question on its way from router to inference node."""

    request_id: str
    question_index: int
    channel_id: int
    prompt: Prompt
    num_shared: int
    """Leading tokens whose KV may be stored once for the tenant; 0 in strict, else one of ``prompt.boundaries``."""
    sampling: SamplingParams
    isolation: IsolationLevel
    max_parallel: int
    time_budget_ms: int
    """Counts from the moment the item was published; the transport's clock measures it."""
    priority: int = 0
    tenant: str = ""
    fingerprint: str = ""
    """Model and tokenizer the ids belong to; a node with another one hands the item back."""

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, question_index): identifies the question everywhere."""
        return self.request_id, self.question_index


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error as data: travels inside results."""

    reason: str
    """UPPER_SNAKE_CASE from ``common.errors``."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one generated token, from the model's own distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token_id, logprob) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Isolation receipt of one answer."""

    level: IsolationLevel
    verdict: Verdict
    mask_digest: str = ""
    """SHA-256 over what this question's rows could see, in its own positions: equal alone and in company."""
    fingerprint: str = ""
    """Model, tokenizer and kernels that produced the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStarted:
    """A node gave the question a slot."""

    request_id: str
    question_index: int
    channel_id: int
    slot: int
    attempt: int
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDelta:
    """New text of one question. ``seq`` counts from 0 within an attempt, without gaps."""

    request_id: str
    question_index: int
    channel_id: int
    attempt: int
    seq: int
    text: str
    num_tokens: int
    """Tokens generated so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelResult:
    """The terminal outcome of one question, as a node (or the collector, for placeholders) produces it."""

    request_id: str
    question_index: int
    channel_id: int
    finish_reason: FinishReason
    slot: int = -1
    """Slot it ran in; -1 if it never ran."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_truncated: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from a shared prefix instead of computed."""
    queued_ms: float = 0.0
    """From publication to the first forward."""
    first_token_ms: float | None = None
    """From publication to the first token."""
    started_at: float | None = None
    finished_at: float = 0.0
    attempt: int = 1
    node_id: str = ""
    receipt: Receipt | None = None
    error: ErrorInfo | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, question_index)."""
        return self.request_id, self.question_index


ChannelEvent = ChannelStarted | ChannelDelta | ChannelResult
"""What a node reports about a question, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRecord:
    """What the aggregator must know about one expected question."""

    question_index: int
    route: Route
    timeout_ms: int
    priority: int = 0
    num_prompt_tokens: int = 0
    num_truncated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A registered request: written by the router before anything is published."""

    request_id: str
    content_digest: str
    mode: AggregateMode
    isolation: IsolationLevel
    questions: tuple[QuestionRecord, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one question with its audit fields: what a caller gets."""

    request_id: str
    question_index: int
    channel_id: int
    slot: int
    text: str
    finish_reason: FinishReason
    tokens: int
    """Completion tokens."""
    prompt_tokens: int
    elapsed_ms: int
    """From acceptance to outcome, waiting included."""
    queued_ms: int
    first_token_ms: int | None
    started_at: float | None
    finished_at: float
    hash_bucket: int
    strategy: Strategy
    attempt: int
    node_id: str
    isolation: Receipt
    error: ErrorInfo | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    num_truncated: int = 0
    num_cached_tokens: int = 0
    diverted_from: int | None = None
    removed: tuple[str, ...] = ()
    """What normalization removed from the question."""
    priority: int = 0
    diverted_why: Diversion | None = None
    """Why the question is not on the channel ``diverted_from``; None when it is on the one first picked."""


class StreamEventType(StrEnum):
    """Kind of a stream event."""

    STARTED = "started"
    DELTA = "delta"
    ATTEMPT_CHANGED = "attempt_changed"
    RESULT = "result"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One event of a request's stream. ``event_index`` counts from 0 per request, without gaps."""

    type: StreamEventType
    request_id: str
    event_index: int
    question_index: int | None = None
    channel_id: int | None = None
    text: str = ""
    result: Result | None = None
    state: RequestState | None = None
    """Set on ``done``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request as it stands: what ``poll`` returns."""

    request_id: str
    state: RequestState
    mode: AggregateMode
    num_questions: int
    results: tuple[Result, ...]
    """Outcomes there are so far, in the order of ``mode``."""

    @property
    def done(self) -> bool:
        """Every question has its outcome."""
        return self.state is not RequestState.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSnapshot:
    """Occupancy of one channel of the pool."""

    channel_id: int
    num_queued: int
    """Questions placed on the channel that no node has finished, the running one included."""
    num_total: int
    """Questions placed on the channel since start."""
    num_diverted: int
    """Questions the breaker sent elsewhere since start."""
    breaker_open: bool
    """Whether a question that the strategy sends here would go elsewhere now."""
    breaker: BreakerState = BreakerState.CLOSED
    breaker_why: Diversion | None = None
    """Why the breaker is not closed."""
    num_bytes: int = 0
    """Bytes of the questions on the channel, 4 a prompt token."""
    oldest_ms: int = 0
    """For how long the oldest question has been on the channel; 0 without one."""
    num_recent: int = 0
    """Questions placed on the channel in the window of ``RouterStats``."""
    num_recent_tokens: int = 0
    """Of these questions: prompts and ``max_tokens``."""
    num_recent_failures: int = 0
    """Questions of the channel that failed in the breaker's window."""
    main_failure: str = ""
    """The most frequent kind among them: the reason of an error, or of a time-out; empty without one."""


class HotSpotKind(StrEnum):
    """What is hot."""

    BUCKET = "bucket"
    CHANNEL = "channel"


class HeatUnit(StrEnum):
    """What was counted to find it hot."""

    QUESTIONS = "questions"
    TOKENS = "tokens"
    """Of prompts and what answers may have: the load that long questions are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpot:
    """One bucket or channel with far more than its share of the latest questions."""

    kind: HotSpotKind
    channel_id: int
    """The channel; of a bucket, the one that its strategy picks."""
    num_questions: int
    """In the window."""
    share: float
    """Of all questions in the window, 0 to 1."""
    num_tokens: int = 0
    """Of these questions: prompts and ``max_tokens``."""
    token_share: float = 0.0
    """Of all tokens in the window, 0 to 1."""
    hot_by: HeatUnit = HeatUnit.QUESTIONS
    """Which of the two shares makes it hot; questions if both do."""
    remedy: str
    """What an operator can do, in words."""
    strategy: Strategy | None = None
    """Of a bucket."""
    hash_bucket: int | None = None
    """Of a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHeat:
    """How many of the latest questions, and of their tokens, were in one bucket."""

    strategy: Strategy
    hash_bucket: int
    num_questions: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    """Counters of the router since start."""

    num_requests: int
    num_questions: int
    num_rejected: int
    num_overflow: int
    """Questions waiting for a channel right now."""
    num_removed_chars: int
    """Characters that normalization removed."""
    num_saved_tokens: int = 0
    """Prompt tokens that normalization saved."""
    bucket_counts: tuple[tuple[int, int], ...]
    """(hash_bucket, questions) of the most used buckets, most used first."""
    window_ms: int = 0
    """Length of the window that the following are about."""
    num_recent: int = 0
    """Questions accepted in the window."""
    num_recent_tokens: int = 0
    """Of these questions: prompts and ``max_tokens``."""
    bucket_heat: tuple[BucketHeat, ...] = ()
    """The buckets with the largest share of the window's questions or of its tokens, hottest first."""
    hot_spots: tuple[HotSpot, ...] = ()
    """Buckets and channels with far more than their share of the window."""
    releases_per_s: float | None = None
    """Pace at which channels give places back while every one of them has work; None: not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """Counters and gauges of one inference engine, or of several together."""

    node_id: str
    num_running: int
    num_waiting: int
    max_slots: int
    num_steps: int
    num_prompt_tokens: int
    num_completion_tokens: int
    kv_bytes_used: int
    kv_bytes_total: int
    num_prefixes: int
    alive: bool
    num_replayed: int = 0
    """Answers that were computed again, alone (``isolation.replay_rate``)."""
    num_violations: int = 0
    """Of these, the ones that differed."""
    num_skipped_replays: int = 0
    """Answers of the share that went out without it: no room, no time, or it failed by itself."""
    num_restarts: int = 0
    """How often the engine core was started again after it had ended by itself."""

    @classmethod
    def together(cls, nodes: Sequence[NodeStats]) -> NodeStats:
        """The sums of several; alive when one of them is."""
        if len(nodes) == 1:
            return nodes[0]
        return cls(
            node_id=",".join(node.node_id for node in nodes),
            num_running=sum(node.num_running for node in nodes),
            num_waiting=sum(node.num_waiting for node in nodes),
            max_slots=sum(node.max_slots for node in nodes),
            num_steps=sum(node.num_steps for node in nodes),
            num_prompt_tokens=sum(node.num_prompt_tokens for node in nodes),
            num_completion_tokens=sum(node.num_completion_tokens for node in nodes),
            kv_bytes_used=sum(node.kv_bytes_used for node in nodes),
            kv_bytes_total=sum(node.kv_bytes_total for node in nodes),
            num_prefixes=sum(node.num_prefixes for node in nodes),
            num_replayed=sum(node.num_replayed for node in nodes),
            num_violations=sum(node.num_violations for node in nodes),
            num_skipped_replays=sum(node.num_skipped_replays for node in nodes),
            num_restarts=sum(node.num_restarts for node in nodes),
            alive=any(node.alive for node in nodes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """What isolation this process can promise, and on what grounds."""

    levels: tuple[tuple[IsolationLevel, Verdict], ...]
    backend: str
    precision: str
    num_threads: int
    decode_rows: int
    prefill_rows: int
    row_independent: bool
    """Other rows' content never changed a row's bits in the probe."""
    position_independent: bool
    """A row's place in the forward never changed its bits in the probe."""
    prefix_independent: bool
    """A prefix found instead of computed never changed a row's bits in the probe."""
    fingerprint: str
    reason: str = ""
    """Why a level is not promised, and the way out; empty when all are."""
    probe_cached_at: float | None = None
    """When the whole probe passed, seconds since the epoch, if an earlier start ran it; None: it ran at this one."""

    @property
    def strict_refusal(self) -> str:
        """Why level strict is not promised; empty when it is."""
        return "" if dict(self.levels)[IsolationLevel.STRICT] is Verdict.BITWISE else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of router and nodes."""

    router: RouterStats
    node: NodeStats
    """All nodes together."""
    nodes: tuple[NodeStats, ...] = ()
    """Each node: the engine core of a device, or a process of the distributed form."""
