"""Events of running questions that wait to be reported.

Invariants and semantics: what is added while a report is under way piles up and goes out in the next one: per question
one report, its events in their order, neighbouring deltas joined. Deltas are numbered when they are taken, from 0 per
lease without gaps. A report that found no room is put back in front of what came after it, as if it had not been taken.

Not here: who is told (``worker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.ports import Lease, Report
from common.types import ChannelDelta, ChannelEvent

Key = tuple[str, int]
"""(request_id, question_index)."""


class Pile:
    """For one event loop."""

    def __init__(self) -> None:
        self._events: dict[Key, list[ChannelEvent]] = {}
        self._next_seq: dict[Key, int] = {}

    def add(self, events: Sequence[ChannelEvent]) -> None:
        """Put events on top."""
        for event in events:
            self._events.setdefault((event.request_id, event.question_index), []).append(event)

    def take(self, held: Mapping[Key, Lease]) -> list[Report]:
        """Everything, as reports under the leases that are held; events of others and of other attempts are dropped."""
        piled_up, self._events = self._events, {}
        reports = []
        for key, events in piled_up.items():
            lease = held.get(key)
            own = [event for event in events if lease is not None and event.attempt == lease.attempt]
            if lease is not None and own:
                reports.append(Report(lease=lease, events=tuple(self._numbered(key, joined_deltas(own)))))
        return reports

    def put_back(self, report: Report) -> None:
        """Undo the taking of a report."""
        key = report.lease.item.key
        self._events[key] = [*report.events, *self._events.get(key, ())]
        numbers = [event.seq for event in report.events if isinstance(event, ChannelDelta)]
        if numbers:
            self._next_seq[key] = numbers[0]

    def forget(self, key: Key) -> None:
        """The question is held no more: drop its events, count the deltas of its next lease from 0."""
        self._events.pop(key, None)
        self._next_seq.pop(key, None)

    def _numbered(self, key: Key, events: list[ChannelEvent]) -> list[ChannelEvent]:
        numbered: list[ChannelEvent] = []
        for event in events:
            if isinstance(event, ChannelDelta):
                seq = self._next_seq.get(key, 0)
                self._next_seq[key] = seq + 1
                event = event if event.seq == seq else replace(event, seq=seq)
            numbered.append(event)
        return numbered


def joined_deltas(events: Sequence[ChannelEvent]) -> list[ChannelEvent]:
    """The events of one question with neighbouring deltas made into one; their ``seq`` is to be given anew."""
    joined: list[ChannelEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ChannelDelta) and isinstance(last, ChannelDelta):
            joined[-1] = replace(event, text=last.text + event.text)
        else:
            joined.append(event)
    return joined
