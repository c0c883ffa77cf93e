"""The router's share of the configuration."""

from __future__ import annotations

from dataclasses import fields

from common.config import load_config
from common.types import NormalizeLevel, OverflowPolicy
from router_svc.settings import RouterSettings


def test_defaults_are_those_of_the_configuration() -> None:
    """A router built in a test would behave differently from the one an operator runs."""
    assert RouterSettings.from_config(load_config(None, env={})) == RouterSettings()


def test_every_setting_comes_from_the_configuration() -> None:
    """A setting in kev.yaml would have no effect."""
    router = {
        "channel_pool_size": 20,
        "overflow_policy": "reject",
        "normalize": "full",
        "channel_queue_size": 3,
        "overflow_queue_size": 7,
        "breaker_queue_length": 2,
        "semantic_planes": 5,
        "hash_key": "other",
        "length_tiers": [10, 20],
        "virtual_nodes": 9,
        "load_bound": 2.0,
    }
    isolation = {"shared_prefix": False, "knowledge_prefix": "facts"}
    tree = {"kev": {"router": router, "isolation": isolation, "core": {"max_context": 777}}}
    found = RouterSettings.from_config(load_config(tree, env={}))
    same = {
        field.name for field in fields(found) if getattr(found, field.name) == getattr(RouterSettings(), field.name)
    }
    assert same == {"retry_interval_s"}
    assert (found.overflow_policy, found.normalize) == (OverflowPolicy.REJECT, NormalizeLevel.FULL)
    assert (found.length_tiers, found.has_knowledge_prefix, found.max_context) == ((10, 20), True, 777)
