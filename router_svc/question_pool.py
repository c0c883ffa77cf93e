"""The channel pool of a router, as its settings say, and what its questions weigh.

Not here: the pool itself (``channels``), how questions end (``service``).
"""

from __future__ import annotations

from common.ending import Ending
from common.types import FinishReason, OverflowPolicy
from router_svc.breakers import BreakerRules
from router_svc.channels import Burden, ChannelPool
from router_svc.settings import RouterSettings
from router_svc.submission import PendingQuestion

_TOKEN_BYTES = 4
"""As the transports count."""
_FAILURES = frozenset({FinishReason.ERROR, FinishReason.TIMEOUT_QUEUED, FinishReason.TIMEOUT_RUNNING})
_SAYING_NOTHING = frozenset({FinishReason.CANCELLED, FinishReason.REJECTED})


def build_pool(settings: RouterSettings) -> ChannelPool[PendingQuestion]:
    """An idle pool."""
    overflow_queue_sizes = {
        OverflowPolicy.WAIT: settings.max_waiting_queries,
        OverflowPolicy.QUEUE: settings.overflow_queue_size,
        OverflowPolicy.REJECT: 0,
    }
    return ChannelPool(
        settings.channel_pool_size,
        channel_queue_size=settings.channel_queue_size,
        overflow_queue_size=overflow_queue_sizes[settings.overflow_policy],
        breaker_queue_length=settings.breaker_queue_length,
        channel_queue_bytes=settings.channel_queue_bytes,
        overflow_queue_bytes=settings.overflow_queue_bytes,
        breaker=BreakerRules(
            max_age_s=settings.breaker_max_age_ms / 1000,
            failure_rate=settings.breaker_failure_rate,
            min_outcomes=settings.breaker_min_outcomes,
            window_s=settings.breaker_window_ms / 1000,
            cooldown_s=settings.breaker_cooldown_ms / 1000,
        ),
        share_bound=settings.load_bound,
        recent_s=settings.hot_spot_window_ms / 1000,
        burden_of=lambda question: _burden_of(question, settings.priority_step_ms / 1000),
    )


def failure_of(ending: Ending) -> str | None:
    """What speaks against the channel of a question that ended so: the reason of its error, or the kind of time-out.

    Empty: nothing does, it is a success. None: it says nothing about the channel.
    """
    if ending.finish_reason in _SAYING_NOTHING:
        return None
    return ending.error_reason or str(ending.finish_reason) if ending.finish_reason in _FAILURES else ""


def _burden_of(question: PendingQuestion, priority_step_s: float) -> Burden:
    submission = question.submission
    spec = submission.spec.questions[question.index]
    return Burden(
        num_bytes=_TOKEN_BYTES * len(question.prepared.prompt.ids),
        num_tokens=max(1, question.prepared.num_tokens),
        expires_at_s=submission.accepted_at_s + spec.timeout_ms / 1000,
        head_start_s=spec.priority * priority_step_s,
    )
