"""How long questions wait for a slot: Erlang's formula, and a simulation under a virtual clock that checks it.

Invariants and semantics: questions arrive at random (Poisson), each goes to a channel in turn unless the breaker sends
it to the shortest one, channels are first in, first out, and a node works on at most one question of a channel at a
time, in as many slots as it has; the oldest head goes first. A node that dies loses what it had; when its silence is
noticed the questions are back at the head of their channels with one attempt more. Time is a number that jumps from
event to event; the same seed gives the same run.

Not here: what a deployment needs (``plan``).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count


def erlang_c(num_servers: int, offered: float) -> float:
    """Probability that an arrival has to wait in M/M/c.

    Source: A. K. Erlang 1917; computed by the stable recursion of Erlang B (Jagerman 1974).

    Args:
        num_servers: servers, at least 1.
        offered: arrival rate times mean service time; 1 or more per server always waits.
    """
    if offered >= num_servers:
        return 1.0
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    busy = offered / num_servers
    return blocked / (1 - busy + busy * blocked)


def mean_wait_s(num_servers: int, arrivals_per_s: float, service_s: float) -> float:
    """Mean wait in M/M/c, of all arrivals; infinite when more comes than can be served."""
    spare_per_s = num_servers / service_s - arrivals_per_s
    if spare_per_s <= 0:
        return math.inf
    return erlang_c(num_servers, arrivals_per_s * service_s) / spare_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What is simulated."""

    arrivals_per_s: float
    service_s: float
    """Mean; exponential unless ``steady``."""
    num_nodes: int = 1
    slots_per_node: int = 8
    num_channels: int = 64
    num_questions: int = 20_000
    num_warmup: int = 1_000
    """First questions, not counted."""
    breaker: bool = True
    """A question whose channel is longer than the shortest goes there (``router.breaker_queue_length: 1``)."""
    steady: bool = False
    """Every question takes the same time."""
    seconds_between_deaths: float = math.inf
    """Mean time between deaths of one node; it is back when its death is noticed."""
    notice_s: float = 3.0
    """From a death until its questions are back in line: heartbeat or lease."""
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class QueueReading:
    """What happened to the questions after the warm-up."""

    num_finished: int = 0
    num_waited: int = 0
    wait_s: float = 0.0
    """Sum, from arrival to the first start."""
    stay_s: float = 0.0
    """Sum, from arrival to the end."""
    busy_s: float = 0.0
    """Slot-seconds, wasted ones included."""
    wasted_s: float = 0.0
    """Slot-seconds of attempts that died."""
    num_attempts: int = 0
    span_s: float = 0.0
    """From the first counted arrival to the last end."""

    @property
    def mean_wait_s(self) -> float:
        """Mean wait."""
        return self.wait_s / self.num_finished

    @property
    def share_waited(self) -> float:
        """Share of questions that did not start at once."""
        return self.num_waited / self.num_finished


class _Kind(IntEnum):
    ARRIVAL = 0
    END = 1
    DEATH = 2
    NOTICE = 3


@dataclass(slots=True, eq=False)
class _Question:
    number: int
    channel_id: int
    arrived_s: float
    begun_s: float | None = None
    started_s: float = 0.0
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    running: dict[int, _Question] = field(default_factory=dict)
    """By channel: at most one each."""
    lives: int = 0
    alive: bool = True


