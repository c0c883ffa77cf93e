"""Traffic that hurts, the router that it hurt, and the routers that stand it.

Invariants and semantics: a story has a world as it should be (``calm``) and a world as it was (``told``); both have the
same questions at the same moments with the same lengths, but for what the story is about. Each case sends one of the
two through one router. The first three stories are the ones that an operator of Kev told; the others are harder.

Not here: running a case (``world``), the figures (``measures``), which of them must hold (``goals``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

from bench.traffic.arrivals import (
    Arrival,
    Flashes,
    Kind,
    Lengths,
    Rhythm,
    Traffic,
    Wording,
    about_anything,
    about_topics,
    together,
    with_guests,
)
from bench.traffic.forward import Speed
from bench.traffic.measures import Reading, read
from bench.traffic.words import Vocabulary, WordTokenizer
from bench.traffic.world import ComesBack, WorldSettings, simulate
from common.types import OverflowPolicy, Strategy
from router_svc.embedding import HashedProjection
from router_svc.settings import QuestionClass, RouterSettings

NUM_SLOTS = 8
SPEED = Speed()
ROUTER = RouterSettings()
"""As ``kev.yaml`` has it by default."""
NO_BREAKER = replace(ROUTER, breaker_queue_length=0)
"""The operator's Kev had none."""

