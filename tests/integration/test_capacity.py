"""The capacity model's arithmetic, its simulation, and the document that shows both."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity import DOCUMENT, QUESTIONS_PER_MINUTE, filled, tables
from bench.entries import EntryBytes
from bench.inputs import Inputs
from bench.plan import Plan, channels_for
from bench.queueing import QueueSettings, erlang_c, mean_wait_s, simulate
from bench.store_cost import answer_of, delta_of, item_of, started_of
from bench.store_use import (
    StoreUse,
    bytes_per_question,
    nodes_for,
    processor_us,
    questions_per_report,
    scripts_per_question,
)
from common.codec import seal
from common.ports import Lease

INPUTS = Inputs()
RATES = st.floats(1.0, 1e8)


# --- Erlang and the simulation


@pytest.mark.parametrize(
    ("servers", "offered", "expected"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (5, 4.0, 0.5541), (10, 8.0, 0.4092), (3, 3.0, 1.0), (4, 0.0, 0.0)],
)
def test_erlang_c_against_printed_values(servers: int, offered: float, expected: float) -> None:
    """Every wait in the document rests on this formula; M/M/1 and the usual tables are known by heart."""
    assert erlang_c(servers, offered) == pytest.approx(expected, abs=2e-4)


def test_a_queue_that_gets_too_much_never_ends() -> None:
    """An overloaded pool must not show a finite wait."""
    assert mean_wait_s(8, 100.0, 1.0) == math.inf


@pytest.mark.parametrize(("num_nodes", "slots", "busy"), [(1, 8, 0.8), (4, 2, 0.9), (1, 1, 0.7), (6, 8, 0.85)])
def test_simulation_agrees_with_erlang(num_nodes: int, slots: int, busy: float) -> None:
    """With channels enough, channels and nodes are one pool of slots; if not, the document's waits are wrong."""
    servers, service_s = num_nodes * slots, 0.3
    rate = busy * servers / service_s
    reading = simulate(
        QueueSettings(
            arrivals_per_s=rate,
            service_s=service_s,
            num_nodes=num_nodes,
            slots_per_node=slots,
            num_channels=channels_for(servers, INPUTS),
            num_questions=40_000,
        )
    )
    assert reading.share_waited == pytest.approx(erlang_c(servers, busy * servers), rel=0.12, abs=0.02)
    assert reading.mean_wait_s == pytest.approx(mean_wait_s(servers, rate, service_s), rel=0.25)
    assert reading.busy_s / reading.span_s / servers == pytest.approx(busy, rel=0.04)


@pytest.mark.parametrize("rate", QUESTIONS_PER_MINUTE[:2])
def test_simulation_agrees_with_the_plan(rate: float) -> None:
    """The channels of the plan must let its nodes fill their slots; its waits and busy slots must come true."""
    made = Plan.of(rate, INPUTS)
    share = made.num_deployments
    working = made.num_nodes // share - INPUTS.spare_nodes
    reading = simulate(
        QueueSettings(
            arrivals_per_s=made.questions_per_s / share,
            service_s=made.service_s,
            num_nodes=working,
            slots_per_node=INPUTS.slots_per_node,
            num_channels=made.num_channels,
            num_questions=20_000,
        )
    )
    assert reading.busy_s / reading.span_s == pytest.approx(made.busy_slots / share, rel=0.05)
    assert 1000 * reading.mean_wait_s == pytest.approx(made.wait_ms, rel=0.35, abs=2.0)


def test_steady_answers_wait_half_as_long() -> None:
    """Answers of equal length wait less than the formula says (Pollaczek-Khinchine): the plan errs on the safe side."""
    common = QueueSettings(arrivals_per_s=0.8, service_s=1.0, slots_per_node=1, num_questions=30_000)
    steady = simulate(replace(common, steady=True))
    assert steady.mean_wait_s == pytest.approx(mean_wait_s(1, 0.8, 1.0) / 2, rel=0.15)