class QueueModel:
    """One simulation."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._numbers = random.Random(settings.seed)
        self._events: list[tuple[float, int, _Kind, object]] = []
        self._order = count()
        self._channels: list[deque[_Question]] = [deque() for _ in range(settings.num_channels)]
        self._outstanding = [0] * settings.num_channels
        self._waiting: set[int] = set()
        self._nodes = [_Node() for _ in range(settings.num_nodes)]
        self._now_s = 0.0
        self._first_s: float | None = None
        self._left = settings.num_questions
        self.reading = QueueReading()

    def run(self) -> QueueReading:
        """Until every question has ended."""
        self._at(self._numbers.expovariate(self._settings.arrivals_per_s), _Kind.ARRIVAL, 0)
        for node in self._nodes:
            self._plan_death(node)
        while self._left:
            self._now_s, _, kind, subject = heapq.heappop(self._events)
            if kind is _Kind.ARRIVAL:
                self._arrive(subject)  # type: ignore[arg-type]
            elif kind is _Kind.END:
                self._end(*subject)  # type: ignore[misc]
            elif kind is _Kind.DEATH:
                self._die(subject)  # type: ignore[arg-type]
            else:
                self._notice(subject)  # type: ignore[arg-type]
            self._start_what_can()
        self.reading.span_s = self._now_s - (self._first_s or 0.0)
        return self.reading

    def _at(self, time_s: float, kind: _Kind, subject: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), kind, subject))

    def _arrive(self, number: int) -> None:
        settings = self._settings
        channel_id = number % settings.num_channels
        if settings.breaker and self._outstanding[channel_id] > min(self._outstanding):
            channel_id = self._outstanding.index(min(self._outstanding))
        self._outstanding[channel_id] += 1
        question = _Question(number, channel_id, self._now_s)
        self._channels[question.channel_id].append(question)
        self._waiting.add(question.channel_id)
        if number == settings.num_warmup:
            self._first_s = self._now_s
        if number + 1 < settings.num_questions:
            self._at(self._now_s + self._numbers.expovariate(settings.arrivals_per_s), _Kind.ARRIVAL, number + 1)

    def _start_what_can(self) -> None:
        """Give the oldest heads to the nodes with the most room."""
        if not self._waiting:
            return
        free = [node for node in self._nodes if node.alive and len(node.running) < self._settings.slots_per_node]
        while free:
            heads = [c for c in self._waiting if any(c not in node.running for node in free)]
            if not heads:
                return
            channel_id = min(heads, key=lambda c: self._channels[c][0].number)
            node = min((n for n in free if channel_id not in n.running), key=lambda n: len(n.running))
            self._start(node, channel_id)
            free = [n for n in free if len(n.running) < self._settings.slots_per_node]

    def _start(self, node: _Node, channel_id: int) -> None:
        settings = self._settings
        question = self._channels[channel_id].popleft()
        if not self._channels[channel_id]:
            self._waiting.discard(channel_id)
        node.running[channel_id] = question
        question.attempts += 1
        question.started_s = self._now_s
        question.begun_s = self._now_s if question.begun_s is None else question.begun_s
        service_s = settings.service_s if settings.steady else self._numbers.expovariate(1 / settings.service_s)
        self._at(self._now_s + service_s, _Kind.END, (node, node.lives, question))

    def _end(self, node: _Node, life: int, question: _Question) -> None:
        if node.lives != life:
            return  # it had died before
        del node.running[question.channel_id]
        self._outstanding[question.channel_id] -= 1
        self._left -= 1
        if question.number < self._settings.num_warmup or question.begun_s is None:
            return
        waited_s = question.begun_s - question.arrived_s
        reading = self.reading
        reading.num_finished += 1
        reading.num_waited += waited_s > 0
        reading.wait_s += waited_s
        reading.stay_s += self._now_s - question.arrived_s
        reading.busy_s += self._now_s - question.started_s
        reading.num_attempts += question.attempts

    def _plan_death(self, node: _Node) -> None:
        if math.isfinite(self._settings.seconds_between_deaths):
            lives_s = self._numbers.expovariate(1 / self._settings.seconds_between_deaths)
            self._at(self._now_s + lives_s, _Kind.DEATH, node)

    def _die(self, node: _Node) -> None:
        node.alive = False
        node.lives += 1
        self._at(self._now_s + self._settings.notice_s, _Kind.NOTICE, node)
        for question in node.running.values():
            if question.number >= self._settings.num_warmup:
                spent_s = self._now_s - question.started_s
                self.reading.wasted_s += spent_s
                self.reading.busy_s += spent_s

    def _notice(self, node: _Node) -> None:
        for channel_id, question in node.running.items():
            self._channels[channel_id].appendleft(question)
            self._waiting.add(channel_id)
        node.running.clear()
        node.alive = True
        self._plan_death(node)


def simulate(settings: QueueSettings) -> QueueReading:
    """Run the model once."""
    return QueueModel(settings).run()
