"""The router's numbers for an operator: its verdicts, what it publishes, where questions wait.

Invariants and semantics: stands in front of the router and of what the router calls, and reads its snapshots; the
router knows nothing of it.

Not here: names and meanings (``common.metrics.catalogue``), calls of the service (``common.grpc_server``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from common.ending import Ending
from common.errors import KevError
from common.metrics import catalogue as names
from common.metrics.port import MAX_CHANNEL_LABELS, Reading, Recorder, by_channel
from common.ports import Intake, OutcomeBoard
from common.tracing.work import WorkTraces
from common.types import (
    BreakerState,
    ChannelSnapshot,
    Diversion,
    HotSpotKind,
    RequestRecord,
    RequestSpec,
    RouterStats,
    WorkItem,
)
from common.watched_work import WorkWatcher
from router_svc.entrance import Router

ACCEPTED = "accepted"
ABANDONED = "abandoned"
"""The caller left, or an error that is no verdict."""
_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_OF_THE_MOMENT = frozenset({Diversion.QUEUE_LENGTH, Diversion.FULL})
_MAX_RANKS = 8


class WatchedRouter:
    """A router whose verdicts are counted and traced."""

    def __init__(self, router: Router, recorder: Recorder, traces: WorkTraces) -> None:
        self._router = router
        self._recorder = recorder
        self._traces = traces

    def check_room(self, tenant: str = "") -> None:
        """Refuse before anything is spent; see ``RouterService.check_room``."""
        try:
            self._router.check_room(tenant)
        except KevError as error:
            self._recorder.count(names.SUBMISSIONS, error.reason)
            raise

    async def accept(self, spec: RequestSpec, *, has_new_id: bool = False) -> bool:
        """Accept a request; see ``RouterService.accept``."""
        started_s, verdict = time.monotonic(), ABANDONED
        try:
            with self._traces.submission(spec.request_id, len(spec.questions)):
                is_new = await self._router.accept(spec, has_new_id=has_new_id)
            verdict = ACCEPTED
            return is_new
        except KevError as error:
            verdict = error.reason
            raise
        finally:
            self._recorder.count(names.SUBMISSIONS, verdict)
            self._recorder.observe(names.SUBMIT_SECONDS, time.monotonic() - started_s, verdict)

    def channels(self) -> list[ChannelSnapshot]:
        """The channel pool."""
        return self._router.channels()

    def stats(self) -> RouterStats:
        """Counters."""
        return self._router.stats()


class Publications(WorkWatcher):
    """Counts what the router publishes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def published(self, item: WorkItem, error: KevError | None) -> None:
        """The item is on its stream, or why it is not."""
        self._recorder.count(names.PUBLICATIONS, "published" if error is None else error.reason)
        if error is None:
            self._recorder.count(names.ROUTED_TOKENS, by=len(item.prompt.ids))


class WatchedIntake:
    """An intake whose publications a watcher is told of."""

    def __init__(self, intake: Intake, watcher: WorkWatcher) -> None:
        self._intake = intake
        self._watcher = watcher

    async def accept(self, record: RequestRecord, items: Sequence[WorkItem]) -> list[KevError | None] | None:
        """Register a request and publish items of it; see ``common.ports.Intake``."""
        refusals = await self._intake.accept(record, items)
        for item, refusal in zip(items, refusals or (), strict=False):
            self._watcher.published(item, refusal)
        return refusals


class WatchedBoard:
    """An outcome board whose losses are counted."""

    def __init__(self, board: OutcomeBoard, recorder: Recorder) -> None:
        self._board = board
        self._recorder = recorder

    async def settled(self, questions: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Ending]:
        """Which of these have their outcome, and how they ended."""
        return await self._board.settled(questions)

    async def lost(self, questions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Which of these have neither an outcome nor an item any more."""
        lost = await self._board.lost(questions)
        self._recorder.count(names.REPUBLICATIONS, by=len(lost))
        return lost


def readings(router: Router) -> Iterable[Reading]:
    """The router's snapshot."""
    stats, channels = router.stats(), router.channels()
    yield Reading(names.REQUESTS, stats.num_requests)
    yield Reading(names.QUESTIONS, stats.num_questions)
    yield Reading(names.REMOVED_CHARS, stats.num_removed_chars)
    yield Reading(names.SAVED_TOKENS, stats.num_saved_tokens)
    yield Reading(names.WAITING, stats.num_overflow)
    yield Reading(names.DIVERTED, sum(channel.num_diverted for channel in channels))
    yield Reading(names.BREAKERS, sum(channel.breaker_open for channel in channels))
    yield Reading(names.OLDEST_PLACED, max(channel.oldest_ms for channel in channels) / 1000)
    yield Reading(names.RELEASES, stats.releases_per_s or 0.0)
    yield from by_channel(names.IN_FLIGHT, (channel.num_queued for channel in channels))
    yield from by_channel(names.BREAKER_STATE, map(_lasting_state, channels[:MAX_CHANNEL_LABELS]))
    for kind in HotSpotKind:
        yield Reading(names.HOT_SPOTS, sum(spot.kind is kind for spot in stats.hot_spots), (kind.value,))
    counts = sorted((heat.num_questions for heat in stats.bucket_heat), reverse=True)
    for rank, count in enumerate([*counts, *[0] * _MAX_RANKS][:_MAX_RANKS], 1):
        yield Reading(names.HEAT_SHARE, count / max(stats.num_recent, 1), (str(rank),))


def _lasting_state(channel: ChannelSnapshot) -> int:
    """The breaker without its comparison of lengths, which changes with every question."""
    return 0 if channel.breaker_why in _OF_THE_MOMENT else _STATES[channel.breaker]
