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
    breaker_queue_length: int = 1
    """Outstanding questions on a channel from which on a new one is diverted to an idle channel; 0 never diverts."""
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
            breaker_queue_length=router.breaker_queue_length,
            semantic_planes=router.semantic_planes,
            hash_key=router.hash_key,
            length_tiers=tuple(router.length_tiers),
            virtual_nodes=router.virtual_nodes,
            load_bound=router.load_bound,
            shared_prefix=isolation.shared_prefix,
            has_knowledge_prefix=bool(isolation.knowledge_prefix),
            max_context=config.core.max_context,
        )
