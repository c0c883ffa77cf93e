"""The engine core: one step is schedule, one isolated forward, update; and the thread that takes the steps.

Invariants and semantics: everything mutable of the engine belongs to one thread. Other threads talk to it through an
inbox of small commands, which it empties between steps; events leave through one callback. An error inside a forward
fails the questions of that forward; a device that is lost or an error in Kev's own books ends the thread, and ``alive``
turns false: the books are not touched any more, the outcomes of all questions are left to the owner of the thread. So
does a step that does not return, once somebody gives it up; what it gives after that is dropped.

Not here: leases and streams (``worker``), the event loop.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from common.errors import EngineDeadError, KevError, UnsupportedModelError
from common.types import ChannelEvent
from inference_svc.plan import StepOutput, StepPlan
from inference_svc.replay import Replayer
from inference_svc.scheduler import Scheduler
from inference_svc.sequence import Sequence

_LOG = logging.getLogger("kev.engine")

_IDLE_WAIT_S = 0.5
"""Longest sleep while questions wait that cannot start yet; commands and deadlines end it earlier."""


class Runner(Protocol):
    """What executes a plan (``model_runner.ModelRunner``; ``kev.testing.ScriptedRunner``)."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one forward.

        Raises:
            KevError: the forward as a whole is impossible; its questions fail.
            EngineDeadError: so is every later one; the engine ends.
        """
        ...


class EngineCore:
    """Scheduler and runner, step by step."""

    def __init__(self, scheduler: Scheduler, runner: Runner, replayer: Replayer | None = None) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._replayer = replayer

    def step(self) -> list[ChannelEvent]:
        """One schedule, one forward, one update; returns what there is to report."""
        plan = self.scheduler.schedule()
        events = self.scheduler.take_events() if plan is None else self.scheduler.update(plan, self._execute(plan))
        ended = self.scheduler.take_ended()
        if self._replayer is None:
            return events
        return self._replayer.hold_back(events, ended) + self._replayer.advance()

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self.scheduler.has_work or self.is_replaying

    @property
    def is_replaying(self) -> bool:
        """Answers wait for their replay."""
        return self._replayer is not None and self._replayer.has_work

    def fail_all(self, error: KevError) -> list[ChannelEvent]:
        """End every question with an error outcome; answers that wait for their replay go out."""
        events = self.scheduler.fail_all(error)
        if self._replayer is None:
            return events
        return self._replayer.hold_back(events, ()) + self._replayer.give_up()

    def _execute(self, plan: StepPlan) -> StepOutput:
        try:
            return self._runner.execute(plan)
        except EngineDeadError:
            raise
        except Exception as error:
            _LOG.exception("forward %d failed", plan.step_index)
            failure = error if isinstance(error, KevError) else UnsupportedModelError(_forward_failed(plan))
            return StepOutput(errors={segment.sequence_id: failure for segment in plan.segments})


class EngineThread:
    """Runs the core on a thread of its own. All methods may be called from any thread."""

    def __init__(self, core: EngineCore, on_events: Callable[[list[ChannelEvent]], None]) -> None:
        """Prepare the thread.

        Args:
            core: the engine; belongs to the thread from ``start`` on.
            on_events: called on the engine thread with what there is to report; must not block.
        """
        self._core = core
        self._on_events = on_events
        self._inbox: deque[Callable[[Scheduler], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: EngineDeadError | None = None
        self._num_steps = 0
        self._in_step = False
        self._thread = threading.Thread(target=self._run, name="kev-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """The thread is able to take steps."""
        return self._thread.is_alive() and self._failure is None

    @property
    def failure(self) -> EngineDeadError | None:
        """Set when the thread has ended by itself; ``on_events`` is then called a last time, with nothing."""
        return self._failure

    @property
    def step_in_flight(self) -> int | None:
        """Number of the step that is being taken, from 1; None between steps."""
        return self._num_steps if self._in_step else None

    @property
    def has_ended(self) -> bool:
        """The thread does nothing any more, not even a step that was given up."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Start taking steps."""
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        """Hand over a question.

        Raises:
            EngineDeadError: the thread has ended.
        """
        self._command(lambda scheduler: scheduler.add(sequence))

    def cancel(self, request_id: str, question_index: int) -> None:
        """End a question before the next step; does nothing if it has ended."""
        if self.alive:
            self._command(lambda scheduler: scheduler.cancel(request_id, question_index))

    def fail(self, error: EngineDeadError) -> None:
        """End before the next step, as if the last one had failed; for whoever sees that the device is lost."""

        def end(_: Scheduler) -> None:
            raise error

        if self.alive:
            self._command(end)

    def abandon(self, error: EngineDeadError) -> None:
        """End as if the step in flight had failed, though it has not returned; it is the thread's last one."""
        with self._wake:
            if self._failure is not None:
                return
            self._failure = error
            self._wake.notify()
        self._on_events([])

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step in flight; questions still running get an error outcome.

        One that was given up is not waited for.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        given_up = self._failure is not None and self._in_step
        if self._thread.is_alive() and not given_up:
            self._thread.join(timeout_s)

    def _command(self, command: Callable[[Scheduler], object]) -> None:
        with self._wake:
            if self._failure is not None:
                raise self._failure
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                self._report(self._stepped())
            self._report(self._core.fail_all(EngineDeadError("the engine was shut down")))
        except Exception as error:
            _LOG.exception("the engine thread ends")
            told = EngineDeadError("the engine has ended after an internal error; restart Kev")
            self.abandon(error if isinstance(error, EngineDeadError) else told)

    def _stepped(self) -> list[ChannelEvent]:
        self._num_steps += 1
        self._in_step = True
        try:
            return self._core.step()
        finally:
            self._in_step = False

    def _obey(self) -> bool:
        """Carry out waiting commands, sleeping while there is nothing to do. False: stop."""
        core, scheduler = self._core, self._core.scheduler
        with self._wake:
            while not self._inbox and not core.has_work and not self._stopping and self._failure is None:
                self._wake.wait()
            if not self._inbox and not scheduler.num_running and not core.is_replaying and not self._stopping:
                self._wake.wait(_IDLE_WAIT_S)
            if self._failure is not None:
                raise self._failure
            commands, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for command in commands:
            command(scheduler)
        return not stopping

    def _report(self, events: list[ChannelEvent]) -> None:
        if events and self._failure is None:
            self._on_events(events)


def _forward_failed(plan: StepPlan) -> str:
    return f"forward {plan.step_index} failed inside the model; the log has the details"
