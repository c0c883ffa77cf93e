"""Kev answers many independent questions in one forward pass, each in its own isolated channel.

Everything public is a name of this module; importing it loads neither torch nor grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.errors import (
        ConfigError,
        DeadlineExceededError,
        DrainingError,
        EngineDeadError,
        InvalidRequestError,
        IsolationUnavailableError,
        KevError,
        MessageTooLargeError,
        ModelError,
        PermissionDeniedError,
        PromptTooLongError,
        QueueFullError,
        RequestConflictError,
        RequestNotFoundError,
        RequestWithdrawnError,
        ServiceUnavailableError,
        StoreUnavailableError,
        UnauthenticatedError,
        UnsupportedModelError,
    )
    from common.tls_files import TlsFiles
    from common.types import Question, RequestView, Result, StreamEvent
    from kev.client import AsyncClient, Client
    from kev.engine import AsyncEngine, Engine

_HOMES = {
    "kev.client": ("AsyncClient", "Client"),
    "kev.engine": ("AsyncEngine", "Engine"),
    "common.tls_files": ("TlsFiles",),
    "common.types": ("Question", "RequestView", "Result", "StreamEvent"),
    "common.errors": (
        "ConfigError",
        "DeadlineExceededError",
        "DrainingError",
        "EngineDeadError",
        "InvalidRequestError",
        "IsolationUnavailableError",
        "KevError",
        "MessageTooLargeError",
        "ModelError",
        "PermissionDeniedError",
        "PromptTooLongError",
        "QueueFullError",
        "RequestConflictError",
        "RequestNotFoundError",
        "RequestWithdrawnError",
        "ServiceUnavailableError",
        "StoreUnavailableError",
        "UnauthenticatedError",
        "UnsupportedModelError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncClient",
    "AsyncEngine",
    "Client",
    "ConfigError",
    "DeadlineExceededError",
    "DrainingError",
    "Engine",
    "EngineDeadError",
    "InvalidRequestError",
    "IsolationUnavailableError",
    "KevError",
    "MessageTooLargeError",
    "ModelError",
    "PermissionDeniedError",
    "PromptTooLongError",
    "Question",
    "QueueFullError",
    "RequestConflictError",
    "RequestNotFoundError",
    "RequestView",
    "RequestWithdrawnError",
    "Result",
    "ServiceUnavailableError",
    "StoreUnavailableError",
    "StreamEvent",
    "TlsFiles",
    "UnauthenticatedError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kev' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
