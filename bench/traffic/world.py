"""The simulated world: the real router and the real transport of the embedded form, in virtual time.

Invariants and semantics: ``RouterService`` runs whole (normalization, tokens, strategies, pool, breaker, overflow,
publication, back-pressure of ``submit``), and ``MemoryTransport`` decides which item is leased when; both are what
``kev.Engine`` runs, here on an event loop whose time jumps. The pool and the strategies alone would be some times
faster, but publication, waiting and the order of leases would have to be imitated, and an imitation proves nothing;
half a millisecond per question is fast enough. Only the edges are played: clients that ask at given moments, nodes
that compute by the clock, an aggregator that keeps deadlines. Every arrival ends exactly once: answered, rejected or
timed out.

Not here: what is asked (``arrivals``), what is made of the ends (``measures``).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bench.traffic.arrivals import Arrival
from bench.traffic.deadlines import Deadlines
from bench.traffic.forward import Speed
from bench.traffic.node import Key, SimulatedNode
from bench.traffic.virtual_time import LoopClock, run_virtually
from bench.traffic.words import WordTokenizer
from common.errors import InvariantError, QueueFullError
from common.memory import MemoryTransport
from common.memory_consumer import ConsumerGroup
from common.types import (
    AggregateMode,
    ChannelResult,
    ChannelSnapshot,
    ChannelStarted,
    FinishReason,
    HotSpotKind,
    IsolationLevel,
    QuestionSpec,
    RequestSpec,
    SamplingParams,
    Strategy,
)
from router_svc.return_line import MIN_S
from router_svc.service import RouterService
from router_svc.settings import RouterSettings

_FOREVER_S = 1e9
_LOOKS_PER_ADVICE = 50


class End(StrEnum):
    """How an arrival ended."""

    ANSWERED = "answered"
    REJECTED = "rejected"
    TIMED_OUT = "timed out"


class ComesBack(StrEnum):
    """When a client asks again that was refused."""

    AS_TOLD = "as told"
    IN_WHOLE_SECONDS = "in whole seconds"
    """As ``Retry-After`` tells it over HTTP: rounded up."""
    AFTER_ONE_PLACE = "after one place"
    """After the mean time in which one place becomes free, the same for everybody: what a pace alone can tell."""
    BY_ITSELF = "by itself"
    """After half a second, doubled with every refusal up to 8 s, less up to a quarter at random: what clients of
    OpenAI's API do that are told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """What is simulated."""

    strategy: Strategy
    router: RouterSettings = field(default_factory=RouterSettings)
    num_nodes: int = 1
    num_slots: int = 8
    """Per node: ``router.max_parallel_queries``."""
    speed: Speed = field(default_factory=Speed)
    max_tries: int = 1
    """Times a client asks."""
    comes_back: ComesBack = ComesBack.AS_TOLD
    """When it asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What became of one arrival."""

    arrival: Arrival
    end: End
    ended_s: float
    started_s: float | None = None
    """When a node began with it; None if none did."""
    channel_id: int | None = None
    """Where it ran; None if it never did."""
    hash_bucket: int | None = None
    num_tries: int = 1

    @property
    def wait_s(self) -> float:
        """From the arrival to its start, or to its end if it never started."""
        return (self.ended_s if self.started_s is None else self.started_s) - self.arrival.at_s

    @property
    def stay_s(self) -> float:
        """From the arrival to its end."""
        return self.ended_s - self.arrival.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A finished simulation."""

    settings: WorldSettings
    endings: tuple[Ending, ...]
    """In order of arrival."""
    channels: tuple[ChannelSnapshot, ...]
    """At the end."""
    loads_seen: tuple[float, ...]
    """Mean number of outstanding questions of each channel, as the arrivals found it."""
    returns_s: tuple[float, ...]
    """When somebody asked again, in order."""
    num_diverted: int
    advice: str
    """Remedy that the router itself suggested for the first hot bucket it saw; empty if it saw none."""
    span_s: float
    """From the first arrival to the last end."""
    slot_s: float
    """Slot-seconds taken."""
    busy_s: float
    """Seconds in which nodes computed, added up."""
    done_tokens: float
    """Tokens computed."""


class World:
    """One run."""

    def __init__(self, settings: WorldSettings, arrivals: Sequence[Arrival]) -> None:
        """To be made on the loop that runs it.

        Args:
            settings: router and nodes.
            arrivals: in order of time.
        """
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        router = settings.router
        self._loop = loop
        self._settings = settings
        self._arrivals = arrivals
        self._asked: dict[str, Arrival] = {}
        self._work = MemoryTransport(
            num_channels=router.channel_pool_size,
            clock=clock,
            lease_timeout_s=_FOREVER_S,
            max_entries_per_channel=router.channel_queue_size,
        )
        self._deadlines = Deadlines(self._work)
        nodes = ConsumerGroup(self._work, max_attempts=1)
        self._router = RouterService(
            tokenizer=WordTokenizer(), work=self._work, registry=self._deadlines, clock=clock, settings=router
        )
        self._nodes = [
            SimulatedNode(name, nodes.join(name), settings.num_slots, settings.speed, self._asked)
            for name in (f"node-{number}" for number in range(settings.num_nodes))
        ]
        self._starts: dict[Key, tuple[float, int]] = {}
        """When, and on which channel."""
        self._tries: dict[Key, int] = {}
        self._endings: dict[int, Ending] = {}
        self._returns_s: list[float] = []
        self._loads_seen = [0.0] * router.channel_pool_size
        self._num_looks = 0
        self._advice = ""
        self._all_ended = asyncio.Event()

    async def run(self) -> History:
        """Until every arrival has ended.

        Raises:
            InvariantError: an arrival ended twice, or a place is leaked.
        """
        async with asyncio.TaskGroup() as group:
            endless = (self._router.run(), self._read(), *(node.run() for node in self._nodes))
            helpers = [group.create_task(work) for work in endless]
            await self._ask_all()
            if len(self._endings) < len(self._arrivals):
                await self._all_ended.wait()
            for task in helpers:
                task.cancel()
        self._router.check_integrity()
        return self._history()

    async def _ask_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for arrival in self._arrivals:
                await _until(self._loop, arrival.at_s)
                self._look()
                group.create_task(self._ask(arrival))

    def _look(self) -> None:
        for channel in self._router.channels():
            self._loads_seen[channel.channel_id] += channel.num_queued
        self._num_looks += 1
        if not self._advice and not self._num_looks % _LOOKS_PER_ADVICE:
            spots = self._router.stats().hot_spots
            self._advice = next((spot.remedy for spot in spots if spot.kind is HotSpotKind.BUCKET), "")

    async def _ask(self, arrival: Arrival) -> None:
        for num_tries in range(1, self._settings.max_tries + 1):
            spec = _request(arrival, num_tries, self._settings.strategy)
            self._asked[spec.request_id] = arrival
            self._tries[spec.request_id, 0] = num_tries
            try:
                await self._router.accept(spec, has_new_id=True)
            except QueueFullError as refusal:
                if num_tries < self._settings.max_tries:
                    await asyncio.sleep(self._pause_s(refusal, arrival, num_tries))
                    self._returns_s.append(self._loop.time())
                    continue
                self._end(Ending(arrival=arrival, end=End.REJECTED, ended_s=self._loop.time(), num_tries=num_tries))
            return

    def _pause_s(self, refusal: QueueFullError, arrival: Arrival, num_tries: int) -> float:
        """For how long a client stays away after so many tries."""
        match self._settings.comes_back:
            case ComesBack.AS_TOLD:
                return refusal.retry_after_s
            case ComesBack.IN_WHOLE_SECONDS:
                return max(1, math.ceil(refusal.retry_after_s))
            case ComesBack.AFTER_ONE_PLACE:
                return max(MIN_S, 1 / (self._router.stats().releases_per_s or 1.0))
            case ComesBack.BY_ITSELF:
                drawn = random.Random(f"{arrival.number}:{num_tries}").random()
                return min(0.5 * 2.0 ** (num_tries - 1), 8.0) * (1 - drawn / 4)

    async def _read(self) -> None:
        """The aggregator's part: note what happened, and tell the router about outcomes."""
        while True:
            for event in await self._work.read(1_000, _FOREVER_S):
                key = event.request_id, event.question_index
                if isinstance(event, ChannelStarted):
                    self._starts[key] = self._loop.time(), event.channel_id
                elif isinstance(event, ChannelResult):
                    self._note_outcome(event)

    def _note_outcome(self, result: ChannelResult) -> None:
        answered = result.finish_reason is FinishReason.STOP
        if not answered:
            for node in self._nodes:
                node.stop(result.key)
        record = self._deadlines.let_go(result.key)
        # Where a question was registered is not always where it went: it may have waited.
        started_s, channel_id = self._starts.pop(result.key, (None, None))
        self._router.on_outcome(result)
        self._end(
            Ending(
                arrival=self._asked[result.request_id],
                end=End.ANSWERED if answered else End.TIMED_OUT,
                ended_s=self._loop.time(),
                started_s=started_s,
                channel_id=channel_id,
                hash_bucket=record.questions[0].route.hash_bucket,
                num_tries=self._tries.pop(result.key),
            )
        )

    def _end(self, ending: Ending) -> None:
        if ending.arrival.number in self._endings:
            raise InvariantError(f"arrival {ending.arrival.number} ended twice")
        self._endings[ending.arrival.number] = ending
        if len(self._endings) == len(self._arrivals):
            self._all_ended.set()

    def _history(self) -> History:
        channels = tuple(self._router.channels())
        num_seen = max(1, len(self._arrivals))
        return History(
            settings=self._settings,
            endings=tuple(self._endings[arrival.number] for arrival in self._arrivals),
            channels=channels,
            loads_seen=tuple(load / num_seen for load in self._loads_seen),
            returns_s=tuple(self._returns_s),
            num_diverted=sum(channel.num_diverted for channel in channels),
            advice=self._advice,
            span_s=self._loop.time() - (self._arrivals[0].at_s if self._arrivals else 0.0),
            slot_s=sum(node.forward.slot_s for node in self._nodes),
            busy_s=sum(node.forward.busy_s for node in self._nodes),
            done_tokens=sum(node.forward.done_tokens for node in self._nodes),
        )


def _request(arrival: Arrival, num_tries: int, strategy: Strategy) -> RequestSpec:
    question = QuestionSpec(
        text=arrival.text,
        sampling=SamplingParams(max_tokens=arrival.answer_tokens),
        timeout_ms=arrival.timeout_ms,
        priority=arrival.priority,
        category=arrival.category,
    )
    return RequestSpec(
        request_id=f"{arrival.number}.{num_tries}",
        questions=(question,),
        isolation=IsolationLevel.STRICT,
        strategy=strategy,
        mode=AggregateMode.SLOT_MAP,
        max_parallel=1,
    )


async def _until(loop: asyncio.AbstractEventLoop, at_s: float) -> None:
    """Sleep to a moment of the loop's time."""
    done: asyncio.Future[None] = loop.create_future()
    loop.call_at(at_s, done.set_result, None)
    await done


def simulate(settings: WorldSettings, arrivals: Sequence[Arrival]) -> History:
    """Run a world to its end, in virtual time."""

    async def run() -> History:
        return await World(settings, arrivals).run()

    return run_virtually(run())
