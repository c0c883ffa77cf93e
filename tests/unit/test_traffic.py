"""The traffic simulator: its time, its node, its arrivals, and that nobody is lost in it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.traffic.__main__ import main
from bench.traffic.arrivals import (
    Arrival,
    Flashes,
    Kind,
    Lengths,
    Rhythm,
    Traffic,
    about_anything,
    about_topics,
    together,
    with_guests,
)
from bench.traffic.forward import SharedForward, Speed
from bench.traffic.goals import goals_of, ratio
from bench.traffic.measures import max_over_mean, most_within, percentile, read
from bench.traffic.report import Told, filled, rows, table
from bench.traffic.stories import NAMES, ROUTER, colliding_topics, story
from bench.traffic.virtual_time import run_virtually
from bench.traffic.words import Vocabulary, WordTokenizer
from bench.traffic.world import ComesBack, End, History, WorldSettings, simulate
from common.errors import InvariantError
from common.types import OverflowPolicy, Strategy
from router_svc.embedding import HashedProjection

WORDS = Vocabulary()
SPEED = Speed()
SHORT = Kind(
    name="short",
    share=1.0,
    prompt=Lengths(median=12, spread=0.4),
    answer=Lengths(median=20, spread=0.6),
    wording=about_anything(WORDS),
)


def arrivals(num: int, *, load: float = 0.7, kind: Kind = SHORT, seed: int = 1) -> list[Arrival]:
    traffic = Traffic(kinds=(kind,), load=load)
    return traffic.arrivals(traffic.rate_per_s(SPEED, 8, 1), num, seed)


# --- time


def test_sleepers_wake_in_order_and_cost_nothing() -> None:
    """Time stands still, runs by itself, or wakes the wrong task first."""

    async def sleeper(seconds: float, woken: list[float]) -> None:
        await asyncio.sleep(seconds)
        woken.append(asyncio.get_running_loop().time())

    async def main() -> list[float]:
        woken: list[float] = []
        await asyncio.gather(*(sleeper(seconds, woken) for seconds in (3600.0, 1.5, 86_400.0)))
        return woken

    assert run_virtually(main()) == pytest.approx([1.5, 3600.0, 86_400.0])


def test_a_world_that_stands_still_says_so() -> None:
    """A task that nobody will ever wake hangs the report for ever."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(InvariantError, match="stands still"):
        run_virtually(main())


def test_threads_do_not_let_time_pass() -> None:
    """Long questions are prepared on a thread; real threads would make the numbers depend on the machine."""

    async def main() -> tuple[int, float]:
        found = await asyncio.to_thread(sum, [1, 2])
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return found, asyncio.get_running_loop().time()

    assert run_virtually(main()) == (3, 0.0)


# --- forward


def test_alone_a_question_takes_its_prompt_and_its_answer() -> None:
    """The unit of every figure is wrong."""
    forward: SharedForward[str] = SharedForward(SPEED)
    forward.add("a", 190, 10, 5.0)
    assert forward.next_change_s() == pytest.approx(5.1)
    assert forward.take_ended(5.1 + 0.143) == []
    assert forward.take_ended(5.1 + 0.144) == ["a"]


def test_a_long_prompt_slows_its_neighbours_while_it_lasts() -> None:
    """The engine takes turns between prompts and answers; a giant that costs nobody anything is a fairy tale."""
    forward: SharedForward[str] = SharedForward(SPEED)
    forward.add("neighbour", 0, 40, 0.0)
    forward.add("giant", 1_280, 1, 0.0)
    turn_s = 128 / 1_900 + 0.0144
    assert forward.take_ended(10 * turn_s + 29.9 * 0.0144) == ["giant"]
    assert forward.take_ended(10 * turn_s + 30.1 * 0.0144) == ["neighbour"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90), st.floats(0.0, 0.5)), min_size=1, max_size=8),
    st.integers(1, 7),
)
def test_work_is_conserved_however_time_passes(questions: list[tuple[int, int, float]], pieces: int) -> None:
    """Tokens vanish or are computed twice when a question comes or goes, or time passes in more pieces."""
    whole: SharedForward[int] = SharedForward(SPEED)
    cut: SharedForward[int] = SharedForward(SPEED)
    now_s = 0.0
    for number, (prompt, answer, gap_s) in enumerate(questions):
        for piece in range(pieces):
            cut.take_ended(now_s + gap_s * piece / pieces)
        now_s += gap_s
        for forward in (whole, cut):
            forward.take_ended(now_s)
            forward.add(number, prompt, answer, now_s)
    while len(whole):
        now_s = whole.next_change_s()
        assert sorted(whole.take_ended(now_s)) == sorted(cut.take_ended(now_s + 1e-9))
    assert whole.done_tokens == pytest.approx(sum(prompt + answer for prompt, answer, _ in questions))
    assert cut.done_tokens == pytest.approx(whole.done_tokens)


