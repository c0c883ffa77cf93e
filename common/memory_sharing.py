"""Who takes what where several consumers wait for the same work.

Invariants and semantics: pure. Items go one by one, in order, to the consumer that holds least among those that may
take them, so that the work of one publication spreads over all that are idle. Who looks and when does not matter:
every consumer that looks at the same state sees the same shares, so no item is left by all.

Not here: what a consumer may take (``common.memory``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def share_out(able: Sequence[Sequence[str]], loads: Mapping[str, int], rooms: Mapping[str, int]) -> list[str | None]:
    """The receiver of each item; None where nobody has room.

    Args:
        able: for each item, the consumers that may take it.
        loads: what each consumer holds.
        rooms: what each consumer would take besides.
    """
    held, room = dict(loads), dict(rooms)
    receivers: list[str | None] = []
    for names in able:
        free = [name for name in names if room[name] > 0]
        receiver = min(free, key=lambda name: (held[name], name), default=None)
        receivers.append(receiver)
        if receiver is not None:
            held[receiver] += 1
            room[receiver] -= 1
    return receivers