def test_fewer_channels_than_slots_leave_slots_empty() -> None:
    """Eight slots and four channels are four slots."""
    common = QueueSettings(arrivals_per_s=6.0, service_s=1.0, slots_per_node=8, num_questions=3_000)
    assert simulate(replace(common, num_channels=64)).mean_wait_s < 1.0
    assert simulate(replace(common, num_channels=4)).mean_wait_s > 60.0


def test_the_breaker_makes_one_pool_of_the_channels() -> None:
    """Without it a question waits behind its channel while slots are empty; the plan counts on it."""
    common = QueueSettings(arrivals_per_s=4.9, service_s=1.0, slots_per_node=8, num_channels=12, num_questions=20_000)
    assert simulate(common).mean_wait_s == pytest.approx(mean_wait_s(8, 4.9, 1.0), rel=0.25)
    assert simulate(replace(common, breaker=False)).mean_wait_s > 3 * mean_wait_s(8, 4.9, 1.0)


def test_dying_nodes_cost_work_and_no_question() -> None:
    """Each question ends once; what died is done again."""
    settings_ = QueueSettings(
        arrivals_per_s=8.0,
        service_s=1.0,
        num_nodes=3,
        slots_per_node=8,
        num_questions=10_000,
        num_warmup=0,
        seconds_between_deaths=60.0,
        notice_s=3.0,
    )
    reading, calm = simulate(settings_), simulate(replace(settings_, seconds_between_deaths=math.inf))
    assert reading.num_finished == calm.num_finished == 10_000
    assert calm.num_attempts == 10_000
    assert calm.wasted_s == 0
    # A question of mean length s dies with a chance of about s / 60 each time it runs.
    assert (reading.num_attempts - 10_000) / 10_000 == pytest.approx(1 / 60, rel=0.5)
    assert 0 < reading.wasted_s < 0.1 * reading.busy_s
    # Each of those stays the time until the death is noticed, and starts anew.
    assert reading.stay_s > calm.stay_s + 2.0 * (reading.num_attempts - 10_000)


def test_the_same_seed_gives_the_same_run() -> None:
    """A figure that cannot be had again cannot be argued about."""
    one = QueueSettings(arrivals_per_s=20.0, service_s=0.3, num_questions=2_000, num_warmup=0)
    assert simulate(one) == simulate(one)
    assert simulate(one) != simulate(replace(one, seed=1))


# --- the arithmetic


def test_a_plan_by_hand() -> None:
    """One thousand questions a minute, worked out on paper."""
    made, rate = Plan.of(1_000, INPUTS), 1_000 / 60
    busy_slots = rate * 8 * 64 / 1_737
    nodes = busy_slots / (0.75 * 8) + 1
    together = busy_slots / nodes
    assert made.service_s == pytest.approx(8 * 64 / 1_737)
    assert made.busy_slots == pytest.approx(busy_slots)
    assert (made.num_deployments, made.num_nodes, made.num_channels) == (1, 2, 12)
    assert made.messages_per_s == pytest.approx(rate * (1 + 1 + 64 + 1 + 1 / 8))
    # Submission, every node's look and both aggregators' look by eight; a look at the end; a report for every event.
    scripts = rate * ((1 + nodes + 2) / 8 + 1 + 66 / together) + 3 * nodes + 2 * 21 + 2 * 4
    assert made.scripts_per_s == pytest.approx(scripts)
    looks = 20 * made.service_s + 2
    each_us = 68 + 15 * (66 + made.service_s / 3.75) + 2 * looks + 2 * 66 / 16 * 50
    assert made.store_cores == pytest.approx((scripts * 118 + rate * each_us) / 1e6)
    assert made.wait_share == pytest.approx(erlang_c(8, made.busy_slots))
    assert made.first_bottleneck == "store: processor"


@settings(max_examples=60, deadline=None)
@given(RATES, RATES)
def test_more_load_never_needs_less(one: float, other: float) -> None:
    """A plan that shrinks as the load grows has a wrong sign somewhere."""
    less, more = Plan.of(min(one, other), INPUTS), Plan.of(max(one, other), INPUTS)
    assert less.num_nodes <= more.num_nodes
    assert less.num_deployments <= more.num_deployments
    assert less.messages_per_s <= more.messages_per_s
    assert less.store_bytes <= more.store_bytes


