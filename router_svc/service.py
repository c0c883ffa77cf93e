"""Takes requests in: prepares, routes, registers and publishes every question.

Invariants and semantics: a request is accepted or refused as a whole, and everything that can refuse it for its
content is checked before anything is registered or published. It is registered before, or together with, the first of
its questions. A submission that fails or is cancelled after that withdraws its request, unless another call has joined
it, and its unpublished questions never run. A question holds a place on a channel from before its publication until its
outcome; no path leaks a place.

Overflow, when no channel has room for a question: ``wait`` holds the submit call until all its questions are
published, first come first served; ``queue`` returns at once and publishes later, in order, while the overflow queue
has room; ``reject`` takes all questions of a request now or none. A request that would find no room in an idle pool
either is a bad request, not a full queue. Who waits is bounded under each policy, in number, in bytes and in time:
a ``wait`` call of which not a single question got to a channel in ``max_wait_ms``, or in the time budget of its
questions, is refused as a full queue. Nothing of it has run then. Once one has, the rest waits as long as it has time.

A call whose request is under way joins it, room or not. A refusal for want of room is given at once: what is under way
here is known, and whether somebody else has the request is asked for a few milliseconds only.

Not here: validation (``common.request``), what a refusal says (``refusals``), what becomes of an accepted question
(``publisher``), outcomes and deadlines (``aggregator_svc``).
"""

from __future__ import annotations

import asyncio
from collections import Counter

from common.ending import Ending
from common.errors import (
    DrainingError,
    KevError,
    QueueFullError,
    RequestConflictError,
    StoreUnavailableError,
)
from common.ports import Clock, Intake, OutcomeBoard, RequestRegistry, WorkStreams
from common.types import ChannelResult, ChannelSnapshot, OverflowPolicy, RequestSpec, RouterStats
from router_svc.budgets import TenantBudgets
from router_svc.channels import Placement
from router_svc.embedding import Projection
from router_svc.heat import Heat
from router_svc.intake import TwoSteps
from router_svc.patience import Patience
from router_svc.publisher import Publisher
from router_svc.question_pool import build_pool
from router_svc.refusals import Refusals
from router_svc.registrations import Registrations
from router_svc.return_line import Refused
from router_svc.settings import RouterSettings
from router_svc.strategies import RoutingStrategy, build_strategies
from router_svc.submission import PendingQuestion, Submission
from router_svc.tokens import Prepared, PromptTokenizer, prepare

