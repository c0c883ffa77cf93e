"""The router's numbers of the moment: breakers, ages, pace and heat, with labels from small sets."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics.port import MAX_CHANNEL_LABELS
from common.types import (
    BreakerState,
    BucketHeat,
    ChannelSnapshot,
    Diversion,
    HotSpot,
    HotSpotKind,
    RouterStats,
    Strategy,
)
from router_svc.metrics import readings


class Told:
    """A router with many channels and many buckets."""

    def __init__(self, states: Sequence[tuple[BreakerState, Diversion | None]], num_buckets: int) -> None:
        self.states, self.num_buckets = states, num_buckets

    def check_room(self, tenant: str = "") -> None:
        raise NotImplementedError

    async def accept(self, spec: object, *, has_new_id: bool = False) -> bool:
        raise NotImplementedError

    def channels(self) -> list[ChannelSnapshot]:
        return [
            ChannelSnapshot(
                channel_id=i,
                num_queued=1,
                num_total=1,
                num_diverted=0,
                breaker_open=state is BreakerState.OPEN,
                breaker=state,
                breaker_why=why,
                oldest_ms=i * 1000,
            )
            for i, (state, why) in enumerate(self.states)
        ]

    def stats(self) -> RouterStats:
        spot = HotSpot(kind=HotSpotKind.BUCKET, channel_id=0, num_questions=1, share=1.0, remedy="")
        return RouterStats(
            num_requests=1,
            num_questions=1,
            num_rejected=0,
            num_overflow=0,
            num_removed_chars=0,
            bucket_counts=(),
            num_recent=4 * self.num_buckets,
            bucket_heat=tuple(
                BucketHeat(strategy=Strategy.SEMANTIC_HASH, hash_bucket=i, num_questions=4)
                for i in range(self.num_buckets)
            ),
            hot_spots=(spot,),
            releases_per_s=2.5,
        )


def told(router: Told) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for reading in readings(router):
        found.setdefault(reading.metric.name, {})[reading.labels] = reading.value
    return found


def test_breakers_ages_pace_and_heat_are_told() -> None:
    """A dashboard would show a stuck channel, or a hot bucket, as nothing."""
    states = [(BreakerState.CLOSED, None), (BreakerState.HALF_OPEN, Diversion.AGE), (BreakerState.OPEN, Diversion.AGE)]
    found = told(Told([*states, (BreakerState.OPEN, Diversion.QUEUE_LENGTH)], 2))
    assert found["kev_router_breaker_state"] == {("0",): 0, ("1",): 1, ("2",): 2, ("3",): 0}
    assert found["kev_router_breakers_open"] == {(): 2}
    assert found["kev_router_oldest_seconds"] == {(): 3.0}
    assert found["kev_router_releases_per_second"] == {(): 2.5}
    assert found["kev_router_hot_spots"] == {("bucket",): 1, ("channel",): 0}
    assert [found["kev_router_heat_share"][str(rank),] for rank in range(1, 9)] == [0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_the_series_are_bounded_whatever_is_configured() -> None:
    """Thousands of channels or buckets would make a series each."""
    found = told(Told([(BreakerState.OPEN, Diversion.FAILURES)] * 4096, 1000))
    assert len(found["kev_router_breaker_state"]) == MAX_CHANNEL_LABELS
    assert len(found["kev_router_heat_share"]) == 8
