"""What the router needs to know of the configuration.

Invariants and semantics: the names are those of ``kev.yaml``; the values are already checked by ``common.config``.
Defaults equal the defaults of ``kev.yaml``.

Not here: checking what an operator wrote (``common.config``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.types import NormalizeLevel, OverflowPolicy

if TYPE_CHECKING:
    from common.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionClass:
    """A class of questions with channels of its own (strategy ``prebucket``)."""

    name: str
    """Also the first of its categories."""
    num_channels: int
    categories: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    """As ``common.text_pattern`` reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of ``RouterService``."""

    channel_pool_size: int = 16
    """Channels in the pool."""
    overflow_policy: OverflowPolicy = OverflowPolicy.WAIT
    """What happens to a question for which no channel has room."""
    normalize: NormalizeLevel = NormalizeLevel.LIGHT
    """How much of a question's wording may be removed."""
    channel_queue_size: int = 8
    """Most outstanding questions on one channel, the running one included."""
    overflow_queue_size: int = 256
    """Most questions in the overflow queue (policy ``queue``)."""
    channel_queue_bytes: int = 33_554_432
    """Bytes, 4 a prompt token, from which on a channel that holds something takes no more."""
    overflow_queue_bytes: int = 268_435_456
    """Bytes from which on no further question may wait (policies ``queue`` and ``wait``)."""
    max_waiting_queries: int = 65_536
    """Most questions that wait (policy ``wait``)."""
    max_wait_ms: int = 0
    """How long a submit call waits for its first channel (policy ``wait``); 0: as long as its time budget."""
    breaker_queue_length: int = 1
    """Outstanding questions on a channel from which on a new one is diverted to an idle channel; 0 never diverts."""
    breaker_max_age_ms: int = 60_000
    """Age of a channel's oldest question that opens its breaker; 0: none does."""
    breaker_failure_rate: float = 0.5
    """Share of failures among the latest outcomes that does; 0: none does."""
    breaker_min_outcomes: int = 20
    """Outcomes in the window before that share counts."""
    breaker_window_ms: int = 30_000
    """Window of outcomes."""
    breaker_cooldown_ms: int = 5_000
    """How long a breaker stays open before a probe."""
    hot_spot_share: float = 0.25
    """Share of the latest questions that makes a hot spot."""
    hot_spot_end_share: float = 0.2
    """Share under which it is one no more."""
    hot_spot_min_questions: int = 100
    """Questions in the window before anything is a hot spot."""
    hot_spot_window_ms: int = 60_000
    """Window of questions."""
    priority_step_ms: int = 100
    """How much earlier than it came a question stands in the overflow queue for each step of its priority."""
    semantic_planes: int = 6
    """Planes of the semantic hash when there is no table; n planes make 2^n buckets."""
    hash_key: str = "kev"
    """Key of all digests of the router."""
    length_tiers: tuple[int, ...] = (64, 512)
    """Ascending borders, in tokens, between short and long questions; n borders make n + 1 tiers."""
    virtual_nodes: int = 64
    """Points per channel on the ring of ``consistent_hash``."""
    load_bound: float = 1.25
    """Most load of a channel as a multiple of the mean (``consistent_hash``), above 1."""
    prebucket_classes: tuple[QuestionClass, ...] = ()
    """Classes of ``prebucket``, in the order in which their patterns are tried; they leave at least one channel."""
    max_question_tokens: int = 0
    """Most tokens of one question, prompt and ``max_tokens``; 0: as many as ``max_context``."""
    max_request_tokens: int = 0
    """Most tokens of one request; 0: no limit."""
    max_tenant_questions: int = 0
    """Most questions in flight of a tenant of weight 1; 0: no limit."""
    max_tenant_tokens: int = 0
    """Most tokens in flight of a tenant of weight 1; 0: no limit."""
    tenant_weights: tuple[tuple[str, float], ...] = ()
    """(tenant, what its limits are multiplied with); 1 for all others. From ``cluster.api_keys_file``."""
    shared_prefix: bool = True
    """Whether a common prefix may be stored once at levels below ``strict``."""
    has_knowledge_prefix: bool = False
    """Whether every prompt starts with the operator's knowledge; its end is then the first boundary of a prompt."""
    max_context: int = 4096
    """Most tokens of prompt and answer together."""
    retry_interval_s: float = 0.25
    """Pause before a transport that refused a question is asked again; not in ``kev.yaml``."""

    @classmethod
    def from_config(cls, config: Config) -> RouterSettings:
        """The router's share of a configuration."""
        router, isolation = config.router, config.isolation
        return cls(
            channel_pool_size=router.channel_pool_size,
            overflow_policy=router.overflow_policy,
            normalize=router.normalize,
            channel_queue_size=router.channel_queue_size,
            overflow_queue_size=router.overflow_queue_size,
            channel_queue_bytes=router.channel_queue_bytes,
            overflow_queue_bytes=router.overflow_queue_bytes,
            max_waiting_queries=router.max_waiting_queries,
            max_wait_ms=router.max_wait_ms,
            breaker_queue_length=router.breaker_queue_length,
            breaker_max_age_ms=router.breaker_max_age_ms,
            breaker_failure_rate=router.breaker_failure_rate,
            breaker_min_outcomes=router.breaker_min_outcomes,
            breaker_window_ms=router.breaker_window_ms,
            breaker_cooldown_ms=router.breaker_cooldown_ms,
            hot_spot_share=router.hot_spot_share,
            hot_spot_end_share=router.hot_spot_end_share,
            hot_spot_min_questions=router.hot_spot_min_questions,
            hot_spot_window_ms=router.hot_spot_window_ms,
            priority_step_ms=router.priority_step_ms,
            semantic_planes=router.semantic_planes,
            hash_key=router.hash_key,
            length_tiers=tuple(router.length_tiers),
            virtual_nodes=router.virtual_nodes,
            load_bound=router.load_bound,
            prebucket_classes=tuple(
                QuestionClass(
                    name=each.name,
                    num_channels=each.num_channels,
                    categories=each.categories,
                    patterns=each.patterns,
                )
                for each in router.prebucket_classes
            ),
            max_question_tokens=router.max_question_tokens,
            max_request_tokens=router.max_request_tokens,
            max_tenant_questions=router.max_tenant_questions,
            max_tenant_tokens=router.max_tenant_tokens,
            shared_prefix=isolation.shared_prefix,
            has_knowledge_prefix=bool(isolation.knowledge_prefix),
            max_context=config.core.max_context,
        )
