"""The router's share of the configuration."""

from __future__ import annotations

from dataclasses import fields

import pytest

from common.config import load_config
from common.errors import ConfigError
from common.types import NormalizeLevel, OverflowPolicy
from router_svc.settings import QuestionClass, RouterSettings


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
        "channel_queue_bytes": 100,
        "overflow_queue_bytes": 200,
        "max_waiting_queries": 11,
        "max_wait_ms": 500,
        "breaker_queue_length": 2,
        "breaker_max_age_ms": 100,
        "breaker_failure_rate": 0.25,
        "breaker_min_outcomes": 3,
        "breaker_window_ms": 1000,
        "breaker_cooldown_ms": 50,
        "hot_spot_share": 0.4,
        "hot_spot_end_share": 0.3,
        "hot_spot_min_questions": 9,
        "hot_spot_window_ms": 5000,
        "priority_step_ms": 50,
        "semantic_planes": 5,
        "hash_key": "other",
        "length_tiers": [10, 20],
        "virtual_nodes": 9,
        "load_bound": 2.0,
        "prebucket_classes": [{"name": "refund", "num_channels": 4, "categories": ["money"], "patterns": ["^refund"]}],
        "max_question_tokens": 100,
        "max_request_tokens": 200,
        "max_tenant_questions": 3,
        "max_tenant_tokens": 400,
    }
    isolation = {"shared_prefix": False, "knowledge_prefix": "facts"}
    tree = {"kev": {"router": router, "isolation": isolation, "core": {"max_context": 777}}}
    found = RouterSettings.from_config(load_config(tree, env={}))
    same = {
        field.name for field in fields(found) if getattr(found, field.name) == getattr(RouterSettings(), field.name)
    }
    assert same == {"retry_interval_s", "tenant_weights"}, "the keys file is read by the process"
    classes = (QuestionClass(name="refund", num_channels=4, categories=("money",), patterns=("^refund",)),)
    assert found.prebucket_classes == classes
    assert (found.overflow_policy, found.normalize) == (OverflowPolicy.REJECT, NormalizeLevel.FULL)
    assert (found.length_tiers, found.has_knowledge_prefix, found.max_context) == ((10, 20), True, 777)


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ({"hot_spot_share": 0.2}, "hot_spot_end_share: must be below hot_spot_share \\(0.2\\)"),
        ({"hot_spot_share": 0.5, "hot_spot_end_share": 0.6}, "would begin and end at once"),
        ({"hot_spot_share": 0.0}, "hot_spot_share: must be a finite number above 0"),
        ({"breaker_failure_rate": 1.5}, "breaker_failure_rate: must be a finite number from 0 to 1"),
        ({"breaker_min_outcomes": 0}, "breaker_min_outcomes: must be an integer from 1"),
        ({"channel_pool_size": 0}, "channel_pool_size: must be an integer from 1"),
        ({"max_waiting_queries": 0}, "max_waiting_queries: must be an integer from 1"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused_in_words(router: dict[str, object], words: str) -> None:
    """A breaker would never open, or a hot spot begin and end with every question."""
    with pytest.raises(ConfigError, match=words):
        load_config({"kev": {"router": router}}, env={})
