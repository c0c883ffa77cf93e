"""What the questions of one deployment cost its store: scripts, processor time, bytes.

Invariants and semantics: pure arithmetic that follows the way of a question. A script costs ``script_us`` whatever it
carries; what it carries costs on top, by the entry. A node makes one report per token for all questions that it runs
then; a submission is one script, and it wakes every node that has room, each of which looks for work with one script.
Aggregators read events with plain commands; routers ask for many outcomes in one script. An event is written to the
log of all and to its request's own; the former is cut when it was read, the latter is kept.

Not here: how many deployments there are (``plan``), measurements (``store_cost``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.entries import EntryBytes
from bench.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUse:
    """Of one deployment."""

    scripts_per_s: float
    cores: float
    """Busy share of the store's one thread."""

    @classmethod
    def of(cls, questions_per_s: float, inputs: Inputs) -> StoreUse:
        """Of this load."""
        nodes = nodes_for(questions_per_s, inputs)
        scripts = scripts_per_question(questions_per_s, inputs) * questions_per_s + (
            nodes * inputs.node_scripts_per_s
            + inputs.num_routers * inputs.router_scripts_per_s
            + inputs.num_aggregators * inputs.aggregator_scripts_per_s
        )
        renewals = inputs.service_s / inputs.renewal_s
        looks = inputs.service_s * inputs.board_looks_per_s + inputs.board_looks_after
        reads = inputs.num_aggregators * inputs.num_events / inputs.events_per_read
        each_us = (
            processor_us(inputs, scripts=0.0, events=inputs.num_events + renewals)
            + looks * inputs.board_look_us
            + reads * inputs.read_us
        )
        return cls(scripts_per_s=scripts, cores=(questions_per_s * each_us + scripts * inputs.script_us) / 1e6)


def processor_us(inputs: Inputs, *, scripts: float, events: float) -> float:
    """Processor time of one question, from its publication to its outcome.

    Args:
        inputs: the costs.
        scripts: run for it; its share of those that carry others too.
        events: of it.
    """
    return scripts * inputs.script_us + events * inputs.event_us + inputs.question_us


def nodes_for(questions_per_s: float, inputs: Inputs) -> float:
    """Nodes of a deployment with this load, spares included; not rounded."""
    busy_slots = questions_per_s * inputs.service_s
    return busy_slots / (inputs.busy_share * inputs.slots_per_node) + inputs.spare_nodes


def questions_per_report(questions_per_s: float, inputs: Inputs) -> float:
    """Questions that a node runs at a time: the busy slots of a deployment, spread over its nodes."""
    return max(1.0, questions_per_s * inputs.service_s / nodes_for(questions_per_s, inputs))


def scripts_per_question(questions_per_s: float, inputs: Inputs) -> float:
    """Its share of the scripts that work brings about: submission, leases, reports.

    A submission is followed by a look for work at every node and a look at the request by every aggregator, the end of
    a question by a look for work at its node.
    """
    of_request = 1 + nodes_for(questions_per_s, inputs) + inputs.num_aggregators
    reports = inputs.num_events / questions_per_report(questions_per_s, inputs)
    return of_request / inputs.questions_per_request + 1 + reports


def bytes_per_question(inputs: Inputs, entries: EntryBytes) -> float:
    """Kept after its end, until ``retention_s`` has passed: its share of the request's log, its outcome, its record."""
    envelopes = entries.started + inputs.num_deltas * entries.delta + entries.result
    log = inputs.questions_per_request * (envelopes + inputs.num_events * inputs.entry_overhead_bytes)
    num_pages = math.ceil(log / inputs.log_page_bytes)
    of_request = num_pages * inputs.log_page_bytes + entries.record + inputs.request_overhead_bytes
    return of_request / inputs.questions_per_request + entries.result + inputs.question_overhead_bytes
