"""What a deployment of a given load needs: nodes, channels, store, aggregators, and where it breaks first.

    python -m bench.capacity [--write]

Invariants and semantics: pure arithmetic over ``Inputs``; each input says whether it was measured, counted from the
code, or assumed. One deployment has one store; what outgrows one store is split into several deployments by their tag
(``cluster.name``), which share nothing. ``--write`` puts the tables into ``docs/scale.md``; a test keeps them equal.

Not here: waiting times in detail (``queueing``), measurements (``store_cost``, ``cluster``).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from bench.queueing import erlang_c, mean_wait_s
from common.codec import seal
from common.types import (
    AggregateMode,
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    FinishReason,
    IsolationLevel,
    Prompt,
    QuestionRecord,
    Receipt,
    RequestRecord,
    Route,
    SamplingParams,
    Strategy,
    Verdict,
    WorkItem,
)

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
QUESTIONS_PER_MINUTE = (1_000, 100_000, 10_000_000)
_GIB = 2**30
_MOST_CHANNELS = 4096
"""Upper limit of ``router.channel_pool_size``."""
_DIGEST = "d" * 64
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_REQUEST_ID = "5f0c8c8e-2f3d-4f0e-9d5e-0a8c5a0e7b11"
_LARGE_TOKEN_ID = 30_000
_WORD_CHARS = 5


def _measured(why: str) -> dict[str, str]:
    return {"source": "measured", "why": why}


def _counted(why: str) -> dict[str, str]:
    return {"source": "counted", "why": why}


def _assumed(why: str) -> dict[str, str]:
    return {"source": "**assumed**", "why": why}


_RUN = "[bench/RESULTS.md](../bench/RESULTS.md), one H200, 2026-11-29: 1.2 billion parameters, bf16, strict, flex"
_STORE = "`python -m bench.store_cost`, 2026-11-29: Valkey 9.1, one core of an AMD EPYC that others used too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the arithmetic starts from. Names end in their unit."""

    node_tokens_per_s: float = field(default=1_737.0, metadata=_measured(_RUN))
    slots_per_node: int = field(default=8, metadata=_measured("of that run"))
    answer_tokens: int = field(default=64, metadata=_measured("of that run"))
    prompt_tokens: int = field(default=140, metadata=_assumed("the middle of that run's 16 to 263"))
    questions_per_request: int = field(default=8, metadata=_assumed("one request fills one forward"))
    tokens_per_delta: float = field(default=1.0, metadata=_counted("a node reports every token that has text"))
    busy_share: float = field(default=0.75, metadata=_assumed("busy slots in the long run; the rest is for bursts"))
    spare_nodes: int = field(default=1, metadata=_assumed("per deployment, so that one may fail or be replaced"))
    script_us: float = field(default=75.0, metadata=_measured(_STORE))
    active_channel_us: float = field(
        default=14.0, metadata=_measured("same run: what a lease call costs more per channel that holds something")
    )
    entry_overhead_bytes: float = field(
        default=8.0, metadata=_measured("same run: what an entry takes in a stream beyond its envelope")
    )
    question_overhead_bytes: float = field(
        default=3_200.0, metadata=_measured("same run: keys, hashes and groups per question, a request of its own each")
    )
    retention_s: float = field(default=600.0, metadata=_counted("`aggregator.result_ttl_s`"))
    renewal_s: float = field(default=3.75, metadata=_counted("a quarter of the lease of 15 s"))
    store_busy_share: float = field(
        default=0.6, metadata=_assumed("of the store's one thread; latency grows beyond it")
    )
    store_gib: float = field(default=64.0, metadata=_assumed("memory of one store"))
    num_readers: int = field(
        default=4, metadata=_assumed("two aggregators and two routers read the whole log of a deployment")
    )
    events_per_read: float = field(default=64.0, metadata=_assumed("under load a read returns many events"))
    aggregator_event_us: float = field(
        default=30.0, metadata=_assumed("12 us measured for decoding and filing; the rest for reading and handing on")
    )
    router_question_us: float = field(
        default=1_000.0, metadata=_assumed("the figure to reach: 1,000 submits per second and core")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBytes:
    """Sizes of what one question leaves in the store, in its envelope."""

    work: int
    started: int
    delta: int
    result: int
    record: int
    """Of the whole request."""

    @classmethod
    def encoded(cls, inputs: Inputs) -> EntryBytes:
        """Sizes of real messages with these token counts."""
        key = {"request_id": _REQUEST_ID, "question_index": 3, "channel_id": 11}
        text = " word" * math.ceil(inputs.tokens_per_delta)
        num_answer = inputs.answer_tokens
        return cls(
            work=len(seal(_work_item(inputs.prompt_tokens), _TRACE)),
            started=len(seal(ChannelStarted(**key, slot=3, attempt=1, node_id="node-12"), _TRACE)),
            delta=len(seal(ChannelDelta(**key, attempt=1, seq=40, text=text, num_tokens=41), _TRACE)),
            result=len(seal(_result(inputs.prompt_tokens, num_answer), _TRACE)),
            record=len(seal(_record(inputs.questions_per_request, inputs.prompt_tokens))),
        )


def _token_ids(num_tokens: int) -> tuple[int, ...]:
    return tuple((7919 * place) % _LARGE_TOKEN_ID for place in range(num_tokens))


def _work_item(prompt_tokens: int) -> WorkItem:
    return WorkItem(
        request_id=_REQUEST_ID,
        question_index=3,
        channel_id=11,
        prompt=Prompt(ids=_token_ids(prompt_tokens)),
        num_shared=0,
        sampling=SamplingParams(),
        isolation=IsolationLevel.STRICT,
        max_parallel=8,
        time_budget_ms=9_900,
        tenant="tenant",
        fingerprint=_DIGEST,
    )


def _result(prompt_tokens: int, answer_tokens: int) -> ChannelResult:
    receipt = Receipt(level=IsolationLevel.STRICT, verdict=Verdict.BITWISE, mask_digest=_DIGEST, fingerprint=_DIGEST)
    return ChannelResult(
        request_id=_REQUEST_ID,
        question_index=3,
        channel_id=11,
        finish_reason=FinishReason.STOP,
        slot=3,
        text=" word" * answer_tokens,
        token_ids=_token_ids(answer_tokens),
        num_prompt_tokens=prompt_tokens,
        queued_ms=12.25,
        first_token_ms=31.5,
        started_at=1_795_000_000.25,
        finished_at=1_795_000_000.5,
        node_id="node-12",
        receipt=receipt,
    )


def _record(num_questions: int, prompt_tokens: int) -> RequestRecord:
    questions = tuple(
        QuestionRecord(
            question_index=index,
            route=Route(
                channel_id=11,
                strategy=Strategy.SEMANTIC_HASH,
                hash_bucket=41,
                normalized_text="x" * (_WORD_CHARS * prompt_tokens),
            ),
            timeout_ms=10_000,
            num_prompt_tokens=prompt_tokens,
        )
        for index in range(num_questions)
    )
    return RequestRecord(
        request_id=_REQUEST_ID,
        content_digest=_DIGEST,
        mode=AggregateMode.SLOT_MAP,
        isolation=IsolationLevel.STRICT,
        questions=questions,
        tenant="tenant",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a load needs, over all deployments unless it says otherwise."""

    questions_per_s: float
    service_s: float
    """A question's time in its slot."""
    busy_slots: float
    num_deployments: int
    num_nodes: int
    num_channels: int
    """Per deployment."""
    wait_share: float
    """Questions that wait for a slot, in one deployment."""
    wait_ms: float
    """Mean wait of all questions."""
    messages_per_s: float
    """Entries written: work, events, outcomes, registrations."""
    scripts_per_s: float
    store_cores: float
    """Processor time of all stores per second."""
    store_bytes: float
    """Kept in all stores."""
    aggregator_cores: float
    """Busy cores of one aggregator per deployment, all deployments together."""
    router_cores: float
    limits: dict[str, float]
    """Deployments that each resource alone would need; the largest is the first bottleneck."""

    @property
    def first_bottleneck(self) -> str:
        """The resource that is used up first when a deployment grows."""
        return max(self.limits, key=lambda name: self.limits[name])


def plan(questions_per_minute: float, inputs: Inputs) -> Plan:
    """The needs of a load.

    Nodes, routers and gateways are added freely. A deployment has one store, whose one thread and memory are bounded;
    every aggregator reads the whole log of its deployment, so a second one adds safety and no room; and channels are
    bounded by the configuration. What passes one of these bounds asks for more deployments.
    """
    questions_per_s = questions_per_minute / 60
    service_s = inputs.slots_per_node * inputs.answer_tokens / inputs.node_tokens_per_s
    busy_slots = questions_per_s * service_s
    num_deltas = math.ceil(inputs.answer_tokens / inputs.tokens_per_delta)
    events = num_deltas + 2
    channels_wanted = channels_for(busy_slots / inputs.busy_share, inputs)
    scripts = scripts_per_question(inputs, service_s)
    entries = EntryBytes.encoded(inputs)
    kept = bytes_per_question(inputs, entries) * questions_per_s * inputs.retention_s
    aggregator_cores = questions_per_s * events * inputs.aggregator_event_us / 1e6
    limits = {
        "store: processor": _deployments_for_store(questions_per_s, service_s, inputs),
        "store: memory": kept / (inputs.store_gib * _GIB),
        "aggregator: reading the log": aggregator_cores / inputs.busy_share,
        "channels": channels_wanted / _MOST_CHANNELS,
    }
    num_deployments = max(1, math.ceil(max(limits.values())))
    per_deployment = questions_per_s / num_deployments
    slots_wanted = per_deployment * service_s / inputs.busy_share
    num_nodes = math.ceil(slots_wanted / inputs.slots_per_node)
    num_slots = num_nodes * inputs.slots_per_node
    return Plan(
        questions_per_s=questions_per_s,
        service_s=service_s,
        busy_slots=busy_slots,
        num_deployments=num_deployments,
        num_nodes=(num_nodes + inputs.spare_nodes) * num_deployments,
        num_channels=channels_for(num_slots, inputs),
        wait_share=erlang_c(num_slots, per_deployment * service_s),
        wait_ms=1000 * mean_wait_s(num_slots, per_deployment, service_s),
        messages_per_s=questions_per_s * (1 + events + 1 / inputs.questions_per_request),
        scripts_per_s=questions_per_s * scripts,
        store_cores=num_deployments * _store_cores(per_deployment, service_s, inputs),
        store_bytes=kept,
        aggregator_cores=aggregator_cores,
        router_cores=questions_per_s * inputs.router_question_us / inputs.questions_per_request / 1e6,
        limits=limits,
    )


def channels_for(num_slots: float, inputs: Inputs) -> int:
    """Channels of a deployment: places for twice its slots, and at least 1.5 channels per slot of one node.

    A node takes one question of a channel at a time, and several nodes may work on one channel. A channel has 8 places
    (``router.channel_queue_size``).
    """
    places_per_channel = 8
    return max(math.ceil(1.5 * inputs.slots_per_node), math.ceil(2 * num_slots / places_per_channel))


def scripts_per_question(inputs: Inputs, service_s: float) -> float:
    """Calls of the store: publish, lease, started, deltas, commit, renewals; the request's and the readers' share."""
    num_deltas = math.ceil(inputs.answer_tokens / inputs.tokens_per_delta)
    renewals = math.floor(service_s / inputs.renewal_s)
    reads = inputs.num_readers * (num_deltas + 2) / inputs.events_per_read
    request_calls = 3  # look up, register, complete
    return 4 + num_deltas + renewals + reads + request_calls / inputs.questions_per_request


def bytes_per_question(inputs: Inputs, entries: EntryBytes) -> float:
    """Kept after its end, until ``retention_s`` has passed: its events, its share of the record, the bookkeeping."""
    num_deltas = math.ceil(inputs.answer_tokens / inputs.tokens_per_delta)
    sizes = entries.started + num_deltas * entries.delta + 2 * entries.result  # the outcome also stands by itself
    overhead = inputs.entry_overhead_bytes * (num_deltas + 2)
    bookkeeping = inputs.question_overhead_bytes / inputs.questions_per_request
    return sizes + overhead + entries.record / inputs.questions_per_request + bookkeeping


def _store_cores(questions_per_s: float, service_s: float, inputs: Inputs) -> float:
    """Busy share of the store's thread in one deployment.

    A lease call looks at every channel that holds something, waiting or leased; under load it returns about one item.
    """
    busy_slots = questions_per_s * service_s
    active = min(busy_slots, channels_for(busy_slots / inputs.busy_share, inputs))
    each_us = scripts_per_question(inputs, service_s) * inputs.script_us + active * inputs.active_channel_us
    return questions_per_s * each_us / 1e6


def _deployments_for_store(questions_per_s: float, service_s: float, inputs: Inputs) -> float:
    """Smallest number of equal deployments whose stores are busy at most ``store_busy_share``; below 1: the share."""

    def share(num_deployments: float) -> float:
        return _store_cores(questions_per_s / num_deployments, service_s, inputs) / inputs.store_busy_share

    few, many = 1.0, max(1.0, share(1.0))  # splitting never costs more than it saves
    if many == 1.0:
        return share(1.0)
    while many - few > 1e-6 * few:
        middle = (few + many) / 2
        few, many = (middle, many) if share(middle) > 1 else (few, middle)
    return many


# ---- the document


def joined(inputs: Inputs, tokens_per_delta: float = 16.0) -> Inputs:
    """As ``inputs``, with several tokens in one delta."""
    return replace(inputs, tokens_per_delta=tokens_per_delta)


def tables(inputs: Inputs) -> dict[str, str]:
    """Every generated part of the document, by the name of its mark."""
    return {
        "inputs": _inputs_table(inputs),
        "entries": _entries_table(inputs),
        "plans": _plans_table(inputs),
        "limits": _limits_table(inputs),
        "joined": _plans_table(joined(inputs)),
        "joined-limits": _limits_table(joined(inputs)),
    }


def filled(document: str, parts: dict[str, str]) -> str:
    """The document with every marked part replaced.

    Raises:
        ValueError: a mark is missing.
    """
    for name, table in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not mark.search(document):
            raise ValueError(f"the document has no part {name!r}")
        document = mark.sub(lambda found, text=table: f"{found[1]}{text}{found[2]}", document)  # type: ignore[misc]
    return document


def _table(*rows: Sequence[str]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def _inputs_table(inputs: Inputs) -> str:
    rows = [
        (f"`{item.name}`", _number(getattr(inputs, item.name)), item.metadata["source"], item.metadata["why"])
        for item in fields(inputs)
    ]
    return _table(("input", "value", "is", "from"), *rows)


def _entries_table(inputs: Inputs) -> str:
    sizes = EntryBytes.encoded(inputs)
    kept = bytes_per_question(inputs, sizes)
    return _table(
        ("entry", "bytes in its envelope", "per question"),
        (f"work item, {inputs.prompt_tokens} prompt tokens", _number(sizes.work), "1, until its outcome"),
        ("started", _number(sizes.started), "1"),
        (f"delta of {_number(inputs.tokens_per_delta)} token(s)", _number(sizes.delta), _number(_deltas(inputs))),
        (f"outcome, {inputs.answer_tokens} answer tokens", _number(sizes.result), "2: in the log and by itself"),
        ("request record", _number(sizes.record), f"1/{inputs.questions_per_request}"),
        ("kept in all, with overhead", _number(kept), f"for {_number(inputs.retention_s)} s"),
    )


def _deltas(inputs: Inputs) -> int:
    return math.ceil(inputs.answer_tokens / inputs.tokens_per_delta)


def _plans_table(inputs: Inputs) -> str:
    plans = [plan(rate, inputs) for rate in QUESTIONS_PER_MINUTE]
    rows: list[tuple[str, list[str]]] = [
        ("questions per second", [_number(p.questions_per_s) for p in plans]),
        ("a question's time in its slot, s", [_number(p.service_s) for p in plans]),
        ("busy slots", [_number(p.busy_slots) for p in plans]),
        ("deployments (tags, stores)", [_number(p.num_deployments) for p in plans]),
        ("inference nodes, spares included", [_number(p.num_nodes) for p in plans]),
        ("channels per deployment", [_number(p.num_channels) for p in plans]),
        ("questions that wait for a slot", [f"{p.wait_share:.1%}" for p in plans]),
        ("mean wait for a slot, ms", [_number(p.wait_ms) for p in plans]),
        ("messages written per second", [_number(p.messages_per_s) for p in plans]),
        ("store calls per second", [_number(p.scripts_per_s) for p in plans]),
        ("busy cores of all stores", [_number(p.store_cores) for p in plans]),
        ("kept in all stores, GiB", [_number(p.store_bytes / _GIB) for p in plans]),
        ("busy cores of one aggregator per deployment, all together", [_number(p.aggregator_cores) for p in plans]),
        ("busy cores of all routers", [_number(p.router_cores) for p in plans]),
        ("first bottleneck", [p.first_bottleneck for p in plans]),
    ]
    heads = ["questions per minute", *(f"{rate:,}" for rate in QUESTIONS_PER_MINUTE)]
    return _table(heads, *([name, *cells] for name, cells in rows))


def _limits_table(inputs: Inputs) -> str:
    plans = [plan(rate, inputs) for rate in QUESTIONS_PER_MINUTE]
    heads = ["deployments needed by", *(f"{rate:,}" for rate in QUESTIONS_PER_MINUTE)]
    return _table(heads, *([name, *(_number(p.limits[name]) for p in plans)] for name in plans[0].limits))


def _number(value: float) -> str:
    """Three digits that mean something, thousands apart."""
    if 0 < value < 0.001:
        return "< 0.001"
    if value == 0 or value >= 100:
        return f"{value:,.0f}" if value < 10_000 else f"{round(value, 2 - math.floor(math.log10(value))):,.0f}"
    return f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables or put them into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put them into {DOCUMENT.name}")
    arguments = parser.parse_args(argv)
    parts = tables(Inputs())
    if arguments.write:
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), parts), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{table}" for name, table in parts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
