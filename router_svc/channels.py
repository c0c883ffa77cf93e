"""The pool of channels: who is on which channel, and who waits for one.

Invariants and semantics: all channels exist from the start. A question is on exactly one channel, or waits, or is not
here. What a channel holds is bounded in entries and bytes, and so is what waits. Those who wait are served in order of
arrival, less their head starts, whenever room appears: others pass them only on a channel that they could not take.
The breaker sends questions to other channels than their strategy picked, see ``occupancy``; with every breaker open the
shortest channel takes all the same.

Not here: strategies (they come as ``choose``), publishing, time budgets, clocks (``now_s`` is passed in; where it is
left out, the latest time told counts).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from common.errors import InvariantError
from common.types import ChannelSnapshot
from router_svc.breakers import BreakerRules
from router_svc.occupancy import Burden, Limits, Occupancy, Place, Placement, Recent
from router_svc.overflow import OverflowQueue
from router_svc.service_rate import Pace
from router_svc.strategies import Pick

__all__ = ["Burden", "ChannelPool", "Chooser", "Placement"]


class Chooser(Protocol):
    """Picks a channel for the loads of the moment. Equal choosers pick equally, so their questions form one line."""

    def __call__(self, loads: Sequence[int]) -> Pick:
        """The channel for ``loads``."""
        ...

    def __hash__(self) -> int:
        """Equal choosers have equal hashes."""
        ...


QuestionT = TypeVar("QuestionT", bound=Hashable)
_WEIGHTLESS = Burden()


class ChannelPool(Generic[QuestionT]):
    """Owned by one event loop; every method changes state in one piece."""

    def __init__(
        self,
        num_channels: int,
        *,
        channel_queue_size: int,
        overflow_queue_size: int | None,
        breaker_queue_length: int,
        channel_queue_bytes: int | None = None,
        overflow_queue_bytes: int | None = None,
        breaker: BreakerRules | None = None,
        share_bound: float | None = None,
        recent_s: float = 60.0,
        burden_of: Callable[[QuestionT], Burden] = lambda _: _WEIGHTLESS,
    ) -> None:
        """Create idle channels.

        Args:
            num_channels: at least 1; ids are 0 to this, exclusive.
            channel_queue_size: most outstanding questions on one channel, at least 1.
            overflow_queue_size: most waiting questions; None for no bound, 0 for no overflow queue.
            breaker_queue_length: how much longer than the shortest channel one may be; 0 never diverts.
            channel_queue_bytes: bytes from which on a channel takes no more; None for no bound.
            overflow_queue_bytes: bytes from which on the overflow queue takes no more; None for no bound.
            breaker: when age and failures open a channel's breaker; None: they never do.
            share_bound: most of the latest questions that one channel has, as a multiple of the mean; None: no bound.
            recent_s: window of ``ChannelSnapshot.num_recent``.
            burden_of: asked when a question is placed and when it begins to wait; must always say the same.

        Raises:
            InvariantError: a size is out of range.
        """
        if num_channels < 1 or channel_queue_size < 1 or breaker_queue_length < 0 or (overflow_queue_size or 0) < 0:
            raise InvariantError("a pool needs channels and room on each of them")
        limits = Limits(
            max_entries=channel_queue_size,
            max_bytes=channel_queue_bytes,
            queue_length=breaker_queue_length,
            share_bound=share_bound,
        )
        self._channels: Occupancy[QuestionT] = Occupancy(num_channels, limits, breaker or BreakerRules(), recent_s)
        self._num_places = num_channels * channel_queue_size
        self._placed: dict[QuestionT, Place] = {}
        self._waiting: OverflowQueue[QuestionT, Chooser] = OverflowQueue(overflow_queue_size, overflow_queue_bytes)
        self._burden_of = burden_of
        self._pace = Pace()
        self._now_s: float | None = None

    @property
    def num_outstanding(self) -> int:
        """Questions on channels."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Questions in the overflow queue."""
        return len(self._waiting)

    @property
    def loads(self) -> tuple[int, ...]:
        """Outstanding questions per channel."""
        return tuple(self._channels.loads)

    def shortage(self, num_questions: int) -> int:
        """How many of so many new questions certainly find no room now, whatever their channels."""
        room = self._waiting.room
        if room is None:
            return 0
        return max(0, num_questions - (self._num_places - len(self._placed)) - room)

    def find(self, question: QuestionT) -> Placement | None:
        """Where a question is; None while it waits or when it is not here."""
        place = self._placed.get(question)
        return None if place is None else place.placement

    def preview(self, choose: Chooser) -> Placement:
        """The strategy's pick for the loads of the moment, room or not; changes nothing."""
        pick = choose(self._channels.loads)
        return Placement(channel_id=pick.channel_id, hash_bucket=pick.hash_bucket)

    def place(self, question: QuestionT, choose: Chooser, *, now_s: float | None = None) -> Placement | None:
        """Put a question on a channel; None when there is no room for it.

        Raises:
            InvariantError: the question is already here.
        """
        self._check_new(question)
        if now_s is not None:
            self._move_to(now_s)
        return self._try_place(question, choose, now_s)

    def enqueue(self, question: QuestionT, choose: Chooser) -> bool:
        """Let a question wait in the overflow queue, from now on or as its head start says; False when it is full.

        Raises:
            InvariantError: the question is already here.
        """
        self._check_new(question)
        burden = self._burden_of(question)
        return self._waiting.add(question, choose, burden.num_bytes, (self._now_s or 0.0) - burden.head_start_s)

    def drain(self, *, now_s: float | None = None) -> list[tuple[QuestionT, Placement]]:
        """Place every waiting question for which there is room now, in order."""
        if now_s is not None:
            self._move_to(now_s)
        moved: list[tuple[QuestionT, Placement]] = []

        def try_place(question: QuestionT, choose: Chooser) -> bool:
            placement = self._try_place(question, choose, self._now_s) if self._has_place else None
            if placement is not None:
                moved.append((question, placement))
            return placement is not None

        if len(self._waiting) and self._has_place:
            self._waiting.serve(try_place)
        return moved

    def note_outcome(self, question: QuestionT, *, failure: str | None) -> None:
        """Say how a placed question ended, before it is released: a kind of failure, or empty for a success.

        None: its outcome says nothing about its channel. Without this call an outcome after the end of the time budget
        is a failure, and any other a success. A question that is on no channel is none of the breaker's business.
        """
        place = self._placed.get(question)
        if place is not None:
            place.failure, place.says_nothing = failure, failure is None

    def release(self, question: QuestionT, now_s: float) -> None:
        """Take a question off its channel because it has its outcome.

        Args:
            question: placed before.
            now_s: seconds of a clock that never runs backwards; feeds ``releases_per_s``.

        Raises:
            InvariantError: the question is on no channel.
        """
        place = self._placed.pop(question, None)
        if place is None:
            raise InvariantError("released a question that is on no channel")
        self._move_to(now_s)
        self._channels.take_off(question, place)
        self._channels.judge(place, now_s)
        self._pace.release(now_s)
        self._note_work(now_s)

    def withdraw(self, question: QuestionT) -> None:
        """Forget a question that will never run, on a channel or waiting; its place is not counted as used.

        Raises:
            InvariantError: the question is not here.
        """
        if question in self._waiting:
            self._waiting.remove(question)
            return
        place = self._placed.pop(question, None)
        if place is None:
            raise InvariantError("withdrew a question that is not in the pool")
        self._channels.take_off(question, place)
        self._channels.forget(place)
        self._note_work(self._now_s)

    def releases_per_s(self, now_s: float | None = None) -> float | None:
        """Pace at which places become free while every channel has work; None: not known yet."""
        return self._pace.per_s(self._now_s if now_s is None else now_s)

    def recent(self, now_s: float | None = None) -> list[Recent]:
        """What was placed on each channel in the window, index = channel id."""
        return self._channels.recent(self._now_s if now_s is None else now_s)

    def snapshots(self, now_s: float | None = None) -> list[ChannelSnapshot]:
        """Occupancy of every channel, by id."""
        if now_s is not None:
            self._move_to(now_s, look_at_once=True)
        return self._channels.snapshots(self._now_s)

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            InvariantError: the counts do not match who is here.
        """
        self._channels.check_integrity()
        if sum(self._channels.loads) != len(self._placed):
            raise InvariantError(f"channel loads are {self._channels.loads}, {len(self._placed)} questions are placed")
        if any(question in self._waiting for question in self._placed):
            raise InvariantError("a question is on a channel and waits for one")
        self._waiting.check_integrity()

    @property
    def _has_place(self) -> bool:
        return len(self._placed) < self._num_places

    def _check_new(self, question: QuestionT) -> None:
        if question in self._placed or question in self._waiting:
            raise InvariantError("the question is already in the pool")

    def _try_place(self, question: QuestionT, choose: Chooser, now_s: float | None) -> Placement | None:
        pick = choose(self._channels.loads)
        channel_id, why = pick.channel_id, None
        if pick.may_divert:
            channel_id, why = self._channels.detour(channel_id, pick.lane)
        if not self._channels.has_room(channel_id):
            return None
        placement = Placement(
            channel_id=channel_id,
            hash_bucket=pick.hash_bucket,
            diverted_from=None if why is None else pick.channel_id,
            diverted_why=why,
        )
        self._placed[question] = self._channels.put_on(question, placement, self._burden_of(question), self._now_s)
        self._note_work(now_s)
        return placement

    def _note_work(self, now_s: float | None) -> None:
        is_full = not self._channels.num_idle or bool(self._waiting)
        self._pace.note(has_work=bool(self._placed), is_full=is_full, now_s=now_s)

    def _move_to(self, now_s: float, *, look_at_once: bool = False) -> None:
        self._now_s = now_s if self._now_s is None else max(now_s, self._now_s)
        self._channels.look(self._now_s, at_once=look_at_once)
