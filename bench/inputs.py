"""What the capacity model starts from: every figure with its unit, where it comes from, and why it is what it is.

Invariants and semantics: a figure is measured (a command of this repository prints it), counted (it follows from the
code or from a default of the configuration) or assumed (nobody has measured it where it matters).

Not here: the arithmetic (``store_use``, ``plan``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


def _measured(why: str) -> dict[str, str]:
    return {"source": "measured", "why": why}


def _counted(why: str) -> dict[str, str]:
    return {"source": "counted", "why": why}


def _assumed(why: str) -> dict[str, str]:
    return {"source": "**assumed**", "why": why}


_RUN = "[bench/RESULTS.md](../bench/RESULTS.md), one H200, 2026-11-29: 1.2 billion parameters, bf16, strict, flex"
_STORE = (
    "`python -m bench.store_cost`, 2026-11-30: Valkey 9.1, one core of an AMD EPYC that others used too; a fit to its "
    "24 readings, each within a factor of 1.5"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the arithmetic starts from. Names end in their unit."""

    node_tokens_per_s: float = field(default=1_737.0, metadata=_measured(_RUN))
    slots_per_node: int = field(default=8, metadata=_measured("of that run"))
    answer_tokens: int = field(default=64, metadata=_measured("of that run"))
    prompt_tokens: int = field(default=140, metadata=_assumed("the middle of that run's 16 to 263"))
    questions_per_request: int = field(default=8, metadata=_assumed("one request fills one forward"))
    tokens_per_delta: float = field(
        default=1.0, metadata=_counted("the most a node reports; more when a report takes longer than a token")
    )
    busy_share: float = field(default=0.75, metadata=_assumed("busy slots in the long run; the rest is for bursts"))
    spare_nodes: int = field(default=1, metadata=_assumed("per deployment, so that one may fail or be replaced"))
    script_us: float = field(default=118.0, metadata=_measured(_STORE))
    event_us: float = field(default=15.0, metadata=_measured("same fit: an event more in a report"))
    question_us: float = field(
        default=68.0,
        metadata=_measured("same fit: publishing, granting and ending a question, beyond scripts and events"),
    )
    board_look_us: float = field(
        default=2.0, metadata=_assumed("a router's look at one question among many; 1.7 to 2.7 us in a small trial")
    )
    board_looks_per_s: float = field(default=20.0, metadata=_counted("a router looks at what is open every 50 ms"))
    board_looks_after: float = field(default=2.0, metadata=_counted("and once a second for 2 s after the end"))
    num_routers: int = field(default=2, metadata=_assumed("two, so that one may fail"))
    num_aggregators: int = field(
        default=2, metadata=_assumed("two, so that one may fail; each reads the whole log of its deployment")
    )
    read_us: float = field(
        default=50.0,
        metadata=_assumed("a blocked `XREAD` that a report ends; 32 to 55 us in a small trial"),
    )
    events_per_read: float = field(default=16.0, metadata=_assumed("two or three reports meet in one read"))
    node_scripts_per_s: float = field(
        default=3.0, metadata=_counted("without any work: a sign of life, a look for work, a look for withdrawals")
    )
    router_scripts_per_s: float = field(default=21.0, metadata=_counted("looks at the board and searches for the lost"))
    aggregator_scripts_per_s: float = field(default=4.0, metadata=_counted("signs of life and looks at the deadlines"))
    entry_overhead_bytes: float = field(
        default=8.0, metadata=_counted("what an entry takes in a stream beyond its envelope")
    )
    log_page_bytes: float = field(
        default=4_096.0, metadata=_counted("`stream-node-max-bytes`; a request's log takes whole pages")
    )
    question_overhead_bytes: float = field(
        default=400.0,
        metadata=_measured("the same readings, each within a factor of 1.35: fields in the request's hash"),
    )
    request_overhead_bytes: float = field(default=300.0, metadata=_measured("the same readings: a request's keys"))
    retention_s: float = field(default=600.0, metadata=_counted("`aggregator.result_ttl_s`"))
    renewal_s: float = field(default=3.75, metadata=_counted("a quarter of the lease of 15 s"))
    store_busy_share: float = field(
        default=0.6, metadata=_assumed("of the store's one thread; latency grows beyond it")
    )
    store_gib: float = field(default=64.0, metadata=_assumed("memory of one store"))
    aggregator_event_us: float = field(
        default=30.0, metadata=_assumed("12 us measured for decoding and filing; the rest for reading and handing on")
    )
    router_question_us: float = field(
        default=1_000.0, metadata=_assumed("the figure to reach: 1,000 submits per second and core")
    )

    @property
    def num_deltas(self) -> int:
        """Of one answer."""
        return math.ceil(self.answer_tokens / self.tokens_per_delta)

    @property
    def num_events(self) -> int:
        """Of one question: its start, its deltas, its outcome."""
        return self.num_deltas + 2

    @property
    def service_s(self) -> float:
        """A question's time in its slot, in a full forward."""
        return self.slots_per_node * self.answer_tokens / self.node_tokens_per_s

    def joined(self, tokens_per_delta: float = 16.0) -> Inputs:
        """The same with several tokens in one delta."""
        return replace(self, tokens_per_delta=tokens_per_delta)