@settings(max_examples=60, deadline=None)
@given(RATES)
def test_a_plan_keeps_every_bound(rate: float) -> None:
    """No store busier or fuller, no pool larger, no slot busier than the inputs allow."""
    made = Plan.of(rate, INPUTS)
    working = made.num_nodes - INPUTS.spare_nodes * made.num_deployments
    assert made.busy_slots <= working * INPUTS.slots_per_node * INPUTS.busy_share * (1 + 1e-9)
    assert made.store_cores <= made.num_deployments * INPUTS.store_busy_share * (1 + 1e-3)
    assert made.store_bytes <= made.num_deployments * INPUTS.store_gib * 2**30 * (1 + 1e-9)
    assert made.num_channels <= 4096
    assert math.isfinite(made.wait_ms)
    assert max(made.limits.values()) <= made.num_deployments


def test_joined_deltas_unload_the_store() -> None:
    """The lever that the document recommends must be one."""
    one, other = Plan.of(100_000, INPUTS), Plan.of(100_000, INPUTS.joined())
    assert other.num_deployments < one.num_deployments / 2
    assert other.messages_per_s < one.messages_per_s / 5
    assert other.store_cores < one.store_cores / 3


def test_another_bottleneck_is_named_when_it_is_one() -> None:
    """A bottleneck that is always the same one is not computed."""
    fast = replace(INPUTS, script_us=1.0, event_us=1.0, question_us=1.0, read_us=1.0)
    assert Plan.of(100_000, replace(INPUTS, store_gib=0.5)).first_bottleneck == "store: memory"
    assert Plan.of(100_000, fast).first_bottleneck.startswith("aggregator")
    assert Plan.of(1_000, replace(fast.joined(), node_tokens_per_s=0.5)).first_bottleneck == "channels"


def test_a_store_that_idles_too_busily_is_refused() -> None:
    """No number of deployments helps against what each of them costs without any question."""
    with pytest.raises(ValueError, match="serves no question"):
        Plan.of(1_000, replace(INPUTS, script_us=1e5))


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4))
def test_a_fuller_node_reports_more_at_once(one: float, other: float) -> None:
    """Reports carry what a node runs: at least one question, at most its busy slots, more the fuller it is."""
    less, more = (questions_per_report(rate, INPUTS) for rate in sorted((one, other)))
    assert 1 <= less <= more <= INPUTS.busy_share * INPUTS.slots_per_node


def test_scripts_carry_many_questions() -> None:
    """Per question a full node needs far fewer scripts than events; an idle one needs one for each event."""
    assert scripts_per_question(1e-3, INPUTS) == pytest.approx(INPUTS.num_events + 1 + 4 / 8, abs=0.01)
    assert scripts_per_question(100.0, INPUTS) < INPUTS.num_events / 3


def test_every_node_looks_when_something_comes() -> None:
    """Twice the load of a large deployment costs its store more than twice: there are twice as many nodes to wake."""
    one, other = StoreUse.of(1_000.0, INPUTS.joined()), StoreUse.of(2_000.0, INPUTS.joined())
    woken = (nodes_for(2_000.0, INPUTS) - nodes_for(1_000.0, INPUTS)) / INPUTS.questions_per_request
    assert other.cores > 2 * one.cores + 0.9 * 2_000 * woken * INPUTS.script_us / 1e6


def test_entries_are_measured_on_real_messages() -> None:
    """Sizes from a guess would drift away from the protobuf definitions."""
    short, long = EntryBytes.encoded(replace(INPUTS, prompt_tokens=10)), EntryBytes.encoded(INPUTS)
    assert 100 < short.work < long.work < 5 * INPUTS.prompt_tokens
    assert long.delta < EntryBytes.encoded(INPUTS.joined()).delta < long.delta + 16 * 5
    assert long.started < long.result


