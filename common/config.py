"""What an operator can set: the tree behind ``kev.yaml``.

Invariants and semantics: every field has a default, so an empty configuration is a working one. Loading refuses what
is certainly wrong (unknown key, wrong type, out of range, a rule broken between two fields) with ``ConfigError``;
``Config.warnings`` says what is allowed but probably not meant. A ``Config`` never changes.

Not here: YAML and environment variables (``common.config_source``), the fields in words (``common.config_text``),
whether the model, the precision or the device can be had on this machine (the model loader).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from common import config_source, config_text
from common.config_text import Allowed, ConfigField
from common.errors import ConfigError
from common.types import AggregateMode, IsolationLevel, KVCacheMode, NormalizeLevel, OverflowPolicy, Strategy
from common.wording import shown

_MAX_ERRORS_SHOWN = 10
_LARGE_CONTEXT_TOKENS = 4096
_SHORT_TIMEOUT_MS = 1_000
_LONG_TIMEOUT_MS = 120_000
_MAX_RING_POINTS = 1 << 20
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class DeployMode(StrEnum):
    """Which form of Kev runs."""

    SINGLE = "single"
    """All three tiers in one process."""
    MULTI_GPU = "multi_gpu"
    """One process, one engine core per device."""
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
    CPU = "cpu"
    REFERENCE = "reference"


class LogLevel(StrEnum):
    """Least important messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_Lax = Strict(strict=False)
"""YAML has neither enums nor tuples: text becomes the member, a list the tuple. Items stay strict."""
_Borders = tuple[Annotated[int, Field(ge=1, le=16_777_216)], ...]
_Texts = tuple[Annotated[str, Field(min_length=1)], ...]


