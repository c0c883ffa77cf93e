"""What the simulator says about the router: it agrees with theory, the stories hurt as told, and the remedies help.

All of it in virtual time: the figures are the same on every machine.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.queueing import mean_wait_s
from bench.traffic.arrivals import Arrival
from bench.traffic.forward import Speed
from bench.traffic.goals import ratio
from bench.traffic.measures import Reading
from bench.traffic.report import Told
from bench.traffic.stories import NAMES, ROUTER, story
from bench.traffic.world import End, WorldSettings, simulate
from common.types import Strategy
from router_svc.settings import RouterSettings

NUM_QUESTIONS = {"hot": 1_500, "giant": 1_500, "returns": 250, "heavy": 400}
NUM_OTHERS = 800
PLAIN = Speed(prefill_s=0.0, step_s=0.001)
"""Every slot a server of its own: a token takes a millisecond, prompts nothing."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The router warns of hot spots; here they are made on purpose."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# --- theory


def plain_arrivals(rate_per_s: float, num: int, *, steady: bool, seed: int) -> list[Arrival]:
    """Poisson arrivals whose answers take 0.3 s, all of them or exponentially distributed."""
    numbers = random.Random(seed)
    now_s, made = 0.0, []
    for number in range(num):
        now_s += numbers.expovariate(rate_per_s)
        tokens = 300 if steady else max(1, round(numbers.expovariate(1 / 300)))
        made.append(
            Arrival(
                number=number,
                at_s=now_s,
                kind="plain",
                text=f"word{number}",
                prompt_tokens=1,
                answer_tokens=tokens,
                timeout_ms=10_000_000,
            )
        )
    return made


def waits_s(asked: Sequence[Arrival], slots: int, channels: int) -> list[float]:
    """Of every arrival, in a router that is in nobody's way."""
    router = RouterSettings(channel_pool_size=channels, channel_queue_size=10_000, breaker_max_age_ms=0)
    world = WorldSettings(strategy=Strategy.ROUND_ROBIN, router=router, num_slots=slots, speed=PLAIN)
    return [ending.wait_s for ending in simulate(world, asked).endings]


@pytest.mark.parametrize(("slots", "channels", "steady"), [(1, 1, False), (1, 6, True), (3, 64, False), (8, 64, True)])
def test_with_room_for_all_the_router_is_one_line_for_all_slots(slots: int, channels: int, steady: bool) -> None:
    """First come first served, to the microsecond: channels, breaker and leases must neither reorder nor idle."""
    asked = plain_arrivals(0.85 * slots / 0.3, 800, steady=steady, seed=slots)
    free_s = [0.0] * slots  # Kiefer, Wolfowitz 1955: who comes takes the slot that is free first
    expected_s: list[float] = []
    for arrival in asked:
        start_s = max(arrival.at_s, heapq.heappop(free_s))
        expected_s.append(start_s - arrival.at_s)
        heapq.heappush(free_s, start_s + arrival.answer_tokens * PLAIN.step_s)
    assert waits_s(asked, slots, channels) == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize(("steady", "share"), [(False, 1.0), (True, 0.5)])
def test_one_slot_waits_as_the_formulas_say(steady: bool, share: float) -> None:
    """M/M/1, and M/D/1 which waits half as long (Pollaczek-Khinchine), within 10 %."""
    asked = plain_arrivals(0.6 / 0.3, 6_000, steady=steady, seed=1)
    found_s = waits_s(asked, 1, 4)
    assert sum(found_s) / len(found_s) == pytest.approx(share * mean_wait_s(1, 0.6 / 0.3, 0.3), rel=0.1)


# --- stories


@cache
def told(name: str) -> Told:
    subject, num = story(name), NUM_QUESTIONS.get(name, NUM_OTHERS)
    return Told(story=subject, readings={case.label: subject.run(case, num, 1) for case in subject.cases})


def cases(name: str) -> Sequence[Reading]:
    """In the order of the story."""
    return list(told(name).readings.values())


@pytest.mark.parametrize("name", ["mix", "hot", "heavy", "giant", "zipf", "hostile", "stall"])
def test_the_story_hurts_and_its_remedies_help(name: str) -> None:
    """A story whose traffic is harmless proves nothing, nor does a remedy that leaves things as they are."""
    subject = told(name).story
    calm, hurt, *remedied = (reading.of(subject.focus) for reading in cases(name))
    assert hurt.answer_p99_s > 1.4 * calm.answer_p99_s
    assert all(remedy.answer_p99_s < 0.8 * hurt.answer_p99_s for remedy in remedied)


