"""A request on its way through the router: which of its questions are published and which still wait.

Invariants and semantics: a question is *settled* once it is published, or will never be; ``settled`` is set when all
are. Settling twice changes nothing. Owned by the event loop.

Not here: places in the pool (``channels``), publishing (``service``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.errors import KevError
from common.types import QuestionRecord, RequestRecord, RequestSpec, Route, WorkItem
from router_svc.channels import Chooser, Placement
from router_svc.strategies import Choice, RoutingStrategy
from router_svc.tokens import Prepared


@dataclass(slots=True, eq=False)
class PendingQuestion:
    """A question between submission and outcome; equal only to itself."""

    submission: Submission = field(repr=False)
    index: int
    prepared: Prepared = field(repr=False)
    choose: Chooser = field(repr=False)
    claimed: bool = False
    """Somebody publishes it or has done so."""

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, question_index)."""
        return self.submission.spec.request_id, self.index

    def remaining_ms(self, now_s: float) -> int:
        """What is left of the time budget, in whole milliseconds; below 1 it is spent."""
        timeout_ms = self.submission.spec.questions[self.index].timeout_ms
        return int(timeout_ms - (now_s - self.submission.accepted_at_s) * 1000)

    def record(self, placement: Placement) -> QuestionRecord:
        """What the aggregator must know."""
        question = self.submission.spec.questions[self.index]
        return QuestionRecord(
            question_index=self.index,
            route=Route(
                channel_id=placement.channel_id,
                strategy=self.submission.spec.strategy,
                hash_bucket=placement.hash_bucket,
                diverted_from=placement.diverted_from,
                diverted_why=placement.diverted_why,
                normalized_text=self.prepared.normalized.text,
                removed=self.prepared.normalized.removed,
            ),
            timeout_ms=question.timeout_ms,
            priority=question.priority,
            num_prompt_tokens=len(self.prepared.prompt.ids),
            num_truncated=self.prepared.prompt.num_truncated,
        )

    def item(self, placement: Placement, time_budget_ms: int, fingerprint: str) -> WorkItem:
        """What an inference node must know."""
        spec = self.submission.spec
        question = spec.questions[self.index]
        return WorkItem(
            request_id=spec.request_id,
            question_index=self.index,
            channel_id=placement.channel_id,
            prompt=self.prepared.prompt,
            num_shared=self.prepared.num_shared,
            sampling=question.sampling,
            isolation=spec.isolation,
            max_parallel=spec.max_parallel,
            time_budget_ms=time_budget_ms,
            priority=question.priority,
            tenant=spec.tenant,
            fingerprint=fingerprint,
        )


class Submission:
    """One accepted request."""

    def __init__(
        self, spec: RequestSpec, prepared: list[Prepared], strategy: RoutingStrategy, accepted_at_s: float
    ) -> None:
        """Nothing is settled yet.

        Args:
            spec: the request.
            prepared: its questions, in order.
            strategy: picks their channels.
            accepted_at_s: the clock's seconds when ``submit`` was called; time budgets count from here.
        """
        self.spec = spec
        self.accepted_at_s = accepted_at_s
        self.questions = tuple(
            PendingQuestion(self, index, ready, Choice(strategy, ready.routing_key))
            for index, ready in enumerate(prepared)
        )
        self.registered = False
        """Set by the service when the aggregator knows the request; nothing is published before."""
        self.record: RequestRecord | None = None
        """What the service registers; kept to register it again if it is lost."""
        self.num_callers = 0
        """Calls that wait for it or were told that it is accepted; the last one that fails withdraws it."""
        self.failure: KevError | None = None
        self._unsettled = set(range(len(prepared)))
        self._settled = asyncio.Event()

    @property
    def unsettled(self) -> Iterator[PendingQuestion]:
        """Questions that are neither published nor dropped."""
        return (self.questions[index] for index in sorted(self._unsettled))

    def is_settled(self, question: PendingQuestion) -> bool:
        """Whether one question is published or dropped."""
        return question.index not in self._unsettled

    def settle(self, question: PendingQuestion) -> None:
        """One question is published or dropped."""
        self._unsettled.discard(question.index)
        if not self._unsettled:
            self._settled.set()

    def fail(self, error: KevError) -> None:
        """End the wait with an error; the first error stays."""
        if self.failure is None and self._unsettled:
            self.failure = error
            self._settled.set()

    async def wait_settled(self) -> None:
        """Return when every question is settled.

        Raises:
            KevError: what ``fail`` was given.
        """
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    def make_record(self, placements: list[Placement]) -> RequestRecord:
        """The registration of the request."""
        return RequestRecord(
            request_id=self.spec.request_id,
            content_digest=self.spec.content_digest,
            mode=self.spec.mode,
            isolation=self.spec.isolation,
            questions=tuple(
                question.record(placement) for question, placement in zip(self.questions, placements, strict=True)
            ),
            tenant=self.spec.tenant,
        )