# --- arrivals


def test_one_seed_is_one_traffic() -> None:
    """Two cases of a story are compared that had other questions."""
    assert arrivals(50) == arrivals(50)
    assert arrivals(50) != arrivals(50, seed=2)


def test_other_words_change_nothing_else() -> None:
    """A hot world would be compared with an even one of other moments and lengths."""

    def shape(kind: Kind) -> list[tuple[float, int, int]]:
        return [(a.at_s, a.prompt_tokens, a.answer_tokens) for a in arrivals(200, kind=kind)]

    assert shape(replace(SHORT, wording=about_topics(WORDS, 3, 1.0))) == shape(SHORT)


def test_guests_disturb_nobody() -> None:
    """The world without the giant has other short questions than the world with it."""
    calm = arrivals(300)
    giant = replace(SHORT, name="giant", prompt=Lengths(median=500))
    told = with_guests(lambda num, seed: calm, giant, every=100)(300, 1)
    assert [arrival for arrival in told if arrival.kind == "short"] == calm
    assert [arrival.prompt_tokens for arrival in told if arrival.kind == "giant"] == [500, 500, 500]
    assert len({arrival.number for arrival in told}) == 303


def test_a_flash_is_everybody_at_once() -> None:
    """The crowd trickles in, and nobody is refused."""
    times = Flashes(size=10, every_s=5.0, within_s=0.1).times(1.0, 25, random.Random(1))
    assert times == sorted(times)
    assert Counter(int(time_s // 5) for time_s in times) == {0: 10, 1: 10, 2: 5}
    assert all(time_s % 5 <= 0.1 for time_s in times)


def test_two_kinds_of_traffic_come_together() -> None:
    """One of them has other moments than alone, or two questions have one number."""
    other = replace(SHORT, name="other")
    both = together(lambda num, seed: arrivals(num), lambda num, seed: arrivals(num, kind=other), 0.25)(80, 1)
    assert [arrival for arrival in both if arrival.kind == "short"] == arrivals(60)
    assert [a.at_s for a in both if a.kind == "other"] == [a.at_s for a in arrivals(20, kind=other)]
    assert {arrival.number for arrival in both} == set(range(80))
    assert [arrival.at_s for arrival in both] == sorted(arrival.at_s for arrival in both)


@pytest.mark.parametrize("rhythm", [Rhythm(), Rhythm(burst=6.0, busy_s=2.0)])
def test_the_rate_is_kept_in_bursts_too(rhythm: Rhythm) -> None:
    """Bursts that bring more in all are no bursts but more load."""
    times = rhythm.times(50.0, 20_000, random.Random(3))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.2 if rhythm.burst > 1 else 0.03)


def test_texts_have_the_length_that_they_claim() -> None:
    """Prompts are longer or shorter than the work that is counted for them."""
    lengths = [WordTokenizer().encode_plain(arrival.text) for arrival in arrivals(50)]
    assert list(map(len, lengths)) == [arrival.prompt_tokens for arrival in arrivals(50)]


def test_zipf_makes_few_topics_frequent() -> None:
    """The skewed story is not skewed."""
    kind = replace(SHORT, prompt=Lengths(median=4), wording=about_topics(WORDS, 100, 1.1))
    counts = Counter(arrival.text.split()[0].partition("x")[0] for arrival in arrivals(2_000, kind=kind))
    assert counts["t0"] > 300 > counts["t50"] * 10


def test_colliding_topics_are_one_bucket_under_one_key_only() -> None:
    """The hostile story must collide by the real hash, and the key must be what helps."""
    topics = [" ".join(WORDS.topic(topic, 16)) for topic in colliding_topics(12, 16, ROUTER)]

    def buckets(key: str) -> set[int]:
        projection = HashedProjection(ROUTER.semantic_planes, key)
        return {projection.bucket(WordTokenizer().encode_plain(text)) for text in topics}

    assert len(buckets(ROUTER.hash_key)) == 1
    assert len(buckets("another key")) > 4


# --- world


def overlaps(history: History) -> tuple[int, int]:
    """Most questions that ran at the same time: in all, and on one channel."""
    changes = sorted(
        (moment, step, ending.channel_id)
        for ending in history.endings
        if ending.started_s is not None
        for moment, step in ((ending.started_s, 1), (ending.ended_s, -1))
    )
    running: Counter[int | None] = Counter()
    most = most_of_channel = 0
    for _, step, channel_id in changes:
        running[channel_id] += step
        most, most_of_channel = max(most, running.total()), max(most_of_channel, running[channel_id])
    return most, most_of_channel


ROUTERS = st.builds(
    lambda policy, breaker, queue, overflow: replace(
        ROUTER,
        channel_pool_size=6,
        overflow_policy=policy,
        breaker_queue_length=breaker,
        channel_queue_size=queue,
        overflow_queue_size=overflow,
    ),
    st.sampled_from(OverflowPolicy),
    st.sampled_from([0, 1, 3]),
    st.integers(1, 4),
    st.integers(1, 8),
)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    router=ROUTERS,
    strategy=st.sampled_from(Strategy),
    slots=st.integers(1, 5),
    load=st.floats(0.3, 4.0),
    timeout_ms=st.sampled_from([300, 2_000, 60_000]),
    tries=st.integers(1, 3),
    seed=st.integers(0, 1_000),
)
def test_every_arrival_ends_exactly_once(
    router: object, strategy: Strategy, slots: int, load: float, timeout_ms: int, tries: int, seed: int
) -> None:
    """A question is lost, answered twice, or runs beside another one of its channel."""
    kind = replace(SHORT, timeout_ms=timeout_ms, stalls=seed % 7 == 0)
    asked = arrivals(60, load=load, kind=kind, seed=seed)
    world = WorldSettings(strategy=strategy, router=router, num_slots=slots, max_tries=tries)  # type: ignore[arg-type]
    history = simulate(world, asked)
    assert [ending.arrival for ending in history.endings] == asked
    most, most_of_channel = overlaps(history)
    assert most <= slots
    assert most_of_channel <= 1
    for ending in history.endings:
        assert ending.ended_s >= ending.arrival.at_s
        assert (ending.end is End.REJECTED) <= (ending.started_s is None)
        if ending.end is End.ANSWERED:
            assert ending.started_s is not None
            assert ending.ended_s - ending.arrival.at_s <= timeout_ms / 1000 * tries + 60 * (tries - 1)
    answered = [ending.arrival for ending in history.endings if ending.end is End.ANSWERED]
    needed = sum(arrival.prompt_tokens + arrival.answer_tokens for arrival in answered)
    if any(ending.end is End.TIMED_OUT for ending in history.endings):
        assert history.done_tokens >= needed - 1e-3
    else:
        assert history.done_tokens == pytest.approx(needed)


