"""What an operator can set: the tree behind ``kev.yaml``.

Invariants and semantics: every field has a default, so an empty configuration is a working one. Loading refuses what
is certainly wrong (unknown key, wrong type, out of range, a rule broken between two fields) with ``ConfigError``;
``Config.warnings`` says what is allowed but probably not meant. A ``Config`` never changes.

Not here: the fields (``common.config_sections``) and their wording (``common.config_text``), YAML and environment
variables (``common.config_source``), whether model, precision and device can be had on this machine (the loader).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from common import config_source, config_text
from common.config_sections import (
    AggregatorConfig,
    ClusterConfig,
    CoreConfig,
    DebugConfig,
    DeployConfig,
    DeployMode,
    IsolationConfig,
    ObservabilityConfig,
    Precision,
    RouterConfig,
    Section,
    ServerConfig,
)
from common.config_text import ConfigField
from common.errors import ConfigError
from common.types import IsolationLevel, KVCacheMode, OverflowPolicy, Strategy
from common.wording import shown

_MAX_ERRORS_SHOWN = 10
_LARGE_CONTEXT_TOKENS = 4096
_SHORT_TIMEOUT_MS = 1_000
_LONG_TIMEOUT_MS = 120_000
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class Config(Section):
    """Everything an operator can set; immutable. Build it with ``load_config``."""

    deploy: DeployConfig = DeployConfig()
    router: RouterConfig = RouterConfig()
    isolation: IsolationConfig = IsolationConfig()
    core: CoreConfig = CoreConfig()
    aggregator: AggregatorConfig = AggregatorConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
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
            *_budget_warnings(self),
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
        if self.deploy.mode is DeployMode.DISTRIBUTED:
            raise ConfigError(
                f"kev.deploy.mode: {self.deploy.mode} does not run inside one embedded engine; "
                "set it to single or multi_gpu to run all three tiers in this process"
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
    if config.deploy.mode is DeployMode.MULTI_GPU and config.core.device != "cpu":
        yield f"core.device {config.core.device} has no effect in deploy.mode multi_gpu; deploy.devices has"


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
    room += {
        OverflowPolicy.WAIT: router.max_waiting_queries,
        OverflowPolicy.QUEUE: router.overflow_queue_size,
    }.get(router.overflow_policy, 0)
    if router.max_queries_per_request > room:
        yield (
            f"router.max_queries_per_request {router.max_queries_per_request} is more than the {room} questions that "
            f"fit: with overflow_policy {router.overflow_policy} the largest requests are always refused"
        )


def _budget_warnings(config: Config) -> Iterator[str]:
    router, core = config.router, config.core
    question, request = router.max_question_tokens, router.max_request_tokens
    if 0 < question <= core.max_tokens:
        yield (
            f"router.max_question_tokens {question} is not above core.max_tokens {core.max_tokens}: every question "
            "that sets no max_tokens of its own is refused"
        )
    if question > core.max_context:
        yield (
            f"router.max_question_tokens {question} is above core.max_context {core.max_context}, which bounds a "
            "question before it does"
        )
    if 0 < request < (question or core.max_tokens):
        yield f"router.max_request_tokens {request} is less than a single question may have; the largest are refused"
    if 0 < router.max_tenant_tokens < request:
        yield (
            f"router.max_tenant_tokens {router.max_tenant_tokens} is less than router.max_request_tokens {request}: "
            "the largest requests of a tenant of weight 1 are always refused"
        )
    if 0 < router.max_tenant_questions < router.max_queries_per_request:
        yield (
            f"router.max_tenant_questions {router.max_tenant_questions} is less than router.max_queries_per_request "
            f"{router.max_queries_per_request}: the largest requests of a tenant of weight 1 are always refused"
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
    if config.router.max_wait_ms > timeout_ms:
        yield (
            f"router.max_wait_ms {config.router.max_wait_ms} is longer than aggregator.timeout_ms {timeout_ms}: "
            "calls wait no longer than their questions have time"
        )
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