def _broken_rule(key: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("broken_rule", "{key}: {message}", {"key": key, "message": message})


class _Section(BaseModel):
    """One mapping of the file. The line under a field is its documentation."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class DeployConfig(_Section):
    """``kev.deploy``."""

    mode: Annotated[DeployMode, _Lax] = DeployMode.SINGLE
    """Which form runs: all tiers in one process, one engine core per GPU, or three services."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Inference workers; mode single has exactly 1."""

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.mode is DeployMode.SINGLE and self.workers != 1:
            message = f"must be 1, got {self.workers}; workers > 1 comes with deploy.mode: distributed or multi_gpu"
            raise _broken_rule("workers", message)
        return self


class RouterConfig(_Section):
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
    overflow_queue_size: int = Field(default=256, ge=1, le=1_000_000)
    """Questions that the overflow queue holds (overflow_policy: queue)."""
    breaker_queue_length: int = Field(default=1, ge=0, le=100_000)
    """Outstanding questions on a channel from which on a new one is diverted to an idle channel; 0 never diverts."""
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
    """Most load of a channel as a multiple of the mean (strategy consistent_hash)."""

    @model_validator(mode="after")
    def _check_length_tiers(self) -> Self:
        tiers = self.length_tiers
        if any(low >= high for low, high in pairwise(tiers)):
            raise _broken_rule("length_tiers", f"must be ascending, such as [64, 512], got {[*tiers]}")
        return self

    @model_validator(mode="after")
    def _check_ring(self) -> Self:
        num_points = self.virtual_nodes * self.channel_pool_size
        if num_points > _MAX_RING_POINTS:
            times = f"times channel_pool_size ({self.channel_pool_size}) must be at most {_MAX_RING_POINTS}"
            raise _broken_rule("virtual_nodes", f"{times}, got {self.virtual_nodes}")
        return self


class IsolationConfig(_Section):
    """``kev.isolation``."""

    level: Annotated[IsolationLevel, _Lax] = IsolationLevel.STRICT
    """What channels may share, unless the request says otherwise: nothing, the knowledge prefix, or every prefix."""
    shared_prefix: bool = True
    """Whether levels loose and shared store a common prefix once."""
    kv_cache: Annotated[KVCacheMode, _Lax] = KVCacheMode.SPLIT
    """KV per channel: what it needs, the same plus prefixes kept for later requests, or max_context for every slot."""
    knowledge_prefix: str = ""
    """The operator's text in front of every prompt."""


class CoreConfig(_Section):
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
    """Prompt tokens of all questions in one forward pass."""
    kv_cache_bytes: int = Field(default=0, ge=0, le=2**50)
    """Bytes for KV; 0 makes room for max_parallel_queries full contexts."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the forward pass; 0 uses every core."""
    backend: Annotated[Backend, _Lax] = Backend.AUTO
    """Attention implementation; reference is slow and for comparison."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$"), Allowed("one of cpu, cuda or cuda:N")] = "cpu"
    """Where the model runs."""
    cache_dir: str = ""
    """Directory for converted models; empty is the user's cache directory."""

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


class AggregatorConfig(_Section):
    """``kev.aggregator``."""

    mode: Annotated[AggregateMode, _Lax] = AggregateMode.SLOT_MAP
    """Order of a request's results, unless it says otherwise: by question, by completion, or by priority."""
    timeout_ms: int = Field(default=10_000, ge=1, le=86_400_000)
    """Milliseconds a question may take from acceptance to outcome, unless it says otherwise."""
    result_ttl_s: int = Field(default=600, ge=1, le=2_592_000)
    """Seconds that the results of a finished request are kept."""
    max_requests: int = Field(default=10_000, ge=1, le=10_000_000)
    """Most requests kept at a time, running and finished."""


class ServerConfig(_Section):
    """``kev.server``."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that HTTP listens on."""
    port: int = Field(default=8765, ge=0, le=65_535)
    """TCP port that HTTP listens on; 0 picks a free one."""
    max_body_bytes: int = Field(default=8_388_608, ge=1, le=1_073_741_824)
    """Largest body of an HTTP request, in bytes."""


class DebugConfig(_Section):
    """``kev.debug``."""

    forward_log: str = ""
    """File that gets one JSON line per forward pass, with the summary of its mask; empty writes none."""
    log_level: Annotated[LogLevel, _Lax] = LogLevel.INFO
    """Least important messages that are logged."""


class Config(_Section):
    """Everything an operator can set; immutable. Build it with ``load_config``."""

    deploy: DeployConfig = DeployConfig()
    router: RouterConfig = RouterConfig()
    isolation: IsolationConfig = IsolationConfig()
    core: CoreConfig = CoreConfig()
    aggregator: AggregatorConfig = AggregatorConfig()
    server: ServerConfig = ServerConfig()
    debug: DebugConfig = DebugConfig()

    @classmethod
    def describe(cls) -> tuple[ConfigField, ...]:
        """One row per field, in the order of the file."""
        return config_text.describe(cls)

    def warnings(self) -> tuple[str, ...]:
        """Allowed combinations that are probably not meant, one sentence each."""
        return (
            *_form_warnings(self),
            *_router_warnings(self),
            *_isolation_warnings(self),
            *_limit_warnings(self),
        )

    def to_yaml(self) -> str:
        """This configuration as a complete ``kev.yaml``, defaults written out."""
        return config_source.dump_yaml({"kev": self.model_dump(mode="json")})

    def require_embedded(self) -> None:
        """Make sure that this process is meant to hold all three tiers.

        Raises:
            ConfigError: ``deploy.mode`` asks for another form.
        """
        if self.deploy.mode is not DeployMode.SINGLE:
            raise ConfigError(
                f"kev.deploy.mode: {self.deploy.mode} does not run inside one embedded engine; "
                "set it to single to run all three tiers in this process"
            )


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | None = None, env: Mapping[str, str] | None = None
) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a YAML file, or its content as a mapping; both have the single top key ``kev``. ``None`` is
            all defaults. A section that is left empty keeps its defaults.
        env: variables such as ``KEV__ROUTER__STRATEGY`` override whatever ``source`` says; ``None`` is this process's
            environment, so pass ``{}`` for none.

    Raises:
        ConfigError: anything is wrong; says which key and what would be right.
    """
    fields = Config.describe()
    tree = _tree({"kev": {}} if source is None else source)
    from_env: dict[str, str] = {}
    for field, value in config_source.read_env(os.environ if env is None else env, fields).items():
        section = tree.setdefault(field.section, {})
        if isinstance(section, dict):
            section[field.key] = value
            from_env[field.path] = field.env
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        found = config_text.sentences(error, fields, from_env)
        more = [f"and {len(found) - _MAX_ERRORS_SHOWN} more"] if len(found) > _MAX_ERRORS_SHOWN else []
        only_env = all(sentence.startswith(config_source.ENV_PREFIX) for sentence in found)
        origin = "" if only_env else _origin(source)
        raise ConfigError(origin + "; ".join(found[:_MAX_ERRORS_SHOWN] + more)) from None


def _tree(source: object) -> dict[str, object]:
    """The sections of ``source``, copied, so that overrides never reach the caller's mapping."""
    origin = _origin(source)
    content = config_source.read_file(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(content, Mapping):
        raise ConfigError(f"{origin}must be a mapping with the top key kev, got {shown(content)}")
    if list(content) != ["kev"]:
        got = ", ".join(shown(key) for key in list(content)[:_MAX_ERRORS_SHOWN]) or "nothing"
        raise ConfigError(f"{origin}must have the one top key kev with every section under it, got {got}")
    sections = {} if content["kev"] is None else content["kev"]
    if not isinstance(sections, Mapping):
        raise ConfigError(f"{origin}kev: must be a mapping of sections, got {shown(sections)}")
    return {
        name: {} if section is None else dict(section) if isinstance(section, Mapping) else section
        for name, section in sections.items()
    }


def _origin(source: object) -> str:
    return f"{config_source.shown_path(source)}: " if isinstance(source, str | os.PathLike) else ""


def _form_warnings(config: Config) -> Iterator[str]:
    if config.deploy.mode is not DeployMode.SINGLE:
        yield f"deploy.mode {config.deploy.mode} is not offered in this version: kev serve and kev.Engine refuse it"
    if config.core.precision is Precision.INT8:
        yield "core.precision int8 is not offered in this version: loading refuses it; use bf16, fp16 or fp32"


def _router_warnings(config: Config) -> Iterator[str]:
    router = config.router
    pool, parallel = router.channel_pool_size, router.max_parallel_queries
    if pool < parallel:
        yield (
            f"router.channel_pool_size {pool} is smaller than router.max_parallel_queries {parallel}: "
            f"a forward pass can never be full; 1.5 to 2 times as many channels is usual"
        )
    if pool > 2 * parallel:
        yield (
            f"router.channel_pool_size {pool} is more than twice router.max_parallel_queries {parallel}: "
            "more questions wait inside Kev than it can run; 1.5 to 2 times as many channels is usual"
        )
    if router.breaker_queue_length > router.channel_queue_size:
        yield (
            f"router.breaker_queue_length {router.breaker_queue_length} is above router.channel_queue_size "
            f"{router.channel_queue_size}: a hot channel is full before the breaker diverts anything"
        )
    if router.strategy is Strategy.LENGTH_AWARE and pool <= len(router.length_tiers):
        yield (
            f"router.length_tiers makes {len(router.length_tiers) + 1} tiers for {pool} channels: "
            "long and short questions will share channels"
        )
    room = pool * router.channel_queue_size
    if router.overflow_policy is OverflowPolicy.QUEUE:
        room += router.overflow_queue_size
    if router.overflow_policy is not OverflowPolicy.WAIT and router.max_queries_per_request > room:
        yield (
            f"router.max_queries_per_request {router.max_queries_per_request} is more than the {room} questions that "
            f"fit: with overflow_policy {router.overflow_policy} the largest requests are always refused"
        )


def _isolation_warnings(config: Config) -> Iterator[str]:
    isolation, level = config.isolation, config.isolation.level
    if level is not IsolationLevel.STRICT:
        yield (
            f"isolation.level {level} is meant for internal and offline work with one fixed prompt; "
            "for answers to end users use strict"
        )
        if not isolation.shared_prefix:
            yield f"isolation.level {level} with shared_prefix false shares nothing: set it true or use strict"
    if level is IsolationLevel.LOOSE and not isolation.knowledge_prefix:
        yield "isolation.level loose shares isolation.knowledge_prefix only, and that is empty"
    if level is IsolationLevel.STRICT and isolation.kv_cache is KVCacheMode.SHARED_READONLY:
        yield (
            "isolation.kv_cache shared_readonly keeps shared prefixes, but isolation.level strict has none; "
            "only requests that ask for loose or shared gain"
        )
    if isolation.kv_cache is KVCacheMode.UNIFIED and config.core.max_context >= _LARGE_CONTEXT_TOKENS:
        yield (
            f"isolation.kv_cache unified reserves core.max_context {config.core.max_context} tokens for each of "
            f"{config.router.max_parallel_queries} slots, whatever a question needs; split reserves what it needs"
        )


def _limit_warnings(config: Config) -> Iterator[str]:
    timeout_ms = config.aggregator.timeout_ms
    if timeout_ms < _SHORT_TIMEOUT_MS:
        yield f"aggregator.timeout_ms {timeout_ms} is short: many questions will time out before they are answered"
    if timeout_ms > _LONG_TIMEOUT_MS:
        yield f"aggregator.timeout_ms {timeout_ms} is long: callers may wait {timeout_ms / 1000:g} s for one question"
    if config.core.precision is Precision.FP16:
        yield (
            "core.precision fp16: a model trained in bf16 can overflow in fp16 and answer nonsense; "
            "use bf16 or fp32 unless the model was trained in fp16"
        )
    if config.server.max_body_bytes < config.router.max_question_bytes:
        yield (
            f"server.max_body_bytes {config.server.max_body_bytes} is less than router.max_question_bytes "
            f"{config.router.max_question_bytes}: HTTP refuses questions that the router would take"
        )
    if config.server.host not in _LOOPBACK_HOSTS:
        yield (
            f"server.host {config.server.host} may be reached from other machines, and Kev does not ask who calls; "
            "put a gateway that does in front of it"
        )