def endings(history: History) -> Sequence[object]:
    return [(e.end, e.started_s, e.ended_s, e.channel_id, e.hash_bucket, e.num_tries) for e in history.endings]


@pytest.mark.parametrize("strategy", Strategy)
def test_the_same_world_runs_the_same(strategy: Strategy) -> None:
    """A figure cannot be looked into if the next run has another one."""
    world = WorldSettings(strategy=strategy)
    first, second = (simulate(world, arrivals(80)) for _ in range(2))
    assert endings(first) == endings(second)


def test_nodes_share_the_work() -> None:
    """A second node idles, or a question runs on both."""
    asked = arrivals(200, load=1.6)
    one, two = (read(simulate(WorldSettings(strategy=Strategy.ROUND_ROBIN, num_nodes=n), asked)) for n in (1, 2))
    assert two.of("short").wait_p99_s < one.of("short").wait_p99_s / 3
    assert two.questions_per_s > one.questions_per_s


def test_who_is_refused_may_ask_again() -> None:
    """A retry is counted as a question of its own, or never comes."""
    router = replace(ROUTER, channel_pool_size=2, channel_queue_size=1, overflow_policy=OverflowPolicy.REJECT)
    asked = arrivals(60, load=1.0)
    once, often = (
        simulate(WorldSettings(strategy=Strategy.ROUND_ROBIN, router=router, max_tries=tries), asked)
        for tries in (1, 6)
    )
    refused = [sum(ending.end is End.REJECTED for ending in history.endings) for history in (once, often)]
    assert refused[0] > refused[1]
    assert 1 < max(ending.num_tries for ending in often.endings) <= 6


