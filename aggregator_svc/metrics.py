"""The aggregator's numbers for an operator: outcomes as callers see them, open requests, refused events.

Invariants and semantics: listens to outcomes, stands in front of the result stream and reads the service's counters;
the service knows nothing of it.

Not here: names and meanings (``common.metrics.catalogue``), the store's queues (``common.redis_backlog``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aggregator_svc.service import AggregatorService
from common.metrics import catalogue as names
from common.metrics.port import Reading, Recorder, ending
from common.ports import ResultStream, Withdrawn
from common.types import ChannelEvent, ChannelResult


class WatchedResults:
    """A result stream whose settled outcomes are counted, each once however many aggregators settle it."""

    def __init__(self, results: ResultStream, recorder: Recorder) -> None:
        self._results = results
        self._recorder = recorder

    @property
    def num_gaps(self) -> int:
        """See ``common.ports.ResultStream``."""
        return self._results.num_gaps

    async def read(self, max_events: int, wait_s: float) -> Sequence[ChannelEvent | Withdrawn]:
        """See ``common.ports.ResultStream``."""
        return await self._results.read(max_events, wait_s)

    async def settle(self, outcomes: Sequence[ChannelResult]) -> list[int]:
        """See ``common.ports.ResultStream``."""
        settled = await self._results.settle(outcomes)
        for outcome in outcomes:
            if outcome.question_index in settled:
                self._recorder.count(names.SETTLED, *ending(outcome))
        return settled


class Outcomes:
    """Counts the outcomes that an aggregator tells."""

    def __init__(self, aggregator: AggregatorService, recorder: Recorder) -> None:
        self._aggregator = aggregator
        self._recorder = recorder
        aggregator.add_listener(self._count)

    def _count(self, outcome: ChannelResult) -> None:
        self._recorder.count(names.OUTCOMES, *ending(outcome))
        if outcome.attempt > 1:
            self._recorder.count(names.REPEATED)
        result = self._aggregator.result_of(*outcome.key)
        if result is not None:
            self._recorder.observe(names.OUTCOME_SECONDS, result.elapsed_ms / 1000)


def readings(aggregator: AggregatorService, results: ResultStream) -> Iterable[Reading]:
    """The aggregator's counters."""
    counters = aggregator.counters
    yield Reading(names.GAPS, results.num_gaps)
    yield Reading(names.OPEN_REQUESTS, counters.num_open)
    yield Reading(names.KEPT_REQUESTS, counters.num_kept)
    yield Reading(names.REFUSED_EVENTS, counters.num_late, ("late",))
    yield Reading(names.REFUSED_EVENTS, counters.num_unknown, ("unknown",))
    yield Reading(names.REFUSED_EVENTS, counters.num_malformed, ("malformed",))