@pytest.mark.parametrize("name", NAMES)
def test_the_goals_are_reached(name: str) -> None:
    """The router became unfair under skew: look at the figures of ``python -m bench.traffic``."""
    assert [goal for goal in told(name).goals if not goal.reached] == []


def test_three_stories_have_goals() -> None:
    """Goals that are not looked at are reached."""
    assert [len(told(name).goals) for name in ("hot", "giant", "returns")] == [4, 1, 4]


def test_the_router_names_the_hot_bucket_and_the_remedies() -> None:
    """The operator found it by hand; the detector must say the same."""
    advice = told("hot").advice
    assert all(word in advice for word in ("consistent_hash", "prebucket", "breaker"))


def test_the_router_names_the_bucket_of_few_long_questions() -> None:
    """Counted by questions it is not hot; an operator would see a full channel and no reason."""
    calm, hurt, *_ = cases("heavy")
    assert hurt.hot_bucket_share < 0.25
    assert "questions are long" in hurt.advice and "length_aware" in hurt.advice
    assert calm.advice == ""


def test_without_a_breaker_a_hot_bucket_wastes_the_node() -> None:
    """The story: one channel full, the others idle, the whole held up by one channel."""
    calm, hurt, *_ = cases("hot")
    assert hurt.questions_per_s < 0.6 * calm.questions_per_s
    assert hurt.max_over_mean_load > 8
    assert hurt.hot_bucket_share > 0.45


def test_a_key_of_its_own_keeps_attackers_out() -> None:
    """Questions made to collide under a known key must not collide under another one."""
    calm, known_key, own_key, breaker = cases("hostile")
    assert known_key.questions_per_s < 0.2 * calm.questions_per_s
    assert own_key.num_timed_out == breaker.num_timed_out == 0
    assert own_key.hot_bucket_share < 0.2


def test_policies_differ_in_what_a_burst_costs() -> None:
    """``wait`` refuses nobody and lets some run out of time; ``queue`` and ``reject`` refuse and answer in time."""
    calm, waits, queues, rejects, _ = cases("burst")
    assert calm.num_timed_out == calm.num_rejected == 0
    assert waits.num_rejected == 0 < waits.num_timed_out
    assert queues.num_timed_out == rejects.num_timed_out == 0 < queues.num_rejected < rejects.num_rejected
    assert rejects.of("all").wait_p99_s < queues.of("all").wait_p99_s < waits.of("all").wait_p99_s


def test_who_is_told_a_time_of_his_own_asks_seldom() -> None:
    """A crowd that was refused comes back as a crowd, or the node idles while it stays away."""
    in_line, crowded, spread, in_seconds, untold = cases("returns")
    assert crowded.refusals_per_answer > 8 * spread.refusals_per_answer
    assert untold.refusals_per_answer > 1.5 * spread.refusals_per_answer
    assert crowded.peak_returns > 50 and spread.peak_returns <= 10 and in_seconds.peak_returns <= 30
    assert spread.utilization > 0.95 * in_line.utilization
    assert all(reading.num_rejected == reading.num_timed_out == 0 for reading in cases("returns"))


def test_urgent_questions_pass_others_and_starve_nobody() -> None:
    """Priorities do nothing, or the rest pays more than it gains."""
    alike, some, many = cases("priority")
    assert some.of("urgent").wait_p50_s < 0.5 * alike.of("urgent").wait_p50_s
    assert many.of("urgent").wait_p99_s < 0.5 * alike.of("urgent").wait_p99_s
    assert ratio(many.of("normal").wait_p99_s, alike.of("normal").wait_p99_s) < 1.4


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=50), st.integers(0, 1_000), st.floats(0.8, 3.0))
def test_nobody_is_passed_for_longer_than_a_priority_is_worth(priorities: list[int], seed: int, busy: float) -> None:
    """The ageing bound: whoever came later by more than the difference of priorities is worth starts later."""
    asked = plain_arrivals(busy * 2 / 0.3, len(priorities), steady=False, seed=seed)
    asked = [replace(arrival, priority=priority) for arrival, priority in zip(asked, priorities, strict=True)]
    # A channel for every question: each is the first of its channel.
    router = replace(ROUTER, channel_pool_size=64)
    world = WorldSettings(strategy=Strategy.ROUND_ROBIN, router=router, num_slots=2, speed=PLAIN)
    endings = simulate(world, asked).endings
    assert all(ending.end is End.ANSWERED for ending in endings)
    for first in endings:
        for second in endings:
            head_start_s = (second.arrival.priority - first.arrival.priority) * 0.1
            if second.arrival.at_s > first.arrival.at_s + max(0.0, head_start_s) + 1e-6:
                assert first.started_s is not None
                assert second.started_s is not None
                assert first.started_s <= second.started_s + 1e-9