@dataclass(frozen=True)
class Reading:
    """What ``bench.store_cost`` read on 2026-11-30."""

    num_together: int
    answer_tokens: int
    cpu_us: tuple[int, ...]
    """With 16, 64 and 256 channels, each without and with other questions that wait."""
    scripts: float
    kept_bytes: int
    """With 16 channels: a channel's first use takes memory too, once."""


READINGS = (
    Reading(1, 0, cpu_us=(630, 1009, 760, 892, 667, 805), scripts=5.0, kept_bytes=4_817),
    Reading(1, 64, cpu_us=(8076, 8561, 8095, 8908, 9014, 8940), scripts=69.007, kept_bytes=9_785),
    Reading(8, 0, cpu_us=(160, 168, 174, 145, 176, 207), scripts=0.625, kept_bytes=955),
    Reading(8, 64, cpu_us=(2026, 2523, 2089, 1964, 2006, 2230), scripts=8.625, kept_bytes=7_996),
)


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: f"{reading.num_together}x{reading.answer_tokens}")
def test_the_model_agrees_with_the_measured_store(reading: Reading) -> None:
    """Every reading within a factor of 1.5, kinds of load within 1.2: one cost per script, one per event, one each."""
    num_events = reading.answer_tokens + 2
    # The trial publishes, leases and reads once for those that are together, and reports every event once.
    scripts = (3 + num_events) / reading.num_together
    assert scripts == pytest.approx(reading.scripts, rel=0.01)
    predicted_us = processor_us(INPUTS, scripts=scripts, events=num_events)
    assert all(spent_us / 1.5 < predicted_us < spent_us * 1.5 for spent_us in reading.cpu_us)
    assert median(reading.cpu_us) / 1.2 < predicted_us < median(reading.cpu_us) * 1.2


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: f"{reading.num_together}x{reading.answer_tokens}")
def test_bytes_agree_with_the_measured_store(reading: Reading) -> None:
    """Within a factor of 1.35, for the very messages of the trial, which have neither trace, tenant nor record."""
    lease = Lease(lease_id="1-1 node", item=item_of(1_000_000, 3, 11), attempt=1, age_ms=0.0)
    sizes = EntryBytes(
        work=len(seal(lease.item)),
        started=len(seal(started_of(lease))),
        delta=len(seal(delta_of(lease, 40))),
        result=len(seal(answer_of(lease, reading.answer_tokens))),
        record=0,
    )
    of_trial = replace(INPUTS, questions_per_request=reading.num_together, answer_tokens=reading.answer_tokens)
    kept = bytes_per_question(of_trial, sizes)
    assert reading.kept_bytes / 1.35 < kept < reading.kept_bytes * 1.35


# --- the document


def test_the_document_shows_the_model() -> None:
    """Tables that are not the model's output are somebody's memory of it."""
    document = DOCUMENT.read_text(encoding="utf-8")
    assert filled(document, tables(INPUTS)) == document, "run: python -m bench.capacity --write"


def test_a_missing_part_is_noticed() -> None:
    """A mark that was edited away must not leave an old table standing."""
    with pytest.raises(ValueError, match="plans"):
        filled("<!-- inputs -->\nold\n<!-- /inputs -->\n", {"inputs": "new", "plans": "new"})
    assert filled("<!-- a -->\nold\n<!-- /a -->", {"a": "new\\1"}) == "<!-- a -->\nnew\\1\n<!-- /a -->"


def test_every_input_says_where_it_comes_from() -> None:
    """An assumption that looks like a measurement misleads whoever buys the machines."""
    table = tables(INPUTS)["inputs"]
    for item in fields(INPUTS):
        assert item.metadata["source"] in {"measured", "counted", "**assumed**"}
        assert f"| `{item.name}` |" in table
    results = (DOCUMENT.parents[1] / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    assert f"{INPUTS.node_tokens_per_s:,.0f}" in results
    assert "2026-11-29" in results
