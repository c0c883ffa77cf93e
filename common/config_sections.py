"""The sections of ``kev.yaml``: every field with its default, range and one line of documentation.

Invariants and semantics: values never change; unknown keys, wrong types and NaN are refused; a rule between two fields
of a section is checked here.

Not here: loading and warnings (``common.config``), the fields in words (``common.config_text``).
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from common.config_classes import MAX_CLASSES, PrebucketClass, class_flaws
from common.config_text import Allowed
from common.types import (
    AggregateMode,
    Durability,
    IsolationLevel,
    KVCacheMode,
    NormalizeLevel,
    OverflowPolicy,
    Strategy,
)
from common.wording import shown

_MAX_RING_POINTS = 1 << 20


class DeployMode(StrEnum):
    """Which form of Kev runs."""

    SINGLE = "single"
    """All three tiers in one process."""
    MULTI_GPU = "multi_gpu"
    """All three tiers in one process, one engine core per device."""
    DISTRIBUTED = "distributed"
    """Router, inference nodes and aggregator as services."""


class Precision(StrEnum):
    """Number format of weights and KV."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


class Backend(StrEnum):
    """Implementation of the isolated attention."""

    AUTO = "auto"
    NATIVE = "native"
    CPU = "cpu"
    REFERENCE = "reference"
    FLEX = "flex"


class LogLevel(StrEnum):
    """Least important messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a line of the log looks."""

    TEXT = "text"
    """For people."""
    JSON = "json"
    """One JSON object a line."""


class UnknownCategory(StrEnum):
    """What becomes of a question whose category no class has (strategy prebucket)."""

    REFUSE = "refuse"
    DEFAULT = "default"


_Lax = Strict(strict=False)
"""YAML has neither enums nor tuples: text becomes the member, a list the tuple. Items stay strict."""
_Borders = tuple[Annotated[int, Field(ge=1, le=16_777_216)], ...]
_DEVICE = r"^(cpu|cuda:[0-9]{1,3})$"
_Texts = tuple[Annotated[str, Field(min_length=1)], ...]


