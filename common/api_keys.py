"""Who calls: API keys, and what the holder of each may do.

Invariants and semantics: with keys configured, nobody is anybody without one. A key belongs to one tenant, whose name
replaces whatever the request says, or to an operator (``*``), who may speak for any tenant and call every method.
A tenant has a weight, which its limits are multiplied with: ``key: {tenant: acme, weight: 4}``; ``key: acme`` is 1.
Without keys everybody is an operator. A presented key is compared with all keys in constant time; keys are kept as
digests only and are never logged.

Not here: how a key travels (``common.grpc_interceptors``).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from common.field_rules import WrongValue, name, number

OPERATOR = "*"
"""Stands in a keys file for the tenant of an operator's key."""

_MAX_WEIGHT = 1000.0

_check_tenant = name(64)
_check_weight = number(0, _MAX_WEIGHT, above_low=True)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call."""

    tenant: str | None = None
    """None: an operator, who may speak for any tenant."""

    def speak_for(self, tenant: str) -> str:
        """The tenant a request belongs to whose sender names ``tenant``."""
        return tenant if self.tenant is None else self.tenant

    def may_see(self, tenant: str) -> bool:
        """Whether requests of ``tenant`` are this caller's business."""
        return self.tenant is None or self.tenant == tenant

    def require_operator(self) -> None:
        """Make sure that the caller runs this deployment.

        Raises:
            PermissionDeniedError: the key belongs to a tenant.
        """
        if self.tenant is not None:
            raise PermissionDeniedError("this method is for operators; the API key given belongs to a tenant")


current_caller: ContextVar[Caller] = ContextVar("current_caller")
"""Set for the task of each call; outside of one there is none."""


class ApiKeys:
    """The known keys; falsy when anybody may call."""

    def __init__(self, tenants: Mapping[str, str] | None = None, weights: Mapping[str, float] | None = None) -> None:
        """Take keys and their tenants, none means that no key is asked for; and weights of tenants."""
        self._weights = dict(weights or {})
        self._callers = {
            _digest(key): Caller(None if tenant == OPERATOR else tenant) for key, tenant in (tenants or {}).items()
        }

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """Read a YAML mapping from key to tenant; an empty path means that no key is asked for.

        Raises:
            ConfigError: the file cannot be read, holds no key, or a key or tenant in it is malformed.
        """
        if not path:
            return cls()
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cluster.api_keys_file: cannot read {path}: {type(error).__name__}") from None
        except yaml.YAMLError:
            raise ConfigError(f"cluster.api_keys_file: {path} is not YAML") from None
        if not isinstance(content, dict) or not content:
            raise ConfigError(f"cluster.api_keys_file: {path} must be a mapping from API key to tenant, at least one")
        tenants: dict[str, str] = {}
        weights: dict[str, float] = {}
        for position, (key, entry) in enumerate(content.items(), 1):
            tenant, weight = _check_entry(path, position, key, entry)
            tenants[key] = tenant
            if weights.setdefault(tenant, weight) != weight:
                raise ConfigError(
                    f"cluster.api_keys_file: key {position} in {path} gives tenant {tenant} the weight {weight:g}, "
                    f"another key {weights[tenant]:g}; a tenant has one weight"
                )
        return cls(tenants, {tenant: weight for tenant, weight in weights.items() if weight != 1})

    @property
    def tenant_weights(self) -> tuple[tuple[str, float], ...]:
        """Tenants whose weight is not 1, with their weights."""
        return tuple(self._weights.items())

    def __bool__(self) -> bool:
        return bool(self._callers)

    def identify(self, key: str | None) -> Caller:
        """Whose key it is.

        Raises:
            UnauthenticatedError: none, or not a known one.
        """
        if not self._callers:
            return Caller()
        if not key:
            raise UnauthenticatedError("no API key; send one as the metadata authorization: Bearer <key>")
        presented, found = _digest(key), None
        for known, caller in self._callers.items():  # to the end, so that the time taken tells nothing
            if hmac.compare_digest(presented, known):
                found = caller
        if found is None:
            raise UnauthenticatedError("the API key is not known here")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_entry(path: str, position: int, key: object, entry: Any) -> tuple[str, float]:
    """Tenant and weight; the key itself is a secret and stays out of the sentence."""
    if not (isinstance(key, str) and key.isascii() and key.isprintable() and key and " " not in key):
        raise ConfigError(
            f"cluster.api_keys_file: key {position} in {path} must be text of printable ASCII without blanks"
        )
    given = entry if isinstance(entry, dict) else {"tenant": entry}
    if not {"tenant"} <= given.keys() <= {"tenant", "weight"}:
        raise ConfigError(
            f"cluster.api_keys_file: the entry of key {position} in {path} must be a tenant, or a mapping with tenant "
            "and, if wanted, weight"
        )
    tenant, weight = given["tenant"], given.get("weight", 1.0)
    for what, rule, value in (("tenant", _check_tenant, tenant), ("weight", _check_weight, weight)):
        if what == "tenant" and tenant == OPERATOR:
            continue
        try:
            rule(value)
        except WrongValue as error:
            way_out = "; or * for an operator" if what == "tenant" else ""
            told = f"the {what} of key {position} in {path} {error.flaws[0][1]}{way_out}"
            raise ConfigError(f"cluster.api_keys_file: {told}") from None
    return str(tenant), float(weight)


def read_key(path: str) -> str | None:
    """The API key in a file that a client sends; None for an empty path.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if not path:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster.api_key_file: cannot read {path}: {type(error).__name__}") from None
    if not key:
        raise ConfigError(f"cluster.api_key_file: {path} is empty")
    return key
