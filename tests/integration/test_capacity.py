"""The capacity model's arithmetic, its simulation, and the document that shows both."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity import (
    DOCUMENT,
    QUESTIONS_PER_MINUTE,
    EntryBytes,
    Inputs,
    bytes_per_question,
    channels_for,
    filled,
    joined,
    plan,
    scripts_per_question,
    tables,
)
from bench.queueing import QueueSettings, erlang_c, mean_wait_s, simulate

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
    made = plan(rate, INPUTS)
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
    made = plan(1_000, INPUTS)
    assert made.service_s == pytest.approx(8 * 64 / 1_737)
    assert made.busy_slots == pytest.approx(1_000 / 60 * 8 * 64 / 1_737)
    assert (made.num_deployments, made.num_nodes, made.num_channels) == (1, 2, 12)
    assert made.messages_per_s == pytest.approx(1_000 / 60 * (1 + 1 + 64 + 1 + 1 / 8))
    assert made.scripts_per_s == pytest.approx(1_000 / 60 * (4 + 64 + 4 * 66 / 64 + 3 / 8))
    assert made.wait_share == pytest.approx(erlang_c(8, made.busy_slots))
    assert made.first_bottleneck == "store: processor"


@settings(max_examples=60, deadline=None)
@given(RATES, RATES)
def test_more_load_never_needs_less(one: float, other: float) -> None:
    """A plan that shrinks as the load grows has a wrong sign somewhere."""
    less, more = plan(min(one, other), INPUTS), plan(max(one, other), INPUTS)
    assert less.num_nodes <= more.num_nodes
    assert less.num_deployments <= more.num_deployments
    assert less.messages_per_s <= more.messages_per_s
    assert less.store_bytes <= more.store_bytes


@settings(max_examples=60, deadline=None)
@given(RATES)
def test_a_plan_keeps_every_bound(rate: float) -> None:
    """No store busier or fuller, no pool larger, no slot busier than the inputs allow."""
    made = plan(rate, INPUTS)
    working = made.num_nodes - INPUTS.spare_nodes * made.num_deployments
    assert made.busy_slots <= working * INPUTS.slots_per_node * INPUTS.busy_share * (1 + 1e-9)
    assert made.store_cores <= made.num_deployments * INPUTS.store_busy_share * (1 + 1e-3)
    assert made.store_bytes <= made.num_deployments * INPUTS.store_gib * 2**30 * (1 + 1e-9)
    assert made.num_channels <= 4096
    assert math.isfinite(made.wait_ms)
    assert max(made.limits.values()) <= made.num_deployments


def test_joined_deltas_unload_the_store() -> None:
    """The lever that the document recommends must be one."""
    one, other = plan(100_000, INPUTS), plan(100_000, joined(INPUTS))
    assert other.num_deployments < one.num_deployments / 2
    assert other.messages_per_s < one.messages_per_s / 5
    assert scripts_per_question(joined(INPUTS), 0.3) < scripts_per_question(INPUTS, 0.3) / 5


def test_another_bottleneck_is_named_when_it_is_one() -> None:
    """A bottleneck that is always the same one is not computed."""
    assert plan(100_000, replace(INPUTS, store_gib=0.5)).first_bottleneck == "store: memory"
    assert plan(100_000, replace(INPUTS, script_us=1.0, active_channel_us=0.0)).first_bottleneck.startswith(
        "aggregator"
    )
    slow = replace(joined(INPUTS), node_tokens_per_s=0.5, script_us=1.0, active_channel_us=0.0)
    assert plan(1_000, slow).first_bottleneck == "channels"


def test_entries_are_measured_on_real_messages() -> None:
    """Sizes from a guess would drift away from the protobuf definitions."""
    short, long = EntryBytes.encoded(replace(INPUTS, prompt_tokens=10)), EntryBytes.encoded(INPUTS)
    assert 100 < short.work < long.work < 5 * INPUTS.prompt_tokens
    assert long.delta < EntryBytes.encoded(joined(INPUTS)).delta < long.delta + 16 * 5
    assert long.started < long.result


def test_bytes_agree_with_the_measured_store() -> None:
    """``bench.store_cost`` kept 10,258 bytes for such a question, without trace, tenant and record."""
    sizes = EntryBytes(work=545, started=77, delta=78, result=744, record=0)
    kept = bytes_per_question(replace(INPUTS, questions_per_request=1), sizes)
    assert kept == pytest.approx(10_258, rel=0.05)


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
