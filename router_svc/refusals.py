"""What a caller is told for whom there is no room: why, when to come back, and what else would help.

Invariants and semantics: every refusal that a later call may escape says when to come back; those who were refused at
the same time are told different moments (``return_line``). Who waits for places of the pool and who waits for his own
tenant's stand in different lines. What would not fit into an idle pool, or not into a tenant without questions in
flight, is a bad request: nobody tries that again.

Not here: whether there is room (``channels``, ``budgets``).
"""

from __future__ import annotations

from common.errors import InvalidRequestError, KevError, QueueFullError
from common.types import OverflowPolicy, RequestSpec
from router_svc.budgets import Lack
from router_svc.return_line import Refused, ReturnLine
from router_svc.settings import RouterSettings


class Refusals:
    """Of one router, for one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        """Nobody was refused."""
        self._settings = settings
        self._of_pool, self._of_tenants = (ReturnLine(settings.channel_pool_size, settings.hash_key) for _ in range(2))

    def full(self, what: str, refused: Refused, per_s: float | None, now_s: float) -> QueueFullError:
        """The pool has no room for ``what``; ``per_s`` is the pace at which it gives places back, if it is known."""
        retry_after_s = self._of_pool.wait_s(refused, per_s, now_s)
        policy = self._settings.overflow_policy
        return QueueFullError(
            f"no room for {what} (overflow_policy {policy}); try again in about {retry_after_s:.2g} s",
            retry_after_s=retry_after_s,
        )

    def never_fits(self, num_questions: int, num_missing: int) -> InvalidRequestError:
        """So many questions find no room in an idle pool."""
        way_out = "set router.overflow_policy to wait"
        if self._settings.overflow_policy is OverflowPolicy.WAIT:
            way_out = "raise router.max_waiting_queries"
        return InvalidRequestError.of(
            "queries",
            f"the {num_questions} questions do not fit into the channels even when all are idle "
            f"({num_missing} find no room); send fewer at a time or {way_out}",
        )

    def over_budget(self, spec: RequestSpec, lack: Lack, per_s: float | None, now_s: float) -> KevError:
        """A tenant has too much in flight for a request."""
        who, num_questions = _named_tenant(spec.tenant), len(spec.questions)
        if lack.is_final:
            way_out = "" if lack.unit == "questions" else " or lower max_tokens"
            return InvalidRequestError.of(
                "queries",
                f"have {lack.asked} {lack.unit}, but {who} may have {lack.limit} in flight at a time "
                f"(router.max_tenant_{lack.unit}); send fewer at a time{way_out}",
            )
        # The pace of the whole pool is the only one known; tokens are given back by whole questions.
        refused = Refused(
            request_id=spec.request_id,
            tenant=spec.tenant,
            num_missing=lack.num_excess if lack.unit == "questions" else num_questions,
            num_questions=num_questions,
        )
        retry_after_s = self._of_tenants.wait_s(refused, per_s, now_s)
        return QueueFullError(
            f"{who} has {lack.in_flight} of {lack.limit} {lack.unit} in flight, and this request has {lack.asked} "
            f"more; try again in about {retry_after_s:.2g} s, or send fewer at a time",
            retry_after_s=retry_after_s,
        )


def _named_tenant(tenant: str) -> str:
    return f"tenant {tenant!r}" if tenant else "the tenant without a name"
