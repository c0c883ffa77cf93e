"""The keys file: tenants and their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.api_keys import ApiKeys
from common.errors import ConfigError


def keys(tmp_path: Path, content: str) -> ApiKeys:
    path = tmp_path / "keys.yaml"
    path.write_text(content, encoding="utf-8")
    return ApiKeys.from_file(str(path))


def test_a_tenant_may_have_a_weight(tmp_path: Path) -> None:
    """A large tenant could not be given more than a small one."""
    found = keys(tmp_path, "k1: small\nk2: {tenant: big, weight: 4}\nk3: {tenant: big, weight: 4}\nk4: {tenant: '*'}\n")
    assert found.tenant_weights == (("big", 4.0),)
    assert [found.identify(key).tenant for key in ("k1", "k2", "k3", "k4")] == ["small", "big", "big", None]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            "k1: {tenant: a, weight: 2}\nk2: a",
            "key 2 in .* gives tenant a the weight 1, another key 2; a tenant",
        ),
        ("k1: {tenant: a, weight: 0}", "the weight of key 1 in .* must be a finite number above 0 and at most 1000"),
        ("k1: {tenant: a, weight: heavy}", "the weight of key 1"),
        ("k1: {tenant: a, weight: .nan}", "the weight of key 1"),
        ("k1: {tenant: a, weigth: 2}", "must be a tenant, or a mapping with tenant and, if wanted, weight"),
        ("k1: {weight: 2}", "must be a tenant, or a mapping with tenant"),
        ("k1: {tenant: 'a b'}", "the tenant of key 1"),
    ],
)
def test_a_wrong_weight_is_refused_in_words(tmp_path: Path, content: str, told: str) -> None:
    """A tenant would have another budget than the one written."""
    with pytest.raises(ConfigError, match=told):
        keys(tmp_path, content)