Make = Callable[[int, int], Sequence[Arrival]]
"""From a number of questions and a seed to arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One router in one world."""

    label: str
    world: str
    """``calm`` or ``told``."""
    strategy: Strategy
    router: RouterSettings = ROUTER
    max_tries: int = 1
    comes_back: ComesBack = ComesBack.AS_TOLD

    def settings(self) -> WorldSettings:
        """The world that runs it."""
        return WorldSettings(
            strategy=self.strategy,
            router=self.router,
            num_slots=NUM_SLOTS,
            speed=SPEED,
            max_tries=self.max_tries,
            comes_back=self.comes_back,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A kind of traffic, and what helps."""

    name: str
    title: str
    focus: str
    """The class that should not have suffered."""
    worlds: Mapping[str, Make]
    cases: tuple[Case, ...]
    """The reference first, then the case as it was told, then remedies."""
    is_about_returns: bool = False
    """Whether it matters how often clients had to ask, and when they did."""

    def run(self, case: Case, num_questions: int, seed: int) -> Reading:
        """Simulate a case."""
        return read(simulate(case.settings(), self.worlds[case.world](num_questions, seed)))


def colliding_topics(num: int, length: int, router: RouterSettings) -> list[int]:
    """Topics that the real semantic hash cannot tell apart: all in the bucket of the first one."""
    vocabulary, tokenizer = Vocabulary(), WordTokenizer()
    projection = HashedProjection(router.semantic_planes, router.hash_key)

    def bucket(topic: int) -> int:
        return projection.bucket(tokenizer.encode_plain(" ".join(vocabulary.topic(topic, length))))

    first = bucket(0)
    alike = (topic for topic in count() if bucket(topic) == first)
    return [next(alike) for _ in range(num)]


def _about(topics: Sequence[int]) -> Wording:
    """Each of these topics as often, in the same words in any order."""

    def wording(numbers: random.Random, length: int) -> str:
        words = _VOCABULARY.topic(numbers.choice(topics), length)
        numbers.shuffle(words)
        return " ".join(words)

    return wording


_VOCABULARY = Vocabulary()
_ANYTHING = about_anything(_VOCABULARY)
_FAQ_TOKENS = 16
_FAQ = Lengths(median=_FAQ_TOKENS)
_SHORT = Lengths(median=16, spread=0.3, most=60)
_REPLY = Lengths(median=24, spread=0.6)
_URGENT = 50
"""Steps of priority; a head start of 5 s with the default step."""


def _mix(load: float, *kinds: Kind, rhythm: Rhythm | Flashes | None = None) -> Make:
    traffic = Traffic(kinds=kinds, load=load, rhythm=rhythm or Rhythm())
    rate_per_s = traffic.rate_per_s(SPEED, NUM_SLOTS, 1)
    return lambda num, seed: traffic.arrivals(rate_per_s, num, seed)


def _kind(name: str, share: float, wording: Wording, prompt: Lengths = _FAQ, answer: Lengths = _REPLY) -> Kind:
    return Kind(name=name, share=share, prompt=prompt, answer=answer, wording=wording)


def _without_breaker(strategy: Strategy) -> Case:
    """Traffic as it was told, and a router that diverts nothing."""
    return Case(label=f"{strategy}, no breaker", world="told", strategy=strategy, router=NO_BREAKER)


def _with_breaker(strategy: Strategy, router: RouterSettings = ROUTER) -> Case:
    """Traffic as it was told, and a router that diverts."""
    return Case(label=f"{strategy}, breaker", world="told", strategy=strategy, router=router)


def _mixed() -> Story:
    """Seed, chapter 2.1: round robin while 20 % of the questions make 80 % of the load."""
    short = _kind("short", 0.8, _ANYTHING, _SHORT, Lengths(median=16, spread=0.5))
    long = _kind("long", 0.2, _ANYTHING, Lengths(median=600, spread=0.2), Lengths(median=150, spread=0.3))
    return Story(
        name="mix",
        title="A fifth of the questions makes four fifths of the load",
        focus="short",
        worlds={"calm": _mix(0.8 * 0.2, short), "told": _mix(0.8, short, long)},
        cases=(
            Case(label="only the short ones", world="calm", strategy=Strategy.ROUND_ROBIN, router=NO_BREAKER),
            _without_breaker(Strategy.ROUND_ROBIN),
            Case(label="length_aware", world="told", strategy=Strategy.LENGTH_AWARE),
            _with_breaker(Strategy.ROUND_ROBIN),
        ),
    )


def _hot() -> Story:
    """Seed, chapter 4.3: one bucket has half of the traffic."""
    topics = colliding_topics(8, _FAQ_TOKENS, ROUTER)
    classes = tuple(
        QuestionClass(name=f"faq-{number}", num_channels=2, patterns=tuple(f"t{topic}x" for topic in topics[number::4]))
        for number in range(4)
    )
    cold = _kind("cold", 0.5, _ANYTHING)
    return Story(
        name="hot",
        title="One bucket has half of the traffic",
        focus="cold",
        worlds={
            "calm": _mix(0.8, _kind("hot", 0.5, _ANYTHING), cold),
            "told": _mix(0.8, _kind("hot", 0.5, _about(topics)), cold),
        },
        cases=(
            Case(label="even load", world="calm", strategy=Strategy.SEMANTIC_HASH),
            _without_breaker(Strategy.SEMANTIC_HASH),
            _without_breaker(Strategy.CONSISTENT_HASH),
            _with_breaker(Strategy.PREBUCKET, replace(ROUTER, prebucket_classes=classes)),
            _with_breaker(Strategy.SEMANTIC_HASH),
            _with_breaker(Strategy.CONSISTENT_HASH),
        ),
    )


def _heavy() -> Story:
    """A fifth of the questions is one topic, and long: few in number, most of the load."""
    topics = colliding_topics(8, _FAQ_TOKENS, ROUTER)
    short = _kind("short", 0.8, _ANYTHING, _SHORT, Lengths(median=16, spread=0.5))
    prompt, answer = Lengths(median=600, spread=0.2), Lengths(median=150, spread=0.3)

    def at_length(numbers: random.Random, length: int) -> str:
        words = _VOCABULARY.topic(numbers.choice(topics), _FAQ_TOKENS)
        return " ".join((words * (length // _FAQ_TOKENS + 1))[:length])

    return Story(
        name="heavy",
        title="A fifth of the questions is long and in one bucket",
        focus="short",
        worlds={
            "calm": _mix(0.6, short, _kind("long", 0.2, _ANYTHING, prompt, answer)),
            "told": _mix(0.6, short, _kind("long", 0.2, at_length, prompt, answer)),
        },
        cases=(
            Case(label="even load", world="calm", strategy=Strategy.SEMANTIC_HASH),
            _without_breaker(Strategy.SEMANTIC_HASH),
            Case(label="length_aware", world="told", strategy=Strategy.LENGTH_AWARE),
            _with_breaker(Strategy.SEMANTIC_HASH),
        ),
    )


def _giant() -> Story:
    """Seed, chapter 4.3, the long tail: a giant among short questions."""
    short = _kind("short", 1.0, _ANYTHING, _SHORT)
    giant = _kind("giant", 1.0, _ANYTHING, Lengths(median=3_000), Lengths(median=400))
    calm = _mix(0.5, short)
    told = with_guests(calm, giant, every=400)
    return Story(
        name="giant",
        title="A giant among 400 short questions",
        focus="short",
        worlds={"calm": calm, "told": told},
        cases=(
            Case(label="no giant, length_aware", world="calm", strategy=Strategy.LENGTH_AWARE),
            _without_breaker(Strategy.ROUND_ROBIN),
            Case(label="length_aware", world="told", strategy=Strategy.LENGTH_AWARE),
            _with_breaker(Strategy.ROUND_ROBIN),
        ),
    )


def _skewed() -> Story:
    """Topics by Zipf's law."""
    return Story(
        name="zipf",
        title="300 topics by Zipf's law",
        focus="all",
        worlds={
            "calm": _mix(0.8, _kind("all", 1.0, _ANYTHING)),
            "told": _mix(0.8, _kind("all", 1.0, about_topics(_VOCABULARY, 300, 1.1))),
        },
        cases=(
            Case(label="even load", world="calm", strategy=Strategy.SEMANTIC_HASH),
            _without_breaker(Strategy.SEMANTIC_HASH),
            _without_breaker(Strategy.CONSISTENT_HASH),
            _with_breaker(Strategy.SEMANTIC_HASH),
        ),
    )


def _hostile() -> Story:
    """Somebody who knows the key of the hash asks only what falls into one bucket."""
    topics = colliding_topics(40, _FAQ_TOKENS, NO_BREAKER)
    other_key = replace(NO_BREAKER, hash_key="a key of this deployment's own")
    return Story(
        name="hostile",
        title="Every question collides with every other",
        focus="all",
        worlds={
            "calm": _mix(0.8, _kind("all", 1.0, _ANYTHING)),
            "told": _mix(0.8, _kind("all", 1.0, _about(topics))),
        },
        cases=(
            Case(label="even load", world="calm", strategy=Strategy.SEMANTIC_HASH),
            Case(
                label="the key is known, no breaker", world="told", strategy=Strategy.SEMANTIC_HASH, router=NO_BREAKER
            ),
            Case(label="another key, no breaker", world="told", strategy=Strategy.SEMANTIC_HASH, router=other_key),
            Case(label="the key is known, breaker", world="told", strategy=Strategy.SEMANTIC_HASH),
        ),
    )


def _stalling() -> Story:
    """Some questions never end by themselves; their channels stand until the time budget is spent."""
    short = replace(_kind("short", 1.0, _ANYTHING, _SHORT), timeout_ms=30_000)
    stuck = replace(_kind("stuck", 1.0, _ANYTHING, _SHORT), timeout_ms=10_000, stalls=True)
    calm = _mix(0.5, short)
    return Story(
        name="stall",
        title="One question in 200 never ends, and holds its channel for its whole time budget",
        focus="short",
        worlds={"calm": calm, "told": with_guests(calm, stuck, every=200)},
        cases=(
            Case(label="none stalls", world="calm", strategy=Strategy.CONSISTENT_HASH),
            _without_breaker(Strategy.ROUND_ROBIN),
            _without_breaker(Strategy.CONSISTENT_HASH),
            _with_breaker(Strategy.ROUND_ROBIN),
        ),
    )


def _bursts() -> Story:
    """Bursts of six times the average: what the policies do with more than there is room for."""
    waits, queues, rejects = (
        replace(ROUTER, overflow_policy=policy, channel_queue_size=4, overflow_queue_size=64)
        for policy in OverflowPolicy
    )
    hurried = replace(_kind("all", 1.0, _ANYTHING, _SHORT), timeout_ms=20_000)
    told = Strategy.CONSISTENT_HASH
    return Story(
        name="burst",
        title="Bursts of six times the average load, 20 s of patience",
        focus="all",
        worlds={
            "calm": _mix(0.7, hurried),
            "told": _mix(0.7, hurried, rhythm=Rhythm(burst=6.0, busy_s=10.0)),
        },
        cases=(
            Case(label="steady, wait", world="calm", strategy=told, router=waits),
            Case(label="wait", world="told", strategy=told, router=waits),
            Case(label="queue of 64", world="told", strategy=told, router=queues),
            Case(label="reject", world="told", strategy=told, router=rejects),
            Case(label="reject, asks up to 8 times", world="told", strategy=told, router=rejects, max_tries=8),
        ),
    )


def _returns() -> Story:
    """Everybody at once, four times a minute; whoever is refused comes back until he is taken."""
    rejects = replace(ROUTER, overflow_policy=OverflowPolicy.REJECT, channel_queue_size=2)
    crowd, steady = (replace(_kind(name, 1.0, _ANYTHING, _SHORT), timeout_ms=60_000) for name in ("crowd", "steady"))
    flashes = Flashes(size=100, every_s=15.0, within_s=0.2)
    told = Strategy.CONSISTENT_HASH

    def refused(label: str, comes_back: ComesBack) -> Case:
        return Case(label=label, world="told", strategy=told, router=rejects, max_tries=10_000, comes_back=comes_back)

    return Story(
        name="returns",
        title="100 clients at once, every 15 s, who come back until they are taken",
        focus="crowd",
        worlds={"told": together(_mix(0.3, crowd, rhythm=flashes), _mix(0.3, steady), share=0.4)},
        cases=(
            Case(label="wait: all stand in line", world="told", strategy=told),
            refused("everybody after the time of one place", ComesBack.AFTER_ONE_PLACE),
            refused("each at a time of its own", ComesBack.AS_TOLD),
            refused("the same, in whole seconds", ComesBack.IN_WHOLE_SECONDS),
            refused("told nothing, doubling", ComesBack.BY_ITSELF),
        ),
        is_about_returns=True,
    )


def _priorities() -> Story:
    """A tenth of the questions is urgent, at a load at which everybody waits."""
    normal = replace(_kind("normal", 0.9, _ANYTHING, _SHORT), timeout_ms=120_000)
    urgent = replace(normal, name="urgent", share=0.1)
    return Story(
        name="priority",
        title="A tenth of the questions is urgent, and the node is full",
        focus="urgent",
        worlds={
            "calm": _mix(0.97, normal, urgent),
            "told": _mix(0.97, normal, replace(urgent, priority=_URGENT)),
        },
        cases=(
            Case(label="all alike", world="calm", strategy=Strategy.CONSISTENT_HASH),
            Case(label=f"priority {_URGENT}", world="told", strategy=Strategy.CONSISTENT_HASH),
            Case(
                label=f"priority {_URGENT}, 64 channels",
                world="told",
                strategy=Strategy.CONSISTENT_HASH,
                router=replace(ROUTER, channel_pool_size=64),
            ),
        ),
    )


_MAKERS: Mapping[str, Callable[[], Story]] = {
    "mix": _mixed,
    "hot": _hot,
    "heavy": _heavy,
    "giant": _giant,
    "zipf": _skewed,
    "hostile": _hostile,
    "stall": _stalling,
    "burst": _bursts,
    "returns": _returns,
    "priority": _priorities,
}
NAMES = tuple(_MAKERS)
"""In the order of the report."""


@cache
def story(name: str) -> Story:
    """A story by its name; making one takes a moment.

    Raises:
        KeyError: there is none of this name.
    """
    return _MAKERS[name]()