_INLINE_CHARS = 4096
"""Texts up to this long are prepared on the event loop (well under a millisecond); longer ones on a thread."""
_MAX_BUCKETS_SHOWN = 64


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
        intake: Intake | None = None,
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
            intake: registers and publishes in one act; None does it in two, with ``registry`` and ``work``.
        """
        self._tokenizer = tokenizer
        self._intake: Intake = intake or TwoSteps(registry, work)
        self._clock = clock
        self._settings = settings
        self._strategies = build_strategies(settings, tokenizer.encode_plain, projection)
        self._pool = build_pool(settings)
        self._patience = Patience(settings.max_wait_ms, clock)
        self._heat = Heat(settings, lambda: self._pool.recent(clock.monotonic()), clock)
        self._budgets: TenantBudgets[tuple[str, int]] = TenantBudgets(
            max_questions=settings.max_tenant_questions,
            max_tokens=settings.max_tenant_tokens,
            weights=dict(settings.tenant_weights),
        )
        wake_up = asyncio.Event()
        self._registrations = Registrations(registry, wake_up.set)
        self._publisher = Publisher(
            work=work,
            pool=self._pool,
            budgets=self._budgets,
            registrations=self._registrations,
            board=board,
            clock=clock,
            settings=settings,
            fingerprint=tokenizer.fingerprint,
            wake_up=wake_up,
        )
        self._refusals = Refusals(settings)
        self._draining = False
        self._num_requests = self._num_questions = self._num_rejected = 0
        self._num_removed_chars = self._num_saved_tokens = 0
        self._bucket_counts: Counter[int] = Counter()

    # ---- what the surfaces call

    async def submit(self, spec: RequestSpec) -> str:
        """Accept a request and return its id; see ``accept``."""
        await self.accept(spec)
        return spec.request_id

    async def accept(self, spec: RequestSpec, *, has_new_id: bool = False) -> bool:
        """Accept a request. True: it is new. False: the same id with the same content joins what is there.

        ``has_new_id``: nobody else can know the id, so a refusal asks nobody whether the request is there. With policy
        ``wait`` the call returns when every question is published; cancelling it withdraws the request.

        Raises:
            DrainingError: shutting down.
            RequestConflictError: the id is taken by a request with other content.
            PromptTooLongError: questions do not fit their context; nothing was run.
            InvalidRequestError: more questions than the pool could ever take under this policy.
            QueueFullError: no room now (policies ``queue`` and ``reject``); nothing was run.
        """
        try:
            return await self._take_in(spec, has_new_id)
        except QueueFullError:
            self._num_rejected += 1
            raise

    async def _take_in(self, spec: RequestSpec, has_new_id: bool) -> bool:
        self._check_open()
        accepted_at_s = self._clock.monotonic()
        async with self._registrations.lock_of(spec.request_id):
            await self._registrations.withdraw_if_due(spec.request_id)
            joined = self._under_way(spec)
            submission = joined or await self._register(spec, accepted_at_s, has_new_id)
        if submission is not None:
            await self._complete(submission)
        return submission is not joined

    def check_room(self, tenant: str = "") -> None:
        """Refuse before anything is spent; only for requests whose id nobody else can know.

        ``tenant`` is who asks, as far as that is known; nothing of it is checked.

        Raises:
            DrainingError: shutting down.
            QueueFullError: there is no room for a single question now.
        """
        self._check_open()
        if self._pool.shortage(1):
            self._num_rejected += 1
            raise self._full("one more question", Refused(tenant=tenant))

    def on_outcome(self, result: ChannelResult) -> None:
        """Free the channel of a question that has its outcome; a second call for a question does nothing."""
        self._publisher.end(result.key, Ending.of(result))

    def channels(self) -> list[ChannelSnapshot]:
        """Occupancy of every channel, by id."""
        return self._pool.snapshots(self._clock.monotonic())

    def stats(self) -> RouterStats:
        """Counters since start, and where the latest questions went."""
        hot_spots = self._heat.spots()
        return RouterStats(
            num_requests=self._num_requests,
            num_questions=self._num_questions,
            num_rejected=self._num_rejected,
            num_overflow=self._pool.num_waiting,
            num_removed_chars=self._num_removed_chars,
            num_saved_tokens=self._num_saved_tokens,
            bucket_counts=tuple(self._bucket_counts.most_common(_MAX_BUCKETS_SHOWN)),
            window_ms=self._settings.hot_spot_window_ms,
            num_recent=self._heat.recent.num_questions,
            num_recent_tokens=self._heat.recent.num_tokens,
            bucket_heat=self._heat.buckets(),
            hot_spots=hot_spots,
            releases_per_s=self._pool.releases_per_s(self._clock.monotonic()),
        )

    def begin_drain(self) -> None:
        """Accept no new requests; those accepted go on until ``run`` is cancelled."""
        self._draining = True

    def check_integrity(self) -> None:
        """Recount the places and the budgets.

        Raises:
            InvariantError: a place or a budget is leaked or lost.
        """
        self._pool.check_integrity()
        self._budgets.check_integrity()

    async def run(self) -> None:
        """Publish questions that had to wait, for as long as the router lives; submit calls rely on it.

        Ends only by cancellation (the end of the drain); submit calls that still wait then raise ``DrainingError``.
        """
        try:
            await self._publisher.run()
        finally:
            self._draining = True

    # ---- acceptance

    def _check_open(self) -> None:
        if self._draining:
            raise DrainingError("Kev is shutting down and accepts no new requests; send it to another instance")

    def _under_way(self, spec: RequestSpec) -> Submission | None:
        """The submission of the same request, if it has open questions here.

        Raises:
            RequestConflictError: it has other content.
        """
        keys = ((spec.request_id, index) for index in range(len(spec.questions)))
        question = next((found for key in keys if (found := self._publisher.find(key))), None)
        if question is None:
            return None
        if question.submission.spec.content_digest != spec.content_digest:
            raise RequestConflictError.of(spec.request_id)
        return question.submission

    async def _register(self, spec: RequestSpec, accepted_at_s: float, has_new_id: bool) -> Submission | None:
        """A new submission, registered; None: the request is there already."""
        try:
            num_missing = self._pool.shortage(len(spec.questions))
            if num_missing:
                raise self._no_room(spec, num_missing)
            strategy = self._strategies[spec.strategy]
            submission = Submission(spec, await self._prepare(spec, strategy), strategy, accepted_at_s)
            self._check_open()
            placements = self._admit(submission)
        except QueueFullError:
            if not has_new_id and await self._registrations.knows(spec):
                return None
            raise
        return submission if await self._send(submission, placements) else None

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
        self._check_budget(submission)
        placements: list[Placement] = []
        admitted: list[PendingQuestion] = []
        now_s = self._clock.monotonic()
        for question in submission.questions:
            placement = self._pool.place(question, question.choose, now_s=now_s)
            if placement is not None or self._pool.enqueue(question, question.choose):
                placements.append(placement or self._pool.preview(question.choose))
                admitted.append(question)
        num_questions = len(submission.questions)
        if len(admitted) < num_questions:
            for question in admitted:
                self._pool.withdraw(question)
            raise self._no_room(submission.spec, num_questions - len(admitted))
        # From here on an outcome may come at any moment, even before the registration has returned.
        self._publisher.take(submission.questions)
        return placements

    def _check_budget(self, submission: Submission) -> None:
        spec, num_tokens = submission.spec, sum(question.prepared.num_tokens for question in submission.questions)
        lack = self._budgets.lack(spec.tenant, len(spec.questions), num_tokens)
        if lack is not None:
            now_s = self._clock.monotonic()
            raise self._refusals.over_budget(spec, lack, self._pool.releases_per_s(now_s), now_s)

    def _no_room(self, spec: RequestSpec, num_missing: int) -> KevError:
        num_questions = len(spec.questions)
        if not self._pool.num_outstanding and not self._pool.num_waiting:
            return self._refusals.never_fits(num_questions, num_missing)
        return self._full(f"{num_missing} of {num_questions} questions", _refused(spec, num_missing))

    def _full(self, what: str, refused: Refused) -> QueueFullError:
        now_s = self._clock.monotonic()
        return self._refusals.full(what, refused, self._pool.releases_per_s(now_s), now_s)

    async def _send(self, submission: Submission, placements: list[Placement]) -> bool:
        """Register a submission and publish what has a channel; False: the same request is there."""
        request_id = submission.spec.request_id
        try:
            submission.record = record = submission.make_record(placements)
            items = self._publisher.claimed(submission.questions)
            refusals = await self._intake.accept(record, list(items.values()))
        except BaseException as error:
            self._publisher.drop_all(submission)
            if not isinstance(error, KevError) or isinstance(error, StoreUnavailableError):
                # Interrupted half way: the request may be registered.
                self._registrations.withdraw_later(request_id)
            raise
        if refusals is None:
            self._publisher.drop_all(submission)
            return False
        submission.registered = True
        self._num_requests += 1
        self._num_questions += len(placements)
        self._num_removed_chars += sum(q.prepared.normalized.num_removed_chars for q in submission.questions)
        self._num_saved_tokens += sum(question.prepared.num_saved_tokens for question in submission.questions)
        self._bucket_counts.update(placement.hash_bucket for placement in placements)
        self._heat.note(submission.spec.strategy, placements, [q.prepared.num_tokens for q in submission.questions])
        for _, refusal in self._publisher.published(items, refusals):
            submission.fail(refusal)
        return True

    # ---- publication

    async def _complete(self, submission: Submission) -> None:
        """Publish what has got a channel meanwhile; with policy ``wait`` also wait for the rest."""
        submission.num_callers += 1
        try:
            if submission.failure is not None:
                raise submission.failure
            for _, error in await self._publisher.publish(list(submission.unsettled)):
                raise error
            if self._settings.overflow_policy is OverflowPolicy.WAIT:
                await self._wait_for_room(submission)
        except BaseException as error:
            submission.num_callers -= 1
            if isinstance(error, KevError):
                submission.fail(error)
            if not submission.num_callers:
                self._publisher.drop_all(submission)
                self._registrations.withdraw_later(submission.spec.request_id)
                await self._registrations.try_withdraw(submission.spec.request_id)
            raise

    async def _wait_for_room(self, submission: Submission) -> None:
        waited_s = await self._patience.wait(submission)
        if waited_s is not None:
            spec = submission.spec
            waited = f"{waited_s:.2g} s, as long as router.max_wait_ms and timeout_ms let it wait; nothing was run"
            raise self._full(f"any of {len(spec.questions)} questions in {waited}", _refused(spec, 1))


def _refused(spec: RequestSpec, num_missing: int) -> Refused:
    return Refused(
        request_id=spec.request_id, tenant=spec.tenant, num_missing=num_missing, num_questions=len(spec.questions)
    )
