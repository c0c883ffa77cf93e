"""Ports for servers that are started as processes.

Invariants and semantics: a port that the kernel picks, and that is free again until the server binds it, may go to an
outgoing connection or to another test meanwhile. These are below what the kernel picks from, and a process is given
each of them once; where it begins is random, because several may run.

Not here: servers of the process itself, which bind port 0.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from itertools import chain

_FIRST, _END = 12_000, 32_000
"""Linux picks from 32768 on."""


def _numbers() -> Iterator[int]:
    start = random.SystemRandom().randrange(_FIRST, _END)
    return chain(range(start, _END), range(_FIRST, start))


_NUMBERS = _numbers()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    for port in _NUMBERS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no port from {_FIRST} to {_END} is left")
