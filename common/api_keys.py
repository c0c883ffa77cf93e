"""Who calls: API keys, and what the holder of each may do.

Invariants and semantics: with keys configured, nobody is anybody without one. A key belongs to one tenant, whose name
replaces whatever the request says, or to an operator (``*``), who may speak for any tenant and call every method.
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

import yaml

from common.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from common.field_rules import WrongValue, name

OPERATOR = "*"
"""Stands in a keys file for the tenant of an operator's key."""

_check_tenant = name(64)


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

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        """Take keys and their tenants; none means that no key is asked for."""
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
        for number, (key, tenant) in enumerate(content.items(), 1):
            _check_entry(path, number, key, tenant)
        return cls(content)

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


def _check_entry(path: str, number: int, key: object, tenant: object) -> None:
    """The key itself is a secret and stays out of the sentence."""
    if not (isinstance(key, str) and key.isascii() and key.isprintable() and key and " " not in key):
        raise ConfigError(
            f"cluster.api_keys_file: key {number} in {path} must be text of printable ASCII without blanks"
        )
    if tenant == OPERATOR:
        return
    try:
        _check_tenant(tenant)
    except WrongValue as error:
        told = error.flaws[0][1]
        raise ConfigError(
            f"cluster.api_keys_file: the tenant of key {number} in {path} {told}; or * for an operator"
        ) from None


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
