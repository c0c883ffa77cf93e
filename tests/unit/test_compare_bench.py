"""The pure parts of ``bench.compare``: works, statistics, goals, tables, and who takes turns when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare.catalogue import SYSTEMS, takes_part
from bench.compare.goals import GOALS, Goal, outcomes
from bench.compare.peer_process import Turn
from bench.compare.readings import Reading, Round, Status, percentile, summarize, unequal_work
from bench.compare.rounds import Rules, Seat, measure
from bench.compare.sweeps import SWEEPS, expected_s, parts, seats_within
from bench.compare.table import COLUMNS, goal_table, sweep_table, work_table
from bench.compare.wire import (
    Answer,
    Answered,
    Ask,
    Failed,
    Message,
    RunOrder,
)
from bench.compare.works import WORKS, Work, WorkError, spread, text_of_tokens
from common.types import Prompt

WORK = Work(
    name="W1", title="two", asks=(Ask(ids=(2, 7), text="a", max_tokens=3), Ask(ids=(2,), text="", max_tokens=1))
)
BY_NAME = {system.name: system for system in SYSTEMS}


def words_as_tokens(question: str, system_prompt: str) -> Prompt:
    """BOS and one token for each word."""
    lead, asked = system_prompt.split(), question.split()
    ids = (2, *(len(word) for word in [*lead, *asked]))
    return Prompt(ids=ids, boundaries=(1 + len(lead),) if lead else ())


# --- works ---


def test_works_are_those_of_the_goal_table() -> None:
    """One question too few or a token too many, and the ratios are of something else."""
    works = {name: make(words_as_tokens) for name, make in WORKS.items()}
    assert [(len(work.asks), work.num_tokens) for work in (works["w1"], works["w2"], works["w5"])] == [
        (8, 512),
        (8, 128),
        (8, 256),
    ]
    shared = works["w2"]
    assert words_as_tokens("?", shared.system_prompt).boundaries == (1_922,)
    assert all(ask.ids[:1_922] == shared.asks[0].ids[:1_922] for ask in shared.asks)
    assert len({ask.text for ask in shared.asks}) == 8
    mixed = works["w3"]
    assert len(mixed.asks) == len({ask.text for ask in mixed.asks}) == 64
    assert all(8 <= len(ask.text.split()) <= 300 and 1 <= ask.max_tokens <= 128 for ask in mixed.asks)
    assert all(len(ask.ids) == 1_500 for ask in works["w5"].asks)
    assert works["w6"].asks == works["w1"].asks


def test_works_are_the_same_every_time() -> None:
    """A bench whose questions drift cannot be compared with its own last run."""
    assert [make(words_as_tokens) for make in WORKS.values()] == [make(words_as_tokens) for make in WORKS.values()]


@given(st.integers(1, 400), st.integers(0, 5), st.integers(1, 3))
def test_a_text_has_exactly_the_tokens_asked_for(num_tokens: int, seed: int, num_lead: int) -> None:
    """Longer words may be several tokens; the text must come out even all the same."""

    def count(text: str) -> int:
        return num_lead + sum(1 + (len(word) > 6) for word in text.split())

    if num_tokens >= num_lead:
        assert count(text_of_tokens(seed, num_tokens, count)) == num_tokens


def test_a_length_that_cannot_be_made_is_an_error() -> None:
    """A tokenizer of two tokens a word has no odd lengths."""
    with pytest.raises(WorkError, match="exactly 7"):
        text_of_tokens(0, 7, lambda text: 2 * len(text.split()))


@given(st.integers(0, 200), st.integers(0, 20))
def test_chosen_questions_are_spread_and_different(num_items: int, num_chosen: int) -> None:
    """The first eight of W3 say nothing of the others."""
    chosen = list(spread(num_items, num_chosen))
    assert len(chosen) == min(num_items, num_chosen) == len(set(chosen))
    assert chosen == sorted(chosen) and all(0 <= index < num_items for index in chosen)


def test_orders_keep_what_a_question_belongs_to() -> None:
    """Alone and together may differ in company only."""
    work = WORKS["w2"](words_as_tokens)
    together, alone = work.order("shared"), work.alone(3, "shared")
    assert alone == replace(together, asks=(together.asks[3],))
    clipped = work.clipped(4)
    assert [ask.max_tokens for ask in clipped.asks] == [4] * 8
    assert "CLIPPED" in clipped.title
    assert work.clipped(None) is work


# --- statistics ---


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    """One place off flatters or blames."""
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def answered(total_s: float, outputs: tuple[str, str] = ("x y z", "w"), first_s: float | None = 0.5) -> Answered:
    """Both questions of WORK."""
    sizes = (3, 1)
    answers = tuple(
        Answer(output=output, num_tokens=size, first_token_s=first_s, finished_s=total_s)
        for output, size in zip(outputs, sizes, strict=True)
    )
    return Answered(answers=answers, total_s=total_s)


def test_summary_takes_medians_of_rounds_and_pools_questions() -> None:
    """The mean would let one slow round decide; the best would flatter."""
    rounds = [Round(answered=answered(s), peak_rss_bytes=int(s), cpu_s=2 * s) for s in (1.0, 10.0, 2.0)]
    reading = summarize(WORK, "padded", rounds, {0: "x y z", 1: "other"})
    assert reading.tokens_per_s == pytest.approx(4 / 2.0)
    assert reading.median_s == 2.0
    assert (reading.question_p50_s, reading.question_p99_s, reading.first_token_p50_s) == (2.0, 10.0, 0.5)
    assert (reading.peak_rss_bytes, reading.cpu_s) == (10, 4.0)
    assert (reading.num_changed, reading.num_compared) == (1, 2)


def test_summary_tells_the_worst_round_and_no_time_it_was_not_told() -> None:
    """An answer that changes in one round of three does change."""
    rounds = [
        Round(answered=answered(1.0, outputs, first_s=None), peak_rss_bytes=0, cpu_s=0.0)
        for outputs in (("x", "w"), ("y", "w"))
    ]
    reading = summarize(WORK, "padded", rounds, {0: "x", 1: "w"})
    assert reading.num_changed == 1
    assert reading.first_token_p50_s is None


def test_fewer_tokens_than_asked_for_are_unequal_work() -> None:
    """A peer that stops early would look fast."""
    assert unequal_work(WORK, answered(1.0)) == ""
    short = replace(WORK, asks=(replace(WORK.asks[0], max_tokens=4), WORK.asks[1]))
    assert "question 0 got 3 tokens, not 4" in unequal_work(short, answered(1.0))
    assert "1 answers to 2" in unequal_work(WORK, Answered(answers=answered(1.0).answers[:1], total_s=1.0))


# --- goals and tables ---


def measured(system: str, seconds: float, work: str = "W1") -> Reading:
    """A reading of one round."""
    return Reading(
        work=work,
        system=system,
        status=Status.MEASURED,
        rounds_s=(seconds,),
        tokens_per_s=100 / seconds,
        num_changed=1,
        num_compared=8,
    )


def test_a_goal_is_reached_only_over_what_was_measured() -> None:
    """A peer that is not installed must not count as beaten."""
    goal = Goal(work="W1", system="kev-strict-bf16", over=("padded", "vllm"), factor=2.0)
    readings = [
        measured("kev-strict-bf16", 1.0),
        measured("padded", 2.0),
        Reading(work="W1", system="vllm", status=Status.NOT_INSTALLED),
    ]
    padded, vllm = outcomes(readings, [goal])
    assert (padded.ratio, padded.reached) == (2.0, True)
    assert (vllm.ratio, vllm.reached) == (None, None)
    slow = outcomes([readings[0], measured("padded", 1.9)], [goal])[0]
    assert slow.reached is False
    assert outcomes([measured("padded", 1.0, work="W9")], [goal]) == []
    assert [row[-2:] for row in goal_table([padded, vllm]).rows] == [("2.00x", "yes"), ("-", "not measured")]


def test_goals_name_systems_that_run_the_work() -> None:
    """A misspelt name would leave a goal open for ever."""
    for goal in GOALS:
        assert all(takes_part(BY_NAME[name], goal.work) for name in (goal.system, *goal.over)), goal


def test_a_system_without_a_number_shows_why() -> None:
    """Left out silently, a peer looks beaten."""
    readings = [
        measured("padded", 2.0),
        Reading(work="W1", system="vllm", status=Status.NOT_INSTALLED, note="--setup"),
        Reading(work="W1", system="kev-strict-int8", status=Status.NOT_OFFERED, note="no int8\nhere"),
    ]
    table = work_table("W1", readings)
    assert all(len(row) == len(COLUMNS) for row in table.rows)
    assert table.rows[0][1] == "50.0" and table.rows[0][-1] == "1 of 8"
    assert [row[1] for row in table.rows[1:]] == ["not installed", "not offered: no int8"]
    lines = table.markdown().splitlines()
    assert len(lines) == 2 + 2 + 3
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_a_sweep_shows_each_system_at_each_size() -> None:
    """A skipped size keeps its column."""
    skipped = Reading(work="p", system="padded", status=Status.SKIPPED, note="up to 99 s expected")
    table = sweep_table("Growth", "channels", [[measured("padded", 1.0)], [skipped]], [1, 1_024])
    assert table.columns == ("tokens/s by channels", "1", "1,024")
    assert table.rows == ((BY_NAME["padded"].label, "100.0", "skipped: up to 99 s expected"),)


def test_sweeps_cover_the_published_sizes() -> None:
    """The axes of the issue; every point fits the processes it runs in."""
    made = {name: make(words_as_tokens) for name, make in SWEEPS.items()}
    assert [point.size for point in made["channels"].points] == [1, 2, 4, 8, 16, 32]
    assert [point.size for point in made["prompt"].points] == [16, 64, 256, 1_024, 4_096]
    assert [model for model, _ in parts(made["model"].points)] == ["demo", "random"]
    for sweep in made.values():
        for point in sweep.points:
            assert len(point.work.asks) <= sweep.max_slots
            assert all(len(ask.ids) + ask.max_tokens <= sweep.max_context for ask in point.work.asks)
    assert expected_s(2.0, 10, 20, 2.0) == pytest.approx(8.0)


def test_a_size_that_would_take_too_long_is_skipped_with_all_larger_ones() -> None:
    """One slow system must not stop a sweep, and its missing points must say why."""
    slow, quick = seat("padded", Scripted(lambda order, _: echo(order))), seat("serial", Scripted(lambda o, _: echo(o)))
    gone = seat("vllm", None, Status.NOT_INSTALLED)
    last = [measured("padded", 30.0), measured("serial", 3.0)]
    kept = seats_within([slow, quick, gone], last, lambda seconds: 4 * seconds, limit_s=100.0)
    assert kept[1:] == [quick, gone]
    assert kept[0].player is None and kept[0].status is Status.SKIPPED and "120 s" in kept[0].note
    skipped = Reading(work="p", system="padded", status=Status.SKIPPED, note="up to 120 s")
    assert seats_within([slow], [skipped], lambda seconds: seconds, limit_s=1e9)[0].note == "up to 120 s"


# --- rounds ---


class Scripted:
    """Answers from a list; notes every order."""

    def __init__(self, reply: Callable[[RunOrder, int], Message]) -> None:
        self._reply = reply
        self.orders: list[RunOrder] = []

    def turn(self, order: Message, limit_s: float) -> Turn:
        """Carry out one order."""
        assert isinstance(order, RunOrder) and limit_s > 0
        self.orders.append(order)
        return Turn(reply=self._reply(order, len(self.orders)), peak_rss_bytes=5, cpu_s=1.0)


def echo(order: RunOrder, seconds: float = 1.0) -> Answered:
    """As many tokens as asked for."""
    answers = (
        Answer(output=ask.text, num_tokens=ask.max_tokens, first_token_s=None, finished_s=seconds) for ask in order.asks
    )
    return Answered(answers=tuple(answers), total_s=seconds)


def seat(name: str, player: Scripted | None, status: Status = Status.MEASURED) -> Seat:
    """A seat for a known system."""
    return Seat(system=BY_NAME[name], player=player, status=status, note="" if player else "why")


def test_systems_alternate_after_their_questions_alone() -> None:
    """One after the other, round by round, there and back: drift of the machine and neighbours hit all alike."""
    told: list[str] = []
    players = [Scripted(lambda order, _: echo(order)) for _ in range(2)]
    seats = [seat("padded", players[0]), seat("vllm", None, Status.NOT_INSTALLED), seat("serial", players[1])]
    readings = measure(WORK, seats, Rules(num_rounds=2), told.append)
    assert [len(order.asks) for order in players[0].orders] == [1, 1, 2, 2]
    assert [text.split(":")[0] for text in told] == [
        "1/6 W1, alone",
        "2/6 W1, alone",
        "3/6 W1, round 1 of 2",
        "4/6 W1, round 1 of 2",
        "5/6 W1, round 2 of 2",
        "6/6 W1, round 2 of 2",
    ]
    labels = [text.split(": ")[1] for text in told]
    assert labels[:2] == labels[4:] == labels[2:4][::-1] and labels[0] != labels[1]
    assert [reading.status for reading in readings] == [Status.MEASURED, Status.NOT_INSTALLED, Status.MEASURED]
    assert readings[0].rounds_s == (1.0, 1.0) and readings[0].num_changed == 0 and readings[0].num_compared == 2
    assert readings[1].note == "why"


def test_a_slow_system_gets_fewer_rounds_and_says_so() -> None:
    """It must neither hold up the others for hours nor lose its number."""
    slow, quick = Scripted(lambda order, _: echo(order, 40.0)), Scripted(lambda order, _: echo(order))
    rules = Rules(num_rounds=3, limit_s=100.0)
    readings = measure(WORK, [seat("padded", slow), seat("serial", quick)], rules, lambda _: None)
    assert readings[0].rounds_s == (40.0,) and "1 of 3 rounds" in readings[0].note
    assert len(readings[1].rounds_s) == 3 and readings[1].note == ""


def test_questions_alone_take_at_most_half_the_limit() -> None:
    """Comparing answers is worth less than having a number at all."""
    slow = Scripted(lambda order, _: echo(order, 60.0))
    reading = measure(WORK, [seat("padded", slow)], Rules(limit_s=100.0), lambda _: None)[0]
    assert reading.num_compared == 1 and reading.rounds_s == (60.0,)


@pytest.mark.parametrize(
    ("reply", "status", "note"),
    [
        (Failed(message="out of memory"), Status.FAILED, "out of memory"),
        (Failed(message="no int8", offered=False), Status.NOT_OFFERED, "no int8"),
        (answered(1.0, ("x", "y")), Status.FAILED, "unequal work"),
    ],
)
def test_one_that_fails_is_reported_and_the_others_go_on(reply: Message, status: Status, note: str) -> None:
    """Hours of measuring must not end with one peer's trouble."""
    work = replace(WORK, asks=tuple(replace(ask, max_tokens=9) for ask in WORK.asks))
    bad, good = Scripted(lambda _, __: reply), Scripted(lambda order, _: echo(order))
    readings = measure(work, [seat("padded", bad), seat("serial", good)], Rules(), lambda _: None)
    assert readings[0].status is status and note in readings[0].note
    assert readings[1].status is Status.MEASURED