@pytest.mark.parametrize("comes_back", ComesBack)
def test_a_client_comes_back_when_it_says(comes_back: ComesBack) -> None:
    """Two kinds of clients are compared that do the same."""
    router = replace(ROUTER, channel_pool_size=1, channel_queue_size=1, overflow_policy=OverflowPolicy.REJECT)
    world = WorldSettings(strategy=Strategy.ROUND_ROBIN, router=router, max_tries=50, comes_back=comes_back)
    asked = [replace(arrival, at_s=0.0) for arrival in arrivals(3)]
    history = simulate(world, asked)
    assert all(ending.end is End.ANSWERED for ending in history.endings)
    assert len(history.returns_s) == sum(ending.num_tries - 1 for ending in history.endings)
    first_s = history.returns_s[0]
    match comes_back:
        case ComesBack.AS_TOLD:
            assert 1.0 < first_s and len(set(history.returns_s)) == len(history.returns_s)
        case ComesBack.IN_WHOLE_SECONDS:
            assert all(moment_s == round(moment_s) for moment_s in history.returns_s)
        case ComesBack.AFTER_ONE_PLACE:
            assert history.returns_s[:2] == (1.0, 1.0)
        case ComesBack.BY_ITSELF:
            assert 0.375 <= first_s <= 0.5


# --- figures


@given(st.lists(st.integers(0, 60)), st.integers(1, 20))
def test_the_peak_is_the_fullest_stretch(values: list[int], length: int) -> None:
    """A peak across two stretches of the clock is seen as two small ones."""
    values.sort()
    naive = max((sum(first <= value < first + length for value in values) for first in values), default=0)
    assert most_within(values, length) == naive


def test_percentiles_are_of_the_nearest_rank() -> None:
    """One slow question of a hundred is the p99's business only from the second on."""
    assert percentile([*range(1, 101)], 0.99) == 99
    assert percentile([5.0], 0.5) == 5.0
    assert percentile([], 0.99) == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_the_fullest_channel_is_between_even_and_everything(loads: list[float]) -> None:
    """A ratio below 1, or above the number of channels, is no ratio of the largest to the mean."""
    assert 1 - 1e-9 <= max_over_mean(loads) <= len(loads) * (1 + 1e-9)


def test_a_ratio_of_two_nothings_is_one() -> None:
    """Two worlds without waits differ by a thousand times."""
    assert ratio(0.0, 0.0) == ratio(0.001, 0.0) == 1.0
    assert ratio(1.0, 0.5) == 2.0


@pytest.fixture(scope="module")
def told() -> Told:
    hot = story("hot")
    return Told(story=hot, readings={case.label: hot.run(case, 150, 1) for case in hot.cases})


def test_a_report_has_a_row_per_case_and_class(told: Told) -> None:
    """A class is missing, or the one that matters is not the first."""
    labels = [(cells[0], cells[1]) for cells in rows(told)]
    assert labels[:2] == [("even load", "cold"), ("", "hot")]
    assert len(labels) == 2 * len(told.story.cases)
    assert table(told).count("\n") == len(labels) + 1


def test_goals_are_about_remedies(told: Told) -> None:
    """The case as it was told must not count, nor a story that was not run."""
    assert {goal.case for goal in told.goals} == {"semantic_hash, breaker", "consistent_hash, breaker"}
    assert goals_of("hot", {}) == goals_of("zipf", told.readings) == []


def test_a_document_without_a_place_is_refused(told: Told) -> None:
    """Tables are written nowhere, and nobody is told."""
    with pytest.raises(ValueError, match="no part 'hot'"):
        filled("no marks", [told])


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options are dropped, or a filter leaves out the reference."""
    files = [tmp_path / "figures.json", tmp_path / "page.md"]
    asked = ["--story", "stall", "--strategies", "round_robin", "--questions", "100"]
    assert main([*asked, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    cases = json.loads(files[0].read_text(encoding="utf-8"))["stall"]["cases"]
    assert list(cases) == ["none stalls", "round_robin, no breaker", "round_robin, breaker"]
    assert "| none stalls | short |" in files[1].read_text(encoding="utf-8")
    assert "round_robin, breaker" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_every_case(name: str) -> None:
    """A story or case is added or renamed, and docs/traffic.md still shows the old one."""
    page = (Path(__file__).parents[2] / "docs" / "traffic.md").read_text(encoding="utf-8")
    shown = page.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0].splitlines()[2:]
    labels = [line.split("|")[1].strip() for line in shown]
    assert [label for label in labels if label] == [case.label for case in story(name).cases]


def test_a_document_is_looked_at_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes of simulation end in a refusal to write."""
    document = tmp_path / "page.md"
    document.write_text("<!-- hot -->\n\n<!-- /hot -->\n", encoding="utf-8")
    assert main(["--story", "hot", "stall", "--questions", "1000000000", "--markdown", str(document)]) == 2
    assert "no marks <!-- NAME --> for stall" in capsys.readouterr().out


def test_too_few_questions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A p99 of ten questions is shown as if it meant something."""
    with pytest.raises(SystemExit):
        main(["--questions", "10"])
    assert "at least 100" in capsys.readouterr().err
