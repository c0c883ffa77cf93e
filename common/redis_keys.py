"""Every key that Kev has in Redis, with its type, its time to live and what it holds.

Invariants and semantics: the keys of one deployment start with ``{kev:<deployment>}:``. The braces are a hash tag: in a
Redis cluster all of them live in one slot, so that one script may touch any of them; a second deployment is a second
shard. Deployments share nothing. A key without time to live has a bounded size.

Not here: who writes them (``common.redis_scripts*``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import ConfigError

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_DEPLOYMENT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyKind:
    """One kind of key; ``lua`` is its name inside the scripts."""

    lua: str
    suffix: str
    """After the deployment's prefix; one that ends in a colon is followed by an id."""
    ttl_ms: int | None = None
    """Milliseconds since the last write; ``None``: for ever, or (``by_settings``) as long as the settings say."""
    by_settings: bool = False
    """The time to live is a time budget or a lease plus ``retention_s`` of the settings."""


WORK = KeyKind(lua="WORK", suffix="work:")
"""Stream per channel: the items that wait or are leased; bounded at admission, finished ones are deleted."""
WAITING = KeyKind(lua="WAITING", suffix="waiting")
"""Sorted set: channels in which something waits to be leased, by the rank of their first such entry (see scripts)."""
LEASED = KeyKind(lua="LEASED", suffix="leased")
"""Sorted set: leased entries (channel:id) by the time of the latest sign of life of their lease, in Unix ms."""
GRANTS = KeyKind(lua="GRANTS", suffix="grants:", by_settings=True)
"""String per consumer: its latest grant and what it was, in case the reply is lost."""
ORDER = KeyKind(lua="ORDER", suffix="order", ttl_ms=_DAY_MS)
"""Hash: the last publication's time (Unix ms) and number within it, from which entry ids are made."""
QUESTIONS = KeyKind(lua="QUESTIONS", suffix="questions:", by_settings=True)
"""Hash per request: where each question's item is, who was granted it last, its outcome, how it ended."""
RESULTS = KeyKind(lua="RESULTS", suffix="results")
"""Stream: events on their way to the reader; bounded, read ones are deleted."""
EVENTS = KeyKind(lua="EVENTS", suffix="events:", by_settings=True)
"""Stream per request: all its events, for a reader that starts anew."""
READERS = KeyKind(lua="READERS", suffix="readers", ttl_ms=3_000)
"""Hash: when each reader of results gave its last sign of life (Unix ms), and up to where it has read."""
STORE = KeyKind(lua="STORE", suffix="store")
"""Hash: the server that is the store, and since when (Unix ms)."""
NODES = KeyKind(lua="NODES", suffix="nodes", ttl_ms=_DAY_MS)
"""Sorted set: consumers of work by the time of their last sign of life, in Unix ms."""
NOTICES = KeyKind(lua="NOTICES", suffix="notices:", ttl_ms=60_000)
"""Stream per consumer: questions withdrawn while it held them."""
WORK_BELL = KeyKind(lua="WORK_BELL", suffix="bell:work", ttl_ms=_HOUR_MS)
"""Stream of at most one entry, whose id changes when there may be something to lease."""
DEAD_LETTERS = KeyKind(lua="DEAD_LETTERS", suffix="dlq")
"""Stream: the latest entries set aside for an operator, as raw bytes; at most ``MAX_DEAD_LETTERS``."""
REQUEST = KeyKind(lua="REQUEST", suffix="req:", by_settings=True)
"""Hash per request: its record, the digest of its content and when it was registered (Unix ms)."""
DEADLINES = KeyKind(lua="DEADLINES", suffix="deadlines", by_settings=True)
"""Sorted set: unfinished requests by the deadline of their first question to run out, in Unix ms."""
REPORTS = KeyKind(lua="REPORTS", suffix="reports", ttl_ms=_DAY_MS)
"""Hash: what each node tells about itself, by node id: Unix ms, then its isolation report and counters."""

KINDS = (
    WORK,
    WAITING,
    LEASED,
    GRANTS,
    ORDER,
    QUESTIONS,
    RESULTS,
    EVENTS,
    READERS,
    STORE,
    NODES,
    NOTICES,
    WORK_BELL,
    DEAD_LETTERS,
    REQUEST,
    DEADLINES,
    REPORTS,
)

WORK_GROUP = "nodes"
"""Consumer group of every work stream."""
UNOWNED = "~"
"""Pseudo-consumer of entries that were delivered once and wait again; no node id contains it."""
MAX_DEAD_LETTERS = 1_000
HEAD_STARTS = 65_536
"""Head starts that an entry's id can tell, half of them below zero."""
HEAD_START_MS = 10
"""One of them, in milliseconds."""
FIRST_NUMBER = 65_536
"""Numbers of entries begin here; ids with smaller ones are of a version that knew no head starts."""
MAX_NOTICES = 65_536
"""Most notices kept per consumer; a dropped one is harmless, its holder is refused at the next call."""


class RedisKeys:
    """The names of one deployment's keys."""

    __slots__ = ("prefix",)

    def __init__(self, deployment: str) -> None:
        """Name the keys of a deployment.

        Raises:
            ConfigError: the name is empty, too long or has characters that cannot stand in a hash tag.
        """
        if not _DEPLOYMENT.fullmatch(deployment):
            raise ConfigError(
                f"the deployment name {deployment!r} must be 1 to 64 letters, digits, dots, underscores or hyphens"
            )
        self.prefix = f"{{kev:{deployment}}}:"

    def name(self, kind: KeyKind, suffix: object = "") -> str:
        """The key of a kind; ``suffix`` is the id of kinds that have one."""
        return f"{self.prefix}{kind.suffix}{suffix}"

    def kind_of(self, key: str) -> KeyKind | None:
        """What kind of key this is; ``None``: none of this deployment."""
        rest = key.removeprefix(self.prefix)
        if rest == key:
            return None
        for kind in KINDS:
            if rest == kind.suffix or (kind.suffix.endswith(":") and rest.startswith(kind.suffix)):
                return kind
        return None


def lua_names() -> str:
    """Definitions of every name of this module for the scripts, which get the prefix as ``KEYS[1]``."""
    lines = [f"local {kind.lua} = KEYS[1] .. '{kind.suffix}'" for kind in KINDS]
    lines += [f"local {kind.lua}_TTL = {kind.ttl_ms}" for kind in KINDS if kind.ttl_ms is not None]
    lines += [
        f"local WORK_GROUP, UNOWNED = '{WORK_GROUP}', '{UNOWNED}'",
        f"local MAX_DEAD_LETTERS, MAX_NOTICES = {MAX_DEAD_LETTERS}, {MAX_NOTICES}",
        f"local HEAD_STARTS, HEAD_START_MS, FIRST_NUMBER = {HEAD_STARTS}, {HEAD_START_MS}, {FIRST_NUMBER}",
    ]
    return "\n".join(lines) + "\n"
