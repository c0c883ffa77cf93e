"""Who asks what, and when: arrivals made of parts that can be told apart in a report.

Invariants and semantics: pure and seeded. Each property of an arrival (its moment, its class, its length, its words)
is drawn from a stream of its own, so that two worlds that differ in one of them are equal in all others: an arrival
with a given number comes at the same moment and is as long in both.

Not here: what becomes of the questions (``world``), which mixes make a story (``stories``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.traffic.forward import Speed
from bench.traffic.words import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One question on its way to the router."""

    number: int
    at_s: float
    kind: str
    """Class in the report."""
    text: str
    prompt_tokens: int
    answer_tokens: int
    timeout_ms: int
    stalls: bool = False
    """Never ends by itself: it keeps its slot and its channel until its time is up."""
    category: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a class: log-normal around a median, so that a few are far longer."""

    median: int
    spread: float = 0.0
    """Sigma of the logarithm; 0 makes all equal."""
    most: int = 4_096

    @property
    def mean(self) -> float:
        """Expected tokens, the cut at ``most`` not counted."""
        return self.median * math.exp(self.spread**2 / 2)

    def draw(self, numbers: random.Random) -> int:
        """At least 1."""
        tokens = self.median * math.exp(numbers.gauss(0.0, self.spread)) if self.spread else self.median
        return min(self.most, max(1, round(tokens)))


Wording = Callable[[random.Random, int], str]
"""From random numbers and a length in tokens to a text of that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class of questions."""

    name: str
    share: float
    """Of the arrivals."""
    prompt: Lengths
    answer: Lengths
    wording: Wording
    timeout_ms: int = 60_000
    stalls: bool = False
    category: str = ""
    priority: int = 0

    def work_s(self, speed: Speed, num_slots: int) -> float:
        """Mean time of a full node's forward that one question takes."""
        return self.prompt.mean * speed.prefill_s + self.answer.mean * speed.step_s / num_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """When arrivals come: at random, or in bursts."""

    burst: float = 1.0
    """How much more comes in a burst than on average; 1 is steady."""
    busy_s: float = 1.0
    """Mean length of a burst; nothing comes between bursts."""

    def times(self, rate_per_s: float, num: int, numbers: random.Random) -> list[float]:
        """Ascending moments: Poisson, or Poisson that is switched on and off at random."""
        times: list[float] = []
        now_s, left_s = 0.0, math.inf if self.burst <= 1 else numbers.expovariate(1 / self.busy_s)
        while len(times) < num:
            gap_s = numbers.expovariate(rate_per_s * max(1.0, self.burst))
            while gap_s > left_s:
                gap_s -= left_s
                now_s += left_s + numbers.expovariate(1 / (self.busy_s * (self.burst - 1)))
                left_s = numbers.expovariate(1 / self.busy_s)
            now_s, left_s = now_s + gap_s, left_s - gap_s
            times.append(now_s)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Flashes:
    """Everybody at once, again and again: at the beginning of an hour, after an outage, when a page is sent out."""

    size: int
    """Arrivals of one flash."""
    every_s: float
    within_s: float
    """How long a flash lasts."""

    def times(self, rate_per_s: float, num: int, numbers: random.Random) -> list[float]:
        """Ascending moments; the rate is that of the flashes, whatever is asked for."""
        return sorted(number // self.size * self.every_s + numbers.uniform(0.0, self.within_s) for number in range(num))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A mix of classes at a load."""

    kinds: tuple[Kind, ...]
    load: float
    """Share of what the nodes can do when every slot of theirs is taken."""
    rhythm: Rhythm | Flashes = field(default_factory=Rhythm)

    def rate_per_s(self, speed: Speed, num_slots: int, num_nodes: int) -> float:
        """Arrivals per second that make the load."""
        total = sum(kind.share for kind in self.kinds)
        mean_s = sum(kind.share / total * kind.work_s(speed, num_slots) for kind in self.kinds)
        return self.load * num_nodes / mean_s

    def arrivals(self, rate_per_s: float, num: int, seed: int) -> list[Arrival]:
        """So many questions, in order of arrival."""
        moments, classes, lengths, words = (random.Random(f"{seed}:{part}") for part in ("at", "kind", "long", "text"))
        times = self.rhythm.times(rate_per_s, num, moments)
        shares = [kind.share for kind in self.kinds]
        return [
            _arrival(number, at_s, classes.choices(self.kinds, shares)[0], lengths, words)
            for number, at_s in enumerate(times)
        ]


def _arrival(number: int, at_s: float, kind: Kind, lengths: random.Random, words: random.Random) -> Arrival:
    # Drawn from seeds that depend on the number alone: what one question took does not shift the next one's.
    own_lengths = random.Random(lengths.getrandbits(64))
    own_words = random.Random(words.getrandbits(64))
    prompt_tokens = kind.prompt.draw(own_lengths)
    return Arrival(
        number=number,
        at_s=at_s,
        kind=kind.name,
        text=kind.wording(own_words, prompt_tokens),
        prompt_tokens=prompt_tokens,
        answer_tokens=kind.answer.draw(own_lengths),
        timeout_ms=kind.timeout_ms,
        stalls=kind.stalls,
        category=kind.category,
        priority=kind.priority,
    )


def with_guests(
    make: Callable[[int, int], Sequence[Arrival]], kind: Kind, *, every: int
) -> Callable[[int, int], list[Arrival]]:
    """The same traffic, and one of another class in the middle of every so many; everybody else comes as before."""
    guest = Traffic(kinds=(kind,), load=0.0)

    def made(num: int, seed: int) -> list[Arrival]:
        hosts = make(num, seed)
        moments = [hosts[first].at_s for first in range(every // 2, num, every)]
        guests = zip(guest.arrivals(1.0, len(moments), seed), moments, strict=True)
        invited = [replace(arrival, number=num + arrival.number, at_s=at_s) for arrival, at_s in guests]
        return sorted([*hosts, *invited], key=lambda arrival: arrival.at_s)

    return made


def together(
    first: Callable[[int, int], Sequence[Arrival]], second: Callable[[int, int], Sequence[Arrival]], share: float
) -> Callable[[int, int], list[Arrival]]:
    """Two kinds of traffic at once, the second with this share of all questions."""

    def made(num: int, seed: int) -> list[Arrival]:
        num_second = round(num * share)
        ours, theirs = first(num - num_second, seed), second(num_second, seed)
        renumbered = [replace(arrival, number=len(ours) + arrival.number) for arrival in theirs]
        return sorted([*ours, *renumbered], key=lambda arrival: arrival.at_s)

    return made


def about_anything(vocabulary: Vocabulary) -> Wording:
    """Words at random: every question is about something else."""
    return lambda numbers, length: " ".join(vocabulary.word(numbers.randrange(vocabulary.size)) for _ in range(length))


def about_topics(vocabulary: Vocabulary, num_topics: int, exponent: float) -> Wording:
    """One of so many topics, by Zipf's law; a topic is always asked in the same words, in any order."""
    weights = [1 / rank**exponent for rank in range(1, num_topics + 1)]
    topics = range(num_topics)

    def wording(numbers: random.Random, length: int) -> str:
        topic = numbers.choices(topics, weights)[0]
        words = vocabulary.topic(topic, length)
        numbers.shuffle(words)
        return " ".join(words)

    return wording
