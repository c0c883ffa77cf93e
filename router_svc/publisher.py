"""Questions from their place on a channel to their outcome: published, watched, published again, let go.

Invariants and semantics: a question that was taken in holds its place until its outcome, or until it is dropped; no
path leaks a place. It is published once, by whoever claims it first, and never after it has ended. What a transport
has no room for keeps its place and is asked again every ``retry_interval_s``, except with policy ``reject``. Where
outcomes do not come by themselves a board is asked for them, and for questions that were lost; also for those whose
outcome was there a moment ago, since a store that is emptied then may not have told it to anybody yet.

Not here: whether a request is accepted (``service``), where a question goes (``channels``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from common.ending import Ending
from common.errors import DrainingError, KevError, RequestConflictError
from common.ports import Clock, OutcomeBoard, WorkStreams
from common.types import OverflowPolicy, WorkItem
from router_svc.budgets import TenantBudgets
from router_svc.channels import ChannelPool
from router_svc.question_pool import failure_of
from router_svc.registrations import Registrations
from router_svc.settings import RouterSettings
from router_svc.submission import PendingQuestion, Submission

_WATCH_INTERVAL_S = 0.05
_SEARCH_INTERVAL_S = 1.0
_ENDED_S = 3.0
"""Aggregators have read an outcome by then, and the store has written it down; so long a question is searched for
after its end."""

_log = logging.getLogger(__name__)


class Publisher:
    """The open questions of a router, for one event loop."""

    def __init__(
        self,
        *,
        work: WorkStreams,
        pool: ChannelPool[PendingQuestion],
        budgets: TenantBudgets[tuple[str, int]],
        registrations: Registrations,
        board: OutcomeBoard | None,
        clock: Clock,
        settings: RouterSettings,
        fingerprint: str,
        wake_up: asyncio.Event,
    ) -> None:
        """Nothing is open.

        Args:
            work: where questions are published.
            pool: where they have their places.
            budgets: what tenants have in flight: every open question.
            registrations: withdrawn and restored here.
            board: asked for outcomes and lost questions; None when ``end`` is called for every outcome.
            clock: for time budgets.
            settings: policies.
            fingerprint: model and tokenizer of the token ids.
            wake_up: set by whoever has something to do for ``run``.
        """
        self._work = work
        self._pool = pool
        self._budgets = budgets
        self._registrations = registrations
        self._board = board
        self._clock = clock
        self._settings = settings
        self._fingerprint = fingerprint
        self._open: dict[tuple[str, int], PendingQuestion] = {}
        self._ended: dict[tuple[str, int], tuple[PendingQuestion, float]] = {}
        """Questions that have left the router because the board knows their outcome, and since when."""
        self._to_publish: deque[PendingQuestion] = deque()
        self._refused: deque[PendingQuestion] = deque()
        self._wake_up = wake_up

    def find(self, key: tuple[str, int]) -> PendingQuestion | None:
        """An open question."""
        return self._open.get(key)

    def take(self, questions: Iterable[PendingQuestion]) -> None:
        """Open questions that have their places; from now on an outcome may come at any moment."""
        for question in questions:
            self._begin(question)
            self._ended.pop(question.key, None)

    async def run(self) -> None:
        """Publish what had to wait, and watch the board, until cancelled; then every wait for a place fails."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_publishing(), name="router-publish")
                if self._board is not None:
                    group.create_task(self._watch(self._board), name="router-watch")
        finally:
            for submission in {question.submission for question in self._open.values()}:
                submission.fail(DrainingError("Kev shut down before the question was its turn; send it again"))

    def claimed(self, questions: Iterable[PendingQuestion]) -> dict[PendingQuestion, WorkItem]:
        """The items to publish now, by question."""
        items = ((question, self._claim(question)) for question in questions)
        return {question: item for question, item in items if item is not None}

    async def publish(self, questions: Iterable[PendingQuestion]) -> list[tuple[PendingQuestion, KevError]]:
        """Publish placed questions in one call, each once, unless it has its outcome or no time left.

        Returns:
            The questions that cannot be published, and why.
        """
        failed = await self._publish(questions)
        self._have_refused_retried()
        return failed

    def published(
        self, items: Iterable[PendingQuestion], refusals: Sequence[KevError | None]
    ) -> list[tuple[PendingQuestion, KevError]]:
        """Note what became of claimed questions; returns those that cannot be published, and why."""
        failed = self._note(items, refusals)
        self._have_refused_retried()
        return failed

    def end(self, key: tuple[str, int], ending: Ending) -> None:
        """A question has its outcome; a second call for it does nothing."""
        question = self._open.get(key)
        if question is not None:
            if ending.finish_reason is not None:
                self._pool.note_outcome(question, failure=failure_of(ending))
            self._drop(question, finished=question.submission.is_settled(question))
            self._move_waiting()

    def drop_all(self, submission: Submission) -> None:
        """Let go of the questions of a submission that failed, or that is there already."""
        for question in submission.questions:
            self._drop(question)
        self._move_waiting()

    # ---- publication

    async def _publish(self, questions: Iterable[PendingQuestion]) -> list[tuple[PendingQuestion, KevError]]:
        items = self.claimed(question for question in questions if question.submission.registered)
        if not items:
            return []
        refusals: Sequence[KevError | None]
        try:
            refusals = await self._work.publish(list(items.values()))
        except KevError as error:
            refusals = [error] * len(items)
        return self._note(items, refusals)

    def _note(
        self, items: Iterable[PendingQuestion], refusals: Sequence[KevError | None]
    ) -> list[tuple[PendingQuestion, KevError]]:
        failed = []
        for question, refusal in zip(items, refusals, strict=True):
            if refusal is None:
                question.submission.settle(question)
            elif refusal.retryable and self._settings.overflow_policy is not OverflowPolicy.REJECT:
                question.claimed = False
                self._refused.append(question)
            else:
                failed.append((question, refusal))
        return failed

    def _have_refused_retried(self) -> None:
        """``run`` may wait without end; with something refused it must look again."""
        if self._refused:
            self._wake_up.set()

    def _claim(self, question: PendingQuestion) -> WorkItem | None:
        """The item to publish now; None: somebody else publishes it, or it has ended."""
        placement = self._pool.find(question)
        if placement is None or question.claimed:
            return None
        remaining_ms = question.remaining_ms(self._clock.monotonic())
        if remaining_ms < 1:
            # The aggregator's sweep gives it its outcome.
            self._drop(question)
            self._move_waiting()
            return None
        question.claimed = True
        return question.item(placement, remaining_ms, self._fingerprint)

    async def _keep_publishing(self) -> None:
        while True:
            await self._publish_waiting()

    async def _watch(self, board: OutcomeBoard) -> None:
        """Free the channels of questions that have their outcome elsewhere; publish again what was lost."""
        next_search_s, is_failing = 0.0, False
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if not (self._open or self._ended):
                continue
            published = [question for question in self._open.values() if question.submission.is_settled(question)]
            try:
                await self._end_settled(board, published)
                if self._clock.monotonic() >= next_search_s:
                    next_search_s = self._clock.monotonic() + _SEARCH_INTERVAL_S
                    await self._restore_lost()
                    await self._search(board, published)
                is_failing = False
            except KevError as error:
                if not is_failing:
                    _log.warning("cannot look for outcomes; trying again: %s", error)
                is_failing = True

    async def _end_settled(self, board: OutcomeBoard, published: Sequence[PendingQuestion]) -> None:
        for key, ending in (await board.settled([question.key for question in published])).items():
            question = self._open.get(key)
            if question is not None:
                self.end(key, ending)
                self._ended[key] = (question, self._clock.monotonic())

    async def _restore_lost(self) -> None:
        """Register again what the store has lost, also of requests whose questions all wait for a place."""
        ended = (question for question, _ in self._ended.values())
        known = {question.submission.spec.request_id: question for question in (*self._open.values(), *ended)}
        registered = [request_id for request_id, question in known.items() if question.submission.registered]
        for request_id in await self._registrations.lost(registered):
            submission = known[request_id].submission
            if submission.record is None or not any(map(self._knows, submission.questions)):
                continue  # withdrawn meanwhile
            _log.warning("request %s was lost and is registered again", request_id)
            age_ms = int((self._clock.monotonic() - submission.accepted_at_s) * 1000)
            if not await self._registrations.restore(submission.record, age_ms):
                submission.fail(RequestConflictError.of(request_id))
                self.drop_all(submission)

    def _knows(self, question: PendingQuestion) -> bool:
        return self._open.get(question.key) is question or question.key in self._ended

    async def _search(self, board: OutcomeBoard, published: Sequence[PendingQuestion]) -> None:
        """Publish again what was lost."""
        begun_s = self._clock.monotonic()
        placed = [question for question in published if self._pool.find(question) is not None]
        lost = await board.lost([*(question.key for question in placed), *self._ended])
        for key in lost:
            question = self._open.get(key) or self._taken_back(key)
            if question is None:
                continue
            _log.warning("question %d of request %s was lost on its way; published again", key[1], key[0])
            question.claimed = False
            self._to_publish.append(question)
            self._wake_up.set()
        still_lost = set(lost)
        self._ended = {
            key: (question, ended_s)
            for key, (question, ended_s) in self._ended.items()
            if ended_s > begun_s - _ENDED_S or key in still_lost
        }

    def _taken_back(self, key: tuple[str, int]) -> PendingQuestion | None:
        """A question that had ended, open again; None: there is none, no time is left, or no room (yet)."""
        question, _ = self._ended.get(key, (None, 0.0))
        if question is None:
            return None
        if question.remaining_ms(self._clock.monotonic()) < 1:
            del self._ended[key]
            return None
        if not (self._pool.place(question, question.choose) or self._pool.enqueue(question, question.choose)):
            return None
        del self._ended[key]
        self._begin(question)
        return question

    async def _publish_waiting(self) -> None:
        """One turn of ``run``: wait for something to do, then do all of it."""
        again = bool(self._refused or self._registrations.has_withdrawals)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.retry_interval_s if again else None):
                await self._wake_up.wait()
        self._wake_up.clear()
        await self._registrations.retry_withdrawals()
        self._to_publish.extendleft(reversed(self._refused))
        self._refused.clear()
        while self._to_publish:
            questions, self._to_publish = self._to_publish, deque()
            for question, error in await self._publish(questions):
                _log.error("could not publish question %d; its time budget ends it: %s", question.index, error)
                question.submission.fail(error)
                self._drop(question)
                self._move_waiting()

    def _move_waiting(self) -> None:
        """Give the places that are free to those who wait; ``run`` publishes them."""
        self._to_publish.extend(question for question, _ in self._pool.drain())
        if self._to_publish:
            self._wake_up.set()

    def _begin(self, question: PendingQuestion) -> None:
        self._open[question.key] = question
        self._budgets.take(question.key, question.submission.spec.tenant, question.prepared.num_tokens)

    def _drop(self, question: PendingQuestion, *, finished: bool = False) -> None:
        """Take a question out of the router, once; ``finished`` if it was published and has its outcome."""
        if self._open.get(question.key) is not question:
            return
        del self._open[question.key]
        self._budgets.give_back(question.key)
        if finished:
            self._pool.release(question, self._clock.monotonic())
        else:
            self._pool.withdraw(question)
        question.submission.settle(question)
