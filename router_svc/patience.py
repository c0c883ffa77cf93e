"""How long a submit call waits for room: back-pressure with a limit and a deadline.

Invariants and semantics: the wait counts from the acceptance of the request and ends when the limit or the longest time
budget of its questions is over, whichever is sooner; but only for a request of which nothing has begun. Once one of its
questions is published, or about to be, the rest waits as long as it has time: no answer is thrown away. Calls that
have joined each other wait for the same moment.

Not here: the order of those who wait (``channels``), what the caller is told (``service``).
"""

from __future__ import annotations

import asyncio

from common.ports import Clock
from router_svc.submission import Submission


class Patience:
    """Of the submit calls of a router."""

    def __init__(self, max_wait_ms: int, clock: Clock) -> None:
        """``max_wait_ms`` 0: only time budgets limit the wait."""
        self._max_wait_ms = max_wait_ms
        self._clock = clock

    async def wait(self, submission: Submission) -> float | None:
        """Wait until every question is published or has ended.

        Returns:
            None; or, for a request of which nothing has begun in time, the seconds that it has waited.

        Raises:
            KevError: what the submission failed with.
        """
        until_s = submission.accepted_at_s + self._limit_s(submission)
        while not _has_begun(submission):
            remaining_s = until_s - self._clock.monotonic()
            if remaining_s <= 0:
                return self._clock.monotonic() - submission.accepted_at_s
            try:
                async with asyncio.timeout(remaining_s):
                    await submission.wait_settled()
            except TimeoutError:
                continue
            # All have ended unpublished: cancelled, or out of time, whoever was the first to see that.
            if self._clock.monotonic() < until_s:
                return None
        await submission.wait_settled()
        return None

    def _limit_s(self, submission: Submission) -> float:
        budget_ms = max(question.timeout_ms for question in submission.spec.questions)
        return min(self._max_wait_ms or budget_ms, budget_ms) / 1000


def _has_begun(submission: Submission) -> bool:
    return any(question.claimed for question in submission.questions)
