"""How a channel is picked for a question: one small class per strategy, and the registry of all of them.

Invariants and semantics: a strategy is a class with ``key``, ``pick`` and ``explain`` (``routing.RoutingStrategy``) and
a line in ``REGISTRY``; its name is a member of ``common.types.Strategy``, so that every surface knows it.

Not here: room on a channel, the breaker and the overflow queue (``channels``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from common.types import Strategy
from router_svc.embedding import HashedProjection, Projection
from router_svc.settings import RouterSettings
from router_svc.strategies.consistent_hash import ConsistentHash
from router_svc.strategies.length_aware import LengthAware
from router_svc.strategies.prebucket import Prebucket
from router_svc.strategies.round_robin import RoundRobin
from router_svc.strategies.routing import Choice, Parts, Pick, RoutingStrategy, RoutingView
from router_svc.strategies.semantic_hash import SemanticHash

__all__ = [
    "REGISTRY",
    "Choice",
    "ConsistentHash",
    "LengthAware",
    "Parts",
    "Pick",
    "Prebucket",
    "RoundRobin",
    "RoutingStrategy",
    "RoutingView",
    "SemanticHash",
    "build_strategies",
]

Registry = Mapping[Strategy, Callable[[Parts], RoutingStrategy]]

REGISTRY: Registry = MappingProxyType(
    {
        Strategy.SEMANTIC_HASH: SemanticHash.build,
        Strategy.ROUND_ROBIN: RoundRobin.build,
        Strategy.LENGTH_AWARE: LengthAware.build,
        Strategy.CONSISTENT_HASH: ConsistentHash.build,
        Strategy.PREBUCKET: Prebucket.build,
    }
)


def build_strategies(
    settings: RouterSettings,
    encode: Callable[[str], Sequence[int]],
    projection: Projection | None,
    registry: Registry = REGISTRY,
) -> dict[Strategy, RoutingStrategy]:
    """Every strategy by name; a request may name any of them.

    Args:
        settings: sizes and keys.
        encode: plain token ids of a text.
        projection: the model's table; None takes the lexical fall-back.
        registry: how each one is built.
    """
    lexical = HashedProjection(settings.semantic_planes, settings.hash_key) if projection is None else projection
    parts = Parts(settings=settings, encode=encode, projection=lexical)
    return {name: build(parts) for name, build in registry.items()}
