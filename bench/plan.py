"""What a load needs: deployments, nodes, channels, stores, aggregators, and which of them is used up first.

Invariants and semantics: pure arithmetic over ``Inputs``. Nodes, routers and gateways are added freely. A deployment
has one store, whose one thread and memory are bounded; every aggregator reads the whole log of its deployment, so a
second one adds safety and no room; and channels are bounded by the configuration. What passes one of these bounds is
split into several deployments by their tag (``cluster.name``), which share nothing.

Not here: what a question costs the store (``store_use``), waiting times in detail (``queueing``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.entries import EntryBytes
from bench.inputs import Inputs
from bench.queueing import erlang_c, mean_wait_s
from bench.store_use import StoreUse, bytes_per_question, nodes_for

GIB = 2**30
_MOST_CHANNELS = 4096
"""Upper limit of ``router.channel_pool_size``."""
_PLACES_PER_CHANNEL = 8
"""``router.channel_queue_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a load needs, over all deployments unless it says otherwise."""

    questions_per_s: float
    service_s: float
    """A question's time in its slot."""
    busy_slots: float
    num_deployments: int
    num_nodes: int
    num_channels: int
    """Per deployment."""
    wait_share: float
    """Questions that wait for a slot, in one deployment."""
    wait_ms: float
    """Mean wait of all questions."""
    messages_per_s: float
    """Entries written: work, events, outcomes, registrations."""
    scripts_per_s: float
    store_cores: float
    """Processor time of all stores per second."""
    store_bytes: float
    """Kept in all stores."""
    aggregator_cores: float
    """Busy cores of one aggregator per deployment, all deployments together."""
    router_cores: float
    limits: dict[str, float]
    """Deployments that each resource alone would need; the largest is the first bottleneck."""

    @property
    def first_bottleneck(self) -> str:
        """The resource that is used up first when a deployment grows."""
        return max(self.limits, key=lambda name: self.limits[name])

    @classmethod
    def of(cls, questions_per_minute: float, inputs: Inputs) -> Plan:
        """The needs of a load.

        Raises:
            ValueError: no number of deployments is enough.
        """
        questions_per_s = questions_per_minute / 60
        limits = _limits(questions_per_s, inputs)
        num_deployments = max(1, math.ceil(max(limits.values())))
        per_deployment = questions_per_s / num_deployments
        num_nodes = math.ceil(nodes_for(per_deployment, inputs))
        num_slots = (num_nodes - inputs.spare_nodes) * inputs.slots_per_node
        store = StoreUse.of(per_deployment, inputs)
        return cls(
            questions_per_s=questions_per_s,
            service_s=inputs.service_s,
            busy_slots=questions_per_s * inputs.service_s,
            num_deployments=num_deployments,
            num_nodes=num_nodes * num_deployments,
            num_channels=channels_for(num_slots, inputs),
            wait_share=erlang_c(num_slots, per_deployment * inputs.service_s),
            wait_ms=1000 * mean_wait_s(num_slots, per_deployment, inputs.service_s),
            messages_per_s=questions_per_s * (1 + inputs.num_events + 1 / inputs.questions_per_request),
            scripts_per_s=num_deployments * store.scripts_per_s,
            store_cores=num_deployments * store.cores,
            store_bytes=_kept_bytes(questions_per_s, inputs),
            aggregator_cores=_aggregator_cores(questions_per_s, inputs),
            router_cores=questions_per_s * inputs.router_question_us / inputs.questions_per_request / 1e6,
            limits=limits,
        )


def channels_for(num_slots: float, inputs: Inputs) -> int:
    """Channels of a deployment: places for twice its slots, and at least 1.5 channels per slot of one node.

    A node takes one question of a channel at a time, and several nodes may work on one channel.
    """
    return max(math.ceil(1.5 * inputs.slots_per_node), math.ceil(2 * num_slots / _PLACES_PER_CHANNEL))


def _limits(questions_per_s: float, inputs: Inputs) -> dict[str, float]:
    slots_wanted = questions_per_s * inputs.service_s / inputs.busy_share
    return {
        "store: processor": _smallest_split(
            lambda parts: StoreUse.of(questions_per_s / parts, inputs).cores / inputs.store_busy_share
        ),
        "store: memory": _kept_bytes(questions_per_s, inputs) / (inputs.store_gib * GIB),
        "aggregator: reading the log": _aggregator_cores(questions_per_s, inputs) / inputs.busy_share,
        "channels": channels_for(slots_wanted, inputs) / _MOST_CHANNELS,
    }


def _kept_bytes(questions_per_s: float, inputs: Inputs) -> float:
    return bytes_per_question(inputs, EntryBytes.encoded(inputs)) * questions_per_s * inputs.retention_s


def _aggregator_cores(questions_per_s: float, inputs: Inputs) -> float:
    return questions_per_s * inputs.num_events * inputs.aggregator_event_us / 1e6


def _smallest_split(share: Callable[[float], float]) -> float:
    """Smallest number of equal parts of which each is used at most wholly; 1 is enough: the share that is used.

    Raises:
        ValueError: a part without any load is used up already.
    """
    if share(1.0) <= 1:
        return share(1.0)
    if share(math.inf) >= 1:
        raise ValueError("a store that serves no question is busier than store_busy_share")
    few, many = 1.0, 2.0
    while share(many) > 1:
        few, many = many, 2 * many
    while many - few > 1e-6 * few:
        middle = (few + many) / 2
        few, many = (middle, many) if share(middle) > 1 else (few, middle)
    return many