def _broken_rule(key: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("broken_rule", "{key}: {message}", {"key": key, "message": message})


class Section(BaseModel):
    """One mapping of the file. The line under a field is its documentation."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class DeployConfig(Section):
    """``kev.deploy``."""

    mode: Annotated[DeployMode, _Lax] = DeployMode.SINGLE
    """Which form runs: all tiers in one process, the same with one engine core per device, or three services."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Engine cores (multi_gpu) or nodes (distributed); 0 is one per device. Mode single has exactly 1."""
    devices: Annotated[
        tuple[Annotated[str, Field(pattern=_DEVICE)], ...],
        _Lax,
        Field(max_length=64),
        Allowed("a list of at most 64 devices, each cpu or cuda:N"),
    ] = ()
    """Where the engine cores of mode multi_gpu run, in turn; empty: on every visible GPU, without one on the CPU."""

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.mode is DeployMode.SINGLE and self.workers > 1:
            message = f"must be 1, got {self.workers}; workers > 1 comes with deploy.mode: distributed or multi_gpu"
            raise _broken_rule("workers", message)
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.devices and self.mode is not DeployMode.MULTI_GPU:
            message = f"are of deploy.mode: multi_gpu, got mode {self.mode}; core.device says where one core runs"
            raise _broken_rule("devices", message)
        if len(set(self.devices)) != len(self.devices):
            raise _broken_rule("devices", f"must name each device once, got {[*self.devices]}; see workers")
        return self


class RouterConfig(Section):
    """``kev.router``."""

    strategy: Annotated[Strategy, _Lax] = Strategy.SEMANTIC_HASH
    """How a question's channel is picked, unless the request says otherwise."""
    max_parallel_queries: int = Field(default=8, ge=1, le=256)
    """Most questions in one forward pass: the number of slots of an engine."""
    channel_pool_size: int = Field(default=16, ge=1, le=4096)
    """Channels in the pool; 1.5 to 2 times max_parallel_queries leaves room for bursts."""
    overflow_policy: Annotated[OverflowPolicy, _Lax] = OverflowPolicy.WAIT
    """When a channel has no room: submit waits, the question goes to the overflow queue, or the request is refused."""
    normalize: Annotated[NormalizeLevel, _Lax] = NormalizeLevel.LIGHT
    """Wording removed before routing: nothing, repeated punctuation and blanks, or also filler words."""
    channel_queue_size: int = Field(default=8, ge=1, le=100_000)
    """Outstanding questions that one channel holds, the running one included."""
    channel_queue_bytes: int = Field(default=33_554_432, ge=1, le=1_099_511_627_776)
    """Bytes (of store memory, or 4 a token) from which on a channel that holds something takes no more."""
    overflow_queue_size: int = Field(default=256, ge=1, le=1_000_000)
    """Questions that the overflow queue holds (overflow_policy: queue)."""
    overflow_queue_bytes: int = Field(default=268_435_456, ge=1, le=1_099_511_627_776)
    """Bytes, 4 a prompt token, of waiting questions from which on no more may wait (overflow_policy: wait, queue)."""
    max_waiting_queries: int = Field(default=65_536, ge=1, le=1_000_000)
    """Questions that all submit calls together may hold back for want of a channel (overflow_policy: wait)."""
    max_wait_ms: int = Field(default=0, ge=0, le=86_400_000)
    """Milliseconds a submit call waits for its first channel (overflow_policy: wait); 0 is its time budget."""
    breaker_queue_length: int = Field(default=1, ge=0, le=100_000)
    """Outstanding questions on a channel from which on a new one is diverted to an idle channel; 0 never diverts."""
    breaker_max_age_ms: int = Field(default=60_000, ge=0, le=86_400_000)
    """Milliseconds the oldest question may be on a channel before new ones are diverted; 0 sets no limit."""
    breaker_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of errors and time-outs in a channel's latest outcomes from which on new ones are diverted; 0 never."""
    breaker_min_outcomes: int = Field(default=20, ge=1, le=1_000_000)
    """Outcomes of a channel in its window before the share of failures counts."""
    breaker_window_ms: int = Field(default=30_000, ge=100, le=86_400_000)
    """Milliseconds of outcomes that breaker_failure_rate looks at."""
    breaker_cooldown_ms: int = Field(default=5_000, ge=0, le=86_400_000)
    """Milliseconds a channel is left alone before one question is sent there to see whether it is well."""
    hot_spot_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the latest questions or tokens that makes a bucket or channel a hot spot (at least 1.5 even shares)."""
    hot_spot_end_share: float = Field(default=0.2, gt=0, le=1)
    """Share under which it is one no more; below hot_spot_share."""
    hot_spot_min_questions: int = Field(default=100, ge=1, le=1_000_000_000)
    """Questions in the window before anything is a hot spot."""
    hot_spot_window_ms: int = Field(default=60_000, ge=100, le=86_400_000)
    """Milliseconds of questions that hot spots and heat are told from."""
    priority_step_ms: int = Field(default=100, ge=0, le=300)
    """Milliseconds of waiting that one step of priority is worth; a question passes none that came longer before it."""
    max_queries_per_request: int = Field(default=256, ge=1, le=65_536)
    """Most questions in one request."""
    max_question_bytes: int = Field(default=262_144, ge=1, le=67_108_864)
    """Longest question, in UTF-8 bytes; checked before it is tokenized."""
    max_system_prompt_bytes: int = Field(default=262_144, ge=1, le=67_108_864)
    """Longest system prompt, in UTF-8 bytes."""
    semantic_planes: int = Field(default=6, ge=1, le=16)
    """Planes of the semantic hash; n planes make 2^n hash buckets."""
    hash_key: str = Field(default="kev", min_length=1, max_length=256)
    """Key of the hashes: with the same key, the same question lands in the same hash bucket everywhere."""
    length_tiers: Annotated[
        _Borders, _Lax, Field(min_length=1, max_length=16), Allowed("a list of 1 to 16 ascending integers above 0")
    ] = (64, 512)
    """Token borders, prefixes not counted, of short and long questions (length_aware); n borders make n + 1 tiers."""
    virtual_nodes: int = Field(default=64, ge=1, le=4096)
    """Points per channel on the ring (strategy consistent_hash)."""
    load_bound: float = Field(default=1.25, gt=1, le=100)
    """Most load of a channel (consistent_hash), and most of the latest questions, as a multiple of the mean."""
    prebucket_classes: Annotated[
        tuple[PrebucketClass, ...],
        _Lax,
        Field(max_length=MAX_CLASSES),
        Allowed(f"a list of at most {MAX_CLASSES} mappings with name, num_channels, categories, patterns"),
    ] = ()
    """Classes of questions with channels of their own (strategy prebucket); all others share what is left."""
    unknown_category: Annotated[UnknownCategory, _Lax] = UnknownCategory.REFUSE
    """What becomes of a question whose category no class has (strategy prebucket): refused, or of class default."""
    max_question_tokens: int = Field(default=0, ge=0, le=16_777_216)
    """Most tokens of one question, prompt and max_tokens together; 0 leaves it to core.max_context."""
    max_request_tokens: int = Field(default=0, ge=0, le=2**40)
    """Most tokens of one request, over the prompts and max_tokens of all its questions; 0 sets no limit."""
    max_tenant_questions: int = Field(default=0, ge=0, le=1_000_000_000)
    """Most questions of one tenant in flight in one router, times the weight of its API key; 0 sets no limit."""
    max_tenant_tokens: int = Field(default=0, ge=0, le=2**40)
    """Most tokens, prompts and max_tokens, of one tenant in flight in one router, times its weight; 0 is no limit."""

    @model_validator(mode="after")
    def _check_length_tiers(self) -> Self:
        tiers = self.length_tiers
        if any(low >= high for low, high in pairwise(tiers)):
            raise _broken_rule("length_tiers", f"must be ascending, such as [64, 512], got {[*tiers]}")
        return self

    @model_validator(mode="after")
    def _check_hot_spot(self) -> Self:
        if self.hot_spot_end_share >= self.hot_spot_share:
            below = f"must be below hot_spot_share ({self.hot_spot_share:g}), or a hot spot would begin and end at once"
            raise _broken_rule("hot_spot_end_share", f"{below}, got {self.hot_spot_end_share:g}")
        return self

    @model_validator(mode="after")
    def _check_prebucket(self) -> Self:
        for flaw in class_flaws(self.prebucket_classes, self.channel_pool_size):
            raise _broken_rule("prebucket_classes", flaw)
        if self.strategy is Strategy.PREBUCKET and not self.prebucket_classes:
            raise _broken_rule("prebucket_classes", "must name at least one class, because strategy is prebucket")
        return self

    @model_validator(mode="after")
    def _check_ring(self) -> Self:
        num_points = self.virtual_nodes * self.channel_pool_size
        if num_points > _MAX_RING_POINTS:
            times = f"times channel_pool_size ({self.channel_pool_size}) must be at most {_MAX_RING_POINTS}"
            raise _broken_rule("virtual_nodes", f"{times}, got {self.virtual_nodes}")
        return self


class IsolationConfig(Section):
    """``kev.isolation``."""

    level: Annotated[IsolationLevel, _Lax] = IsolationLevel.STRICT
    """What channels may share, unless the request says otherwise: nothing, the knowledge prefix, or every prefix."""
    shared_prefix: bool = True
    """Whether levels loose and shared store a common prefix once."""
    kv_cache: Annotated[KVCacheMode, _Lax] = KVCacheMode.SPLIT
    """KV per channel: what it needs, the same plus prefixes kept for later requests, or max_context for every slot."""
    knowledge_prefix: str = ""
    """The operator's text in front of every prompt."""
    replay_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of answers that are held back, computed again alone, and compared; a difference fails the answer."""


class CoreConfig(Section):
    """``kev.core``."""

    model_path: str = Field(default="demo", min_length=1)
    """The model: a directory, a hub id, a GGUF file, or demo."""
    precision: Annotated[Precision, _Lax] = Precision.BF16
    """Number format of weights and KV."""
    max_context: int = Field(default=4096, ge=16, le=16_777_216)
    """Most tokens of one channel: prefix, prompt and answer together."""
    prompt_template: str = "Question: {question}\nAnswer:"
    """The prompt when the tokenizer has no chat template; must contain {question}."""
    prompt_stop: Annotated[_Texts, _Lax, Allowed("a list of texts, none of them empty")] = ("\nQuestion:",)
    """Strings that end the answer of a question without stops of its own, when the tokenizer has no chat template."""
    max_tokens: int = Field(default=64, ge=1, le=16_777_216)
    """Most answer tokens of a question that sets none."""
    segment_tokens: int = Field(default=64, ge=1, le=65_536)
    """Prompt tokens of one question that are computed together; long prompts are cut at its multiples."""
    prefill_rows: int = Field(default=128, ge=1, le=65_536)
    """Prompt tokens of all questions in one forward pass; Kev's own kernels take up to four times as many."""
    kv_cache_bytes: int = Field(default=0, ge=0, le=2**50)
    """Bytes for KV, of each engine core; 0 makes room for max_parallel_queries full contexts."""
    prefix_cache_bytes: int = Field(default=0, ge=0, le=2**50)
    """Bytes of KV beyond which unused prefixes go (kv_cache: shared_readonly); 0 keeps them until room is needed."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the forward pass; 0 uses every core, divided between the engine cores of mode multi_gpu."""
    backend: Annotated[Backend, _Lax] = Backend.AUTO
    """What runs the forward: auto takes native where it knows the model, cpu is torch, flex is for device cuda."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$"), Allowed("one of cpu, cuda or cuda:N")] = "cpu"
    """Where the model runs; in mode multi_gpu, deploy.devices says it."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Processes that hold a part of the model each (on torch), for models too large for one device; 1: whole."""
    compile: bool = False
    """Compile the forward at the start (backends cpu and flex): fewer, larger kernels; CUDA graphs on a GPU."""
    step_limit_ms: int = Field(default=600_000, ge=0, le=86_400_000)
    """Milliseconds after which a step that has not returned is given up, with its engine core; 0 waits for ever."""
    max_restarts: int = Field(default=3, ge=0, le=1_000)
    """How often in a row an engine core that has ended is started again; ten minutes without an end begin a new row."""
    restart_pause_ms: int = Field(default=1_000, ge=1, le=60_000)
    """Milliseconds before the first restart of an engine core; then four times as many each time, up to 60 s."""
    cache_dir: str = ""
    """Directory for converted models; empty is the user's cache directory."""
    keep_packed: bool = True
    """Keep models packed for the native kernels in cache_dir, so that the next start maps them into memory."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if "{question}" not in self.prompt_template:
            raise _broken_rule("prompt_template", f"must contain {{question}}, got {shown(self.prompt_template)}")
        if self.max_tokens >= self.max_context:
            room = f"must be less than max_context ({self.max_context}) to leave room for a prompt"
            raise _broken_rule("max_tokens", f"{room}, got {self.max_tokens}")
        if self.segment_tokens > self.prefill_rows:
            whole = f"must be at most prefill_rows ({self.prefill_rows}), because a segment is computed whole"
            raise _broken_rule("segment_tokens", f"{whole}, got {self.segment_tokens}")
        return self


class AggregatorConfig(Section):
    """``kev.aggregator``."""

    mode: Annotated[AggregateMode, _Lax] = AggregateMode.SLOT_MAP
    """Order of a request's results, unless it says otherwise: by question, by completion, or by priority."""
    timeout_ms: int = Field(default=10_000, ge=1, le=86_400_000)
    """Milliseconds a question may take from acceptance to outcome, unless it says otherwise."""
    result_ttl_s: int = Field(default=600, ge=1, le=2_592_000)
    """Seconds that the results of a finished request are kept."""
    max_requests: int = Field(default=10_000, ge=1, le=10_000_000)
    """Most requests kept at a time, running and finished."""


class ServerConfig(Section):
    """``kev.server``."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that HTTP listens on."""
    port: int = Field(default=8765, ge=0, le=65_535)
    """TCP port that HTTP listens on; 0 picks a free one."""
    max_body_bytes: int = Field(default=8_388_608, ge=1, le=1_073_741_824)
    """Largest body of an HTTP request, in bytes."""


class DebugConfig(Section):
    """``kev.debug``."""

    forward_log: str = ""
    """File that gets one JSON line per forward pass, with the summary of its mask; empty writes none."""
    log_level: Annotated[LogLevel, _Lax] = LogLevel.INFO
    """Least important messages that are logged."""


class ObservabilityConfig(Section):
    """``kev.observability``."""

    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """TCP port on which a service tells its metrics (GET /metrics, on cluster.bind_host); 0 opens none."""
    log_format: Annotated[LogFormat, _Lax] = LogFormat.TEXT
    """Lines of the log: text, or JSON objects with the ids of request and trace."""


class NodeEngine(StrEnum):
    """What answers on an inference node."""

    MODEL = "model"
    SCRIPTED = "scripted"
    """A token clock without a model: for load and fault tests of the tiers."""


class ClusterConfig(Section):
    """``kev.cluster``: the services of ``deploy.mode: distributed``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$"), Allowed("1 to 64 letters, digits, . _ or -")] = "kev"
    """Deployment: services of one name work together; on one Redis, others are separate."""
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", min_length=1)
    """Redis or Valkey 7.0 or newer; redis:// or rediss:// with user, password and database."""
    durability: Annotated[Durability, _Lax] = Durability.MEMORY
    """What Redis must keep when it crashes, checked at the start: nothing, all but its last second or two, or all."""
    router_address: str = Field(default="127.0.0.1:50051", min_length=1)
    """host:port that clients and the gateway dial for the router."""
    aggregator_address: str = Field(default="127.0.0.1:50052", min_length=1)
    """host:port that clients and the gateway dial for the aggregator."""
    bind_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that the services listen on."""
    router_port: int = Field(default=50051, ge=0, le=65_535)
    """TCP port of the router; 0 picks a free one."""
    aggregator_port: int = Field(default=50052, ge=0, le=65_535)
    """TCP port of the aggregator; 0 picks a free one."""
    inference_port: int = Field(default=50053, ge=0, le=65_535)
    """TCP port of an inference node; 0 picks a free one."""
    lease_timeout_s: float = Field(default=15.0, ge=0.5, le=3600)
    """Seconds without renewal after which a question goes to another node."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Deliveries of a question before it counts as poison and goes to the dead letters."""
    drain_grace_s: float = Field(default=25.0, ge=0, le=3600)
    """Seconds a service may take to finish what is open after the order to stop."""
    max_message_bytes: int = Field(default=8_388_608, ge=65_536, le=1_073_741_824)
    """Largest gRPC message in either direction, in bytes."""
    max_connection_age_s: int = Field(default=300, ge=1, le=86_400)
    """Seconds after which a connection is renewed, so that new instances get traffic."""
    tls_cert_file: str = ""
    """Certificate chain of the services, PEM; empty serves plaintext."""
    tls_key_file: str = ""
    """Private key of the certificate, PEM."""
    tls_ca_file: str = ""
    """Authority, PEM: services then demand a client certificate, clients check the server's."""
    api_keys_file: str = ""
    """YAML mapping of API key to tenant, or to {tenant, weight}; empty asks for no key."""
    api_key_file: str = ""
    """File with the API key that the gateway sends; empty sends none."""
    reflection: bool = True
    """Whether the services describe themselves to tools such as grpcurl."""
    node_engine: Annotated[NodeEngine, _Lax] = NodeEngine.MODEL
    """What answers on an inference node: the model, or a scripted token clock for tests of the tiers."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            missing = "tls_key_file" if self.tls_cert_file else "tls_cert_file"
            raise _broken_rule(missing, "must be set, because certificate and key belong together")
        return self
