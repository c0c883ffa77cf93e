"""Who runs when: systems take turns on a work, round after round.

Invariants and semantics: first every system answers some of the questions alone, which is its warm-up and tells what
its answers are without company; then come the rounds, in each of which every system runs once, there and back by turns:
who runs after whom tells in caches and clocks. A system that has used its time is left out of later rounds; its first
round always runs, unless the questions alone already failed. Whatever a system does, the others go on.

Not here: processes (``peer_process``), statistics (``readings``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.compare.catalogue import System
from bench.compare.peer_process import Turn
from bench.compare.readings import Reading, Round, Status, summarize, unequal_work
from bench.compare.wire import Answered, Failed, Message
from bench.compare.works import Work, spread

_LATE_FACTOR = 10.0
"""A turn that takes this many times the limit of a system's whole work is taken for hung."""


class Player(Protocol):
    """What can take a turn (``PeerProcess``)."""

    def turn(self, order: Message, limit_s: float) -> Turn:
        """Carry out one order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A system at the table."""

    system: System
    player: Player | None = None
    """None: it is not there."""
    status: Status = Status.MEASURED
    note: str = ""
    """Why it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How much is measured."""

    num_rounds: int = 3
    num_alone: int = 8
    """Questions that are also asked alone; fewer when they take half the limit. 0 compares nothing."""
    limit_s: float = 240.0
    """Seconds that one system may take on one work."""


@dataclass(slots=True, kw_only=True)
class _Course:
    """How far one system has come."""

    seat: Seat
    player: Player
    alone: dict[int, str] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    used_s: float = 0.0
    failed: Failed | None = None
    is_out_of_time: bool = False


def measure(work: Work, seats: Sequence[Seat], rules: Rules, tell: Callable[[str], None]) -> list[Reading]:
    """All systems on one work; ``tell`` hears of every turn before it starts."""
    courses = {seat.system.name: _Course(seat=seat, player=seat.player) for seat in seats if seat.player is not None}
    stages = ["alone", *(f"round {number + 1} of {rules.num_rounds}" for number in range(rules.num_rounds))]
    there = list(courses.values())
    steps = [(stage, course) for index, stage in enumerate(stages) for course in (there[::-1] if index % 2 else there)]
    for number, (stage, course) in enumerate(steps, 1):
        tell(f"{number}/{len(steps)} {work.name}, {stage}: {course.seat.system.label}")
        ask = _ask_alone if stage == "alone" else _ask_together
        ask(work, course, rules)
    return [_reading(work, seat, courses.get(seat.system.name), rules) for seat in seats]


def _ask_alone(work: Work, course: _Course, rules: Rules) -> None:
    for index in spread(len(work.asks), rules.num_alone):
        if course.used_s > rules.limit_s / 2:
            return
        order = work.alone(index, course.seat.system.level)
        reply = course.player.turn(order, _LATE_FACTOR * rules.limit_s).reply
        if not isinstance(reply, Answered) or not reply.answers:
            course.failed = reply if isinstance(reply, Failed) else Failed(message="no answer")
            return
        course.alone[index] = reply.answers[0].output
        course.used_s += reply.total_s


def _ask_together(work: Work, course: _Course, rules: Rules) -> None:
    if course.failed is not None or course.is_out_of_time:
        return
    if course.rounds and course.used_s + course.rounds[-1].answered.total_s > rules.limit_s:
        course.is_out_of_time = True
        return
    turn = course.player.turn(work.order(course.seat.system.level), _LATE_FACTOR * rules.limit_s)
    if not isinstance(turn.reply, Answered):
        course.failed = turn.reply if isinstance(turn.reply, Failed) else Failed(message="no answers")
        return
    if wrong := unequal_work(work, turn.reply):
        course.failed = Failed(message=wrong)
        return
    course.rounds.append(Round(answered=turn.reply, peak_rss_bytes=turn.peak_rss_bytes, cpu_s=turn.cpu_s))
    course.used_s += turn.reply.total_s


def _reading(work: Work, seat: Seat, course: _Course | None, rules: Rules) -> Reading:
    name = seat.system.name
    if course is None:
        return Reading(work=work.name, system=name, status=seat.status, note=seat.note)
    if course.failed is not None:
        status = Status.FAILED if course.failed.offered else Status.NOT_OFFERED
        return Reading(work=work.name, system=name, status=status, note=course.failed.message)
    if not course.rounds:
        return Reading(work=work.name, system=name, status=Status.SKIPPED, note="no round was run")
    note = f"{len(course.rounds)} of {rules.num_rounds} rounds: limit of {rules.limit_s:,.0f} s"
    return summarize(work, name, course.rounds, course.alone, note if course.is_out_of_time else "")
