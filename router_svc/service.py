"""Takes requests in: prepares, routes, registers and publishes every question.

Invariants and semantics: a request is accepted or refused as a whole, and everything that can refuse it for its
content is checked before anything is registered or published. It is registered before any of its questions is
published. A submission that fails or is cancelled after that withdraws its request, and its unpublished questions
never run. A question holds a place on a channel from before its publication until its outcome; no path leaks a place.

Overflow, when no channel has room for a question: ``wait`` holds the submit call until all its questions are
published, first come first served; ``queue`` returns at once and publishes later, in order, while the overflow queue
has room; ``reject`` takes all questions of a request now or none. A request that would find no room in an idle pool
either is a bad request, not a full queue.

The calls of one request id are served one after the other, so that a retry joins what runs already.

Not here: validation (``common.request``), outcomes and deadlines (``aggregator_svc``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from contextlib import suppress
from weakref import WeakValueDictionary

from common.errors import DrainingError, InvalidRequestError, KevError, QueueFullError
from common.ports import Clock, OutcomeBoard, RequestRegistry, WorkStreams
from common.types import ChannelResult, ChannelSnapshot, OverflowPolicy, RequestSpec, RouterStats
from router_svc.channels import ChannelPool, Placement
from router_svc.embedding import Projection
from router_svc.settings import RouterSettings
from router_svc.strategies import RoutingStrategy, build_strategies
from router_svc.submission import PendingQuestion, Submission
from router_svc.tokens import Prepared, PromptTokenizer, prepare

_INLINE_CHARS = 4096
"""Texts up to this long are prepared on the event loop (well under a millisecond); longer ones on a thread."""
_MAX_BUCKETS_SHOWN = 64
_WATCH_INTERVAL_S = 0.05
_SEARCH_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class RouterService:
    """The router, for one event loop."""

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        work: WorkStreams,
        registry: RequestRegistry,
        clock: Clock,
        settings: RouterSettings,
        projection: Projection | None = None,
        board: OutcomeBoard | None = None,
    ) -> None:
        """Create the channel pool and the strategies.

        Args:
            tokenizer: renders prompts.
            work: where questions are published.
            registry: where requests are registered.
            clock: for time budgets.
            settings: sizes and policies.
            projection: the model's table for ``semantic_hash``; None takes a lexical one.
            board: asked for outcomes and lost questions; None when ``on_outcome`` is called for every outcome.

        Raises:
            ConfigError: sizes that do not go together.
        """
        self._tokenizer = tokenizer
        self._work = work
        self._registry = registry
        self._clock = clock
        self._settings = settings
        self._board = board
        self._strategies = build_strategies(settings, tokenizer.encode_plain, projection)
        overflow_queue_sizes = {OverflowPolicy.WAIT: None, OverflowPolicy.QUEUE: settings.overflow_queue_size}
        self._pool: ChannelPool[PendingQuestion] = ChannelPool(
            settings.channel_pool_size,
            channel_queue_size=settings.channel_queue_size,
            overflow_queue_size=overflow_queue_sizes.get(settings.overflow_policy, 0),
            breaker_queue_length=settings.breaker_queue_length,
        )
        self._open: dict[tuple[str, int], PendingQuestion] = {}
        self._to_publish: deque[PendingQuestion] = deque()
        self._refused: deque[PendingQuestion] = deque()
        self._to_withdraw: dict[str, None] = {}
        self._wake_up = asyncio.Event()
        self._id_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._draining = False
        self._num_requests = self._num_questions = self._num_rejected = self._num_removed_chars = 0
        self._bucket_counts: Counter[int] = Counter()

    # ---- what the surfaces call

    async def submit(self, spec: RequestSpec) -> str:
        """Accept a request and return its id; the same id with the same content joins the request that is there.

        With policy ``wait`` the call returns when every question is published; cancelling it withdraws the request.

        Raises:
            DrainingError: shutting down.
            RequestConflictError: the id is taken by a request with other content.
            PromptTooLongError: questions do not fit their context; nothing was run.
            InvalidRequestError: more questions than the pool could ever take under this policy.
            QueueFullError: no room now (policies ``queue`` and ``reject``); nothing was run.
        """
        try:
            return await self._submit(spec)
        except QueueFullError:
            self._num_rejected += 1
            raise

    async def _submit(self, spec: RequestSpec) -> str:
        self._check_open()
        accepted_at_s = self._clock.monotonic()
        async with self._lock_of(spec.request_id):
            await self._withdraw_if_due(spec.request_id)
            if await self._registry.lookup(spec.request_id, spec.content_digest):
                return spec.request_id
            self._check_room(len(spec.questions))
            strategy = self._strategies[spec.strategy]
            submission = Submission(spec, await self._prepare(spec, strategy), strategy, accepted_at_s)
            self._check_open()
            placements = self._admit(submission)
            if not await self._register(submission, placements):
                return spec.request_id
        await self._publish_all(submission)
        return spec.request_id

    def on_outcome(self, result: ChannelResult) -> None:
        """Free the channel of a question that has its outcome; a second call for a question does nothing."""
        self._end(result.key)

    def channels(self) -> list[ChannelSnapshot]:
        """Occupancy of every channel, by id."""
        return self._pool.snapshots()

    def stats(self) -> RouterStats:
        """Counters since start."""
        return RouterStats(
            num_requests=self._num_requests,
            num_questions=self._num_questions,
            num_rejected=self._num_rejected,
            num_overflow=self._pool.num_waiting,
            num_removed_chars=self._num_removed_chars,
            bucket_counts=tuple(self._bucket_counts.most_common(_MAX_BUCKETS_SHOWN)),
        )

    def begin_drain(self) -> None:
        """Accept no new requests; those accepted go on until ``run`` is cancelled."""
        self._draining = True

    def check_integrity(self) -> None:
        """Recount the places.

        Raises:
            InvariantError: a place is leaked or lost.
        """
        self._pool.check_integrity()

    async def run(self) -> None:
        """Publish questions that had to wait, for as long as the router lives; submit calls rely on it.

        Ends only by cancellation (the end of the drain); submit calls that still wait then raise ``DrainingError``.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_publishing(), name="router-publish")
                if self._board is not None:
                    group.create_task(self._watch(self._board), name="router-watch")
        finally:
            self._draining = True
            for submission in {question.submission for question in self._open.values()}:
                submission.fail(DrainingError("Kev shut down before the question was its turn; send it again"))

    # ---- acceptance

    def _lock_of(self, request_id: str) -> asyncio.Lock:
        lock = self._id_locks.get(request_id)
        if lock is None:
            lock = self._id_locks[request_id] = asyncio.Lock()
        return lock

    def _check_open(self) -> None:
        if self._draining:
            raise DrainingError("Kev is shutting down and accepts no new requests; send it to another instance")

    def _check_room(self, num_questions: int) -> None:
        """Refuse what certainly has no room before any work is spent on it."""
        num_missing = self._pool.shortage(num_questions)
        if num_missing:
            raise self._no_room(num_questions, num_missing)

    async def _prepare(self, spec: RequestSpec, strategy: RoutingStrategy) -> list[Prepared]:
        num_chars = sum(len(question.text) + len(spec.system_prompt) for question in spec.questions)
        if num_chars <= _INLINE_CHARS:
            return prepare(spec, self._tokenizer, strategy, self._settings)
        return await asyncio.to_thread(prepare, spec, self._tokenizer, strategy, self._settings)

    def _admit(self, submission: Submission) -> list[Placement]:
        """Take a place on a channel or in the overflow queue for every question, or for none.

        Returns:
            Placements for the registration; a waiting question's is where it would go by its strategy alone.
        """
        placements: list[Placement] = []
        admitted: list[PendingQuestion] = []
        for question in submission.questions:
            placement = self._pool.place(question, question.choose)
            if placement is not None or self._pool.enqueue(question, question.choose):
                placements.append(placement or self._pool.preview(question.choose))
                admitted.append(question)
        num_questions = len(submission.questions)
        if len(admitted) < num_questions:
            for question in admitted:
                self._pool.withdraw(question)
            raise self._no_room(num_questions, num_questions - len(admitted))
        # From here on an outcome may come at any moment, even before the registration has returned.
        self._open.update((question.key, question) for question in submission.questions)
        return placements

    def _no_room(self, num_questions: int, num_missing: int) -> KevError:
        if not self._pool.num_outstanding and not self._pool.num_waiting:
            return InvalidRequestError.of(
                "queries",
                f"the {num_questions} questions do not fit into the channels even when all are idle "
                f"({num_missing} find no room); send fewer at a time or set router.overflow_policy to wait",
            )
        retry_after_s = self._pool.retry_after_s(num_missing)
        return QueueFullError(
            f"no room for {num_missing} of {num_questions} questions (overflow_policy "
            f"{self._settings.overflow_policy}); try again in about {retry_after_s:.2g} s",
            retry_after_s=retry_after_s,
        )

    async def _register(self, submission: Submission, placements: list[Placement]) -> bool:
        spec = submission.spec
        try:
            submission.record = record = submission.make_record(placements)
            is_new = await self._registry.register(record)
        except BaseException as error:
            self._drop_all(submission)
            if not isinstance(error, KevError):
                # Interrupted half way: the request may be registered.
                self._withdraw_later(spec.request_id)
            raise
        if not is_new:
            self._drop_all(submission)
            return False
        submission.registered = True
        self._num_requests += 1
        self._num_questions += len(placements)
        self._num_removed_chars += sum(q.prepared.normalized.num_removed_chars for q in submission.questions)
        self._bucket_counts.update(placement.hash_bucket for placement in placements)
        return True

    # ---- publication

    async def _publish_all(self, submission: Submission) -> None:
        """Publish what has a channel; with policy ``wait`` also wait for the rest."""
        try:
            for question in [question for question in submission.unsettled if self._pool.find(question)]:
                await self._publish(question)
            if self._refused:
                self._wake_up.set()
            if self._settings.overflow_policy is OverflowPolicy.WAIT:
                await submission.wait_settled()
        except BaseException:
            self._drop_all(submission)
            self._withdraw_later(submission.spec.request_id)
            await self._try_withdraw(submission.spec.request_id)
            raise

    async def _publish(self, question: PendingQuestion) -> None:
        """Publish a placed question once, unless it has its outcome or no time left.

        A transport that has no room keeps the question's place taken and is asked again by ``run``, except with
        policy ``reject``.
        """
        placement = self._pool.find(question)
        if placement is None or question.claimed or not question.submission.registered:
            return
        remaining_ms = question.remaining_ms(self._clock.monotonic())
        if remaining_ms < 1:
            # The aggregator's sweep gives it its outcome.
            self._drop(question)
            self._move_waiting()
            return
        question.claimed = True
        try:
            await self._work.publish(question.item(placement, remaining_ms, self._tokenizer.fingerprint))
        except KevError as error:
            if not error.retryable or self._settings.overflow_policy is OverflowPolicy.REJECT:
                raise
            question.claimed = False
            self._refused.append(question)
            return
        question.submission.settle(question)

    async def _keep_publishing(self) -> None:
        while True:
            await self._publish_waiting()

    async def _watch(self, board: OutcomeBoard) -> None:
        """Free the channels of questions that have their outcome elsewhere; publish again what was lost."""
        next_search_s = 0.0
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            published = [question.key for question in self._open.values() if question.claimed]
            if not published:
                continue
            try:
                for key in await board.settled(published):
                    self._end(key)
                if self._clock.monotonic() >= next_search_s:
                    next_search_s = self._clock.monotonic() + _SEARCH_INTERVAL_S
                    await self._publish_again(await board.lost([key for key in published if key in self._open]))
            except KevError:
                _log.exception("could not look for outcomes; trying again")

    async def _publish_again(self, lost: list[tuple[str, int]]) -> None:
        """Publish lost questions again; whoever lost them may have lost the registration of their request too."""
        known: set[Submission] = set()
        for key in lost:
            question = self._open.get(key)
            if question is None or question.submission.record is None:
                continue
            if question.submission not in known:
                await self._registry.register(question.submission.record)
                known.add(question.submission)
            _log.warning("question %d of request %s was lost on its way; published again", key[1], key[0])
            question.claimed = False
            self._to_publish.append(question)
            self._wake_up.set()

    async def _publish_waiting(self) -> None:
        """One turn of ``run``: wait for something to do, then do all of it."""
        again = bool(self._refused or self._to_withdraw)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.retry_interval_s if again else None):
                await self._wake_up.wait()
        self._wake_up.clear()
        for request_id in list(self._to_withdraw):
            await self._try_withdraw(request_id)
        self._to_publish.extendleft(reversed(self._refused))
        self._refused.clear()
        while self._to_publish:
            question = self._to_publish.popleft()
            try:
                await self._publish(question)
            except KevError as error:
                _log.exception("could not publish question %d; its time budget ends it", question.index)
                question.submission.fail(error)
                self._drop(question)
                self._move_waiting()

    def _move_waiting(self) -> None:
        """Give the places that are free to those who wait; ``run`` publishes them."""
        self._to_publish.extend(question for question, _ in self._pool.drain())
        if self._to_publish:
            self._wake_up.set()

    # ---- the end of a question or request

    def _end(self, key: tuple[str, int]) -> None:
        """A question has its outcome; a second call for it does nothing."""
        question = self._open.get(key)
        if question is not None:
            self._drop(question, finished=question.submission.is_settled(question))
            self._move_waiting()

    def _drop(self, question: PendingQuestion, *, finished: bool = False) -> None:
        """Take a question out of the router, once; ``finished`` if it was published and has its outcome."""
        if self._open.get(question.key) is not question:
            return
        del self._open[question.key]
        if finished:
            self._pool.release(question, self._clock.monotonic())
        else:
            self._pool.withdraw(question)
        question.submission.settle(question)

    def _drop_all(self, submission: Submission) -> None:
        for question in submission.questions:
            self._drop(question)
        self._move_waiting()

    def _withdraw_later(self, request_id: str) -> None:
        self._to_withdraw[request_id] = None
        self._wake_up.set()

    async def _try_withdraw(self, request_id: str) -> None:
        """Withdraw now; a failure or an interruption leaves it to ``run``."""
        try:
            async with self._lock_of(request_id):
                await self._withdraw_if_due(request_id)
        except KevError:
            _log.exception("could not withdraw a request; trying again")

    async def _withdraw_if_due(self, request_id: str) -> None:
        """Cancel a request whose submission did not complete; the caller holds the lock of the id."""
        if request_id in self._to_withdraw:
            await self._registry.withdraw(request_id)
            self._to_withdraw.pop(request_id, None)
