"""The states of one supervised process, and when it is started again.

Invariants and semantics: pure; time comes from the clock. A process that was ready once is started again for ever,
with a delay that doubles at each crash and is forgotten once it stayed ready; one that never became ready is given up
after a few attempts::

    waiting -> starting -> ready <-> not_ready      (both: runs; not_ready says "not now", as when the store is away)
    starting, ready, not_ready -> backing_off -> starting   (it ended by itself)
    starting -> failed                              (it never became ready)
    any of these but failed -> stopping -> stopped  (ordered)

Not here: the processes themselves (``kev.up.child``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from common.errors import InvariantError
from common.ports import Clock


class State(StrEnum):
    """Where a process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not_ready"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


_RUNNING = frozenset({State.STARTING, State.READY, State.NOT_READY})
_MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.WAITING: frozenset({State.STARTING, State.STOPPING}),
        State.STARTING: frozenset({State.READY, State.BACKING_OFF, State.FAILED, State.STOPPING}),
        State.READY: frozenset({State.NOT_READY, State.BACKING_OFF, State.STOPPING}),
        State.NOT_READY: frozenset({State.READY, State.BACKING_OFF, State.STOPPING}),
        State.BACKING_OFF: frozenset({State.STARTING, State.STOPPING}),
        State.STOPPING: frozenset({State.STOPPED}),
        State.STOPPED: frozenset(),
        State.FAILED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When and how often a process that ended is started again."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_after_s: float = 10.0
    """Ready for so long, a process has proved that its earlier crashes are over."""
    max_first_starts: int = 3
    """Attempts to become ready for the first time."""
    start_timeout_s: float = 900.0
    """A process that is not ready by then counts as hung; a first start may have to convert a model."""

    def delay_s(self, num_crashes: int) -> float:
        """Seconds to wait after the n-th crash in a row, from 1."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(num_crashes - 1, 32))


class Lifecycle:
    """State of one process."""

    def __init__(self, policy: RestartPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._state = State.WAITING
        self._since_s = clock.monotonic()
        self._start_at_s = self._since_s
        self._ready_since_s: float | None = None
        self._was_ever_ready = False
        self._num_crashes = 0
        self.num_starts = 0
        """How often it was started."""

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._state

    @property
    def is_running(self) -> bool:
        """Whether there is a process that was not told to stop."""
        return self._state in _RUNNING

    @property
    def in_state_s(self) -> float:
        """Seconds since the last change of state."""
        return self._clock.monotonic() - self._since_s

    @property
    def start_delay_s(self) -> float:
        """Seconds until the next start is due, while backing off."""
        return max(0.0, self._start_at_s - self._clock.monotonic())

    @property
    def is_hung(self) -> bool:
        """Whether it has been starting for too long."""
        return self._state is State.STARTING and self.in_state_s > self._policy.start_timeout_s

    def on_start(self) -> None:
        """A process is being started."""
        self._move(State.STARTING)
        self.num_starts += 1
        self._ready_since_s = None

    def on_health(self, healthy: bool) -> bool:
        """It was asked whether it is healthy; returns whether the state has changed. Late answers change nothing."""
        wanted = State.READY if healthy else State.NOT_READY
        if not self.is_running or self._state is wanted or (self._state is State.STARTING and not healthy):
            return False
        self._move(wanted)
        self._was_ever_ready = True
        if healthy and self._ready_since_s is None:
            self._ready_since_s = self._since_s
        return True

    def on_exit(self) -> None:
        """The process has ended."""
        if self._state is State.STOPPING:
            self._move(State.STOPPED)
            return
        if self._ready_since_s is not None and (
            self._clock.monotonic() - self._ready_since_s >= self._policy.stable_after_s
        ):
            self._num_crashes = 0
        self._num_crashes += 1
        if not self._was_ever_ready and self._num_crashes >= self._policy.max_first_starts:
            self._move(State.FAILED)
            return
        self._move(State.BACKING_OFF)
        self._start_at_s = self._since_s + self._policy.delay_s(self._num_crashes)

    def on_stop(self) -> None:
        """It was told to stop, or must not be started any more; a second order changes nothing."""
        if self._state not in (State.STOPPING, State.STOPPED, State.FAILED):
            self._move(State.STOPPING)

    def _move(self, state: State) -> None:
        if state not in _MOVES[self._state]:
            raise InvariantError(f"a process cannot go from {self._state} to {state}")
        self._state = state
        self._since_s = self._clock.monotonic()
