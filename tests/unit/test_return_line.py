"""When those who were refused come back: the line behind every Retry-After, with a clock that the test moves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_svc.return_line import MAX_S, MIN_S, NUM_LANES, UNKNOWN_S, Refused, ReturnLine

PACES = st.floats(0.01, 10_000)
ASKS = st.lists(
    st.tuples(
        st.text(max_size=2),
        st.integers(1, 50),
        st.integers(0, 50),
        st.one_of(st.just(0.0), st.floats(0, 20)),
        st.one_of(st.none(), PACES),
    ),
    max_size=60,
)


def line_of(num_channels: int = 16) -> ReturnLine:
    return ReturnLine(num_channels, "kev")


def refused(number: int, tenant: str = "", num_missing: int = 1, num_questions: int = 1) -> Refused:
    return Refused(request_id=f"r{number}", tenant=tenant, num_missing=num_missing, num_questions=num_questions)


@settings(deadline=None, max_examples=40)
@given(ASKS)
def test_whatever_comes_nobody_is_sent_away_for_too_long(
    asks: list[tuple[str, int, int, float, float | None]],
) -> None:
    """A client would come back at once, in an hour, or never; or the line would grow with every refusal."""
    line, now_s = line_of(), 0.0
    for number, (tenant, num_missing, more, pause_s, per_s) in enumerate(asks):
        now_s += pause_s
        told_s = line.wait_s(refused(number, tenant, num_missing, num_missing + more), per_s, now_s)
        assert (MIN_S if per_s else UNKNOWN_S) <= told_s <= MAX_S
        assert line.num_waiting >= 0.0
    assert len(line._lanes) <= NUM_LANES


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.floats(6.0, 1_000))
def test_who_is_refused_at_one_moment_is_told_many(number: int, per_s: float) -> None:
    """A burst would come back as a burst: as many refusals again, and a node that idles in between."""
    line = line_of()
    told_s = [line.wait_s(refused(each), per_s, 5.0) for each in range(number)]
    for rank, each_s in enumerate(told_s, 1):
        assert max(MIN_S, rank / per_s) <= each_s + 1e-9
        assert each_s <= max(MIN_S, (rank + 1) / per_s) + 1e-9
    # However long one looks, no more come back than places become free, and the two at the ends.
    for first_s in told_s[::7]:
        for length_s in (MIN_S, 0.5, 3.0):
            num_back = sum(first_s <= each_s < first_s + length_s for each_s in told_s)
            assert num_back <= (length_s + MIN_S) * per_s + 2


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 30), st.floats(1, 500))
def test_the_more_were_refused_before_the_later(before: list[int], num_missing: int, per_s: float) -> None:
    """Who came later would be served first, and the first ones never."""

    def told_after(number: int) -> float:
        line = line_of()
        for each, num_questions in enumerate(before[:number]):
            line.wait_s(refused(each, num_questions=num_questions), per_s, 0.0)
        return line.wait_s(refused(-1, num_missing=num_missing), per_s, 0.0)

    told_s = [told_after(number) for number in range(len(before) + 1)]
    assert all(a_s <= b_s for a_s, b_s in pairwise(told_s) if b_s < MAX_S / 2)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from("aaabbc"), min_size=1, max_size=200), PACES, st.floats(0, 1.5))
def test_turns_that_have_passed_are_forgotten(tenants: list[str], per_s: float, share: float) -> None:
    """Long after a burst the first one for whom there is no room would be told to come back in a minute."""
    line = line_of()
    for number, tenant in enumerate(tenants):
        line.wait_s(refused(number, tenant), per_s, 1.0)
    waiting = line.num_waiting
    line.wait_s(refused(-1, num_questions=0), per_s, 1.0 + share * waiting / per_s)
    assert line.num_waiting == pytest.approx(max(0.0, waiting * (1 - share)), abs=1e-6)


def test_the_end_of_a_long_line_is_spread_too() -> None:
    """Everybody beyond the longest time would come back at that moment."""
    line = line_of()
    told_s = [line.wait_s(refused(each), 1.0, 0.0) for each in range(500)]
    late_s = sorted(told_s[60:])
    assert MAX_S / 2 <= late_s[0] <= MAX_S / 2 + 1 and MAX_S - 1 <= late_s[-1] <= MAX_S
    assert max(b - a for a, b in pairwise(late_s)) < 1.0
    assert line.num_waiting <= 60.0


def test_whoever_asks_again_and_again_sends_himself_away() -> None:
    """One client in a loop would have everybody else told to come back in a minute."""
    line = line_of()
    for each in range(1_000):
        line.wait_s(refused(each, "loop"), 20.0, 0.0)
    assert line.wait_s(refused(0, "loop"), 20.0, 0.0) >= MAX_S / 2
    assert line.wait_s(refused(0, "other"), 20.0, 0.0) <= 3 / 20.0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=60), st.floats(5, 200))
def test_tenants_share_the_pace(tenants: list[str], per_s: float) -> None:
    """A tenant is told a time at which his turn cannot come, or waits for others beyond their share."""
    line, own = line_of(), dict.fromkeys(tenants, 0)
    for number, tenant in enumerate(tenants, 1):
        own[tenant] += 1
        told_s = line.wait_s(refused(number, tenant), per_s, 0.0)
        assert max(MIN_S, own[tenant] / per_s) <= told_s + 1e-9
        assert told_s <= max(MIN_S, (min(number, len(own) * own[tenant]) + 1) / per_s) + 1e-9


def test_one_id_is_drawn_one_moment() -> None:
    """What a client is told could not be told again from the log."""
    told_s = {line_of().wait_s(Refused(request_id="r"), 0.5, 0.0) for _ in range(3)}
    assert len(told_s) == 1
    line = line_of()
    nameless_s = [line.wait_s(Refused(num_questions=0), 0.5, 0.0) for _ in range(20)]
    assert len(set(nameless_s)) == 20, "those without an id are told one moment"


def test_without_a_pace_a_burst_is_spread_all_the_same() -> None:
    """Whoever is refused before the first answer would come back at one moment."""
    line = line_of(num_channels=4)
    told_s = [line.wait_s(refused(each), None, 0.0) for each in range(40)]
    assert UNKNOWN_S <= told_s[0] <= 1.5 and 11.0 <= told_s[-1] <= 11.25
    assert max(sum(second <= each_s < second + 1 for each_s in told_s) for second in range(12)) <= 6


def test_memory_does_not_grow() -> None:
    """A router that lives for months would keep whoever it refused."""
    line = line_of()
    for each in range(5_000):
        line.wait_s(refused(each, f"tenant {each}"), 5.0, each / 100)
    assert len(line._lanes) <= NUM_LANES
    line.wait_s(refused(0, num_questions=0), 5.0, 1_000.0)
    assert sum(line._lanes.values()) == 0.0 and len(line._lanes) <= 1
