"""The scheduler, driven by a runner that invents tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import ManualClock
from common.errors import KevError
from common.types import (
    ChannelDelta,
    ChannelEvent,
    ChannelResult,
    FinishReason,
    IsolationLevel,
    Prompt,
    SamplingParams,
    WorkItem,
)
from inference_svc.answer import AnswerText
from inference_svc.plan import ForwardShapes, StepKind, StepOutput, StepPlan
from inference_svc.sampled import SampledToken
from inference_svc.scheduler import Scheduler, SchedulerSettings
from inference_svc.sequence import Sequence
from inference_svc.slots import Extent, KVLedger

EOS = 2


class Letters:
    """Detokenizer: token id -> its character."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class Rig:
    """A scheduler with books of what it planned."""

    def __init__(
        self,
        max_slots: int = 3,
        num_positions: int = 400,
        keep: bool = False,
        reserve: bool = False,
        ragged: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.ledger = KVLedger(num_positions)
        self.scrubbed: list[Extent] = []
        shapes = ForwardShapes.of(max_slots, prefill_rows=32, segment_tokens=16, ragged=ragged)
        self.settings = SchedulerSettings(
            node_id="n",
            max_slots=max_slots,
            shapes=shapes,
            max_context=120,
            keep_prefixes=keep,
            reserve_context=reserve,
        )
        self.scheduler = Scheduler(self.settings, self.ledger, self.clock, self.scrubbed.append)
        self.events: list[ChannelEvent] = []
        self.plans: list[StepPlan] = []
        self.failing: set[int] = set()
        self.next_token = ord("a")
        self._ids = 0

    def add(
        self,
        num_prompt: int = 4,
        max_tokens: int = 3,
        *,
        request_id: str = "r",
        budget_ms: int = 1_000_000,
        max_parallel: int = 99,
        boundaries: tuple[int, ...] = (),
        num_shared: int = 0,
        stop: tuple[str, ...] = (),
    ) -> int:
        self._ids += 1
        sampling = SamplingParams(max_tokens=max_tokens, stop=stop)
        item = WorkItem(
            request_id=request_id,
            question_index=self._ids,
            channel_id=0,
            prompt=Prompt(ids=tuple(range(100, 100 + num_prompt)), boundaries=boundaries),
            num_shared=num_shared,
            sampling=sampling,
            isolation=IsolationLevel.STRICT,
            max_parallel=max_parallel,
            time_budget_ms=budget_ms,
        )
        self.scheduler.add(
            Sequence(
                sequence_id=self._ids,
                item=item,
                attempt=1,
                published_s=self.clock.monotonic(),
                answer=AnswerText(Letters(), sampling),
                eos_ids=frozenset({EOS}),
            )
        )
        return self._ids

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            self.events += self.scheduler.take_events()
        else:
            self.plans.append(plan)
            self.check(plan)
            wanted = [s.sequence_id for s in plan.segments if s.sampling is not None]
            tokens = {i: SampledToken(self.next_token, None) for i in wanted if i not in self.failing}
            errors: dict[int, KevError] = {i: KevError("boom") for i in wanted if i in self.failing}
            self.events += self.scheduler.update(plan, StepOutput(tokens=tokens, errors=errors))
        self.scheduler.check_integrity()
        return plan

    def check(self, plan: StepPlan) -> None:
        """What holds for every plan."""
        shapes = self.settings.shapes
        fixed = shapes.prefill_rows if plan.kind is StepKind.PREFILL else shapes.decode_rows
        assert plan.num_rows == (plan.num_used if shapes.ragged else fixed)
        assert plan.num_used <= shapes.max_rows
        row = 0
        for segment in plan.segments:
            assert segment.row == row, "segments are packed without gaps"
            row += segment.num_rows
        assert row == plan.num_used <= plan.num_rows
        slots = {segment.slot: segment.sequence_id for segment in plan.segments}
        assert len(set(slots.values())) == len(slots), "a slot belongs to one question"

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler did not come to an end")

    def results(self) -> dict[int, ChannelResult]:
        found = [e for e in self.events if isinstance(e, ChannelResult)]
        assert max(Counter(e.question_index for e in found).values(), default=1) == 1, "one outcome per question"
        return {e.question_index: e for e in found}

    def text(self, index: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, ChannelDelta) and e.question_index == index)


def rows_of(plan: StepPlan | None) -> dict[int, int]:
    """Rows of each question in a plan."""
    assert plan is not None
    rows: Counter[int] = Counter()
    for segment in plan.segments:
        rows[segment.sequence_id] += segment.num_rows
    return dict(rows)


_QUESTION = st.tuples(st.integers(1, 70), st.integers(1, 20), st.integers(0, 4), st.sampled_from("rrrcte"))


@settings(max_examples=60, deadline=None)
@given(
    questions=st.lists(_QUESTION, min_size=1, max_size=14), max_slots=st.integers(1, 5), positions=st.integers(95, 300)
)
def test_every_question_ends_once_and_nothing_leaks(
    questions: list[tuple[int, int, int, str]], max_slots: int, positions: int
) -> None:
    """Any mix of lengths, cancels, timeouts and errors: one outcome each, every slot and position free at the end."""
    rig = Rig(max_slots, positions)
    fates = {}
    for num_prompt, max_tokens, gap, fate in questions:
        index = rig.add(num_prompt, max_tokens, budget_ms=3_000 if fate == "t" else 1_000_000)
        fates[index] = fate
        if fate == "e":
            rig.failing.add(index)
        for _ in range(gap):
            rig.step()
            rig.clock.advance(1.0)
        if fate == "c":
            rig.scheduler.cancel("r", index)
    rig.run()
    results = rig.results()
    assert set(results) == set(fates)
    for index, result in results.items():
        if fates[index] == "r":
            assert result.finish_reason is FinishReason.LENGTH
            assert len(result.token_ids) == questions[index - 1][1]
        assert rig.text(index) == result.text, "joined deltas are the text"
    assert rig.ledger.num_held == 0
    released = sum(extent.length for extent in rig.scrubbed)
    assert released == sum(q[0] + q[1] for i, q in enumerate(questions, 1) if results[i].slot >= 0), "all was scrubbed"


@settings(max_examples=60, deadline=None)
@given(
    num_prompt=st.integers(1, 100),
    boundaries=st.lists(st.integers(1, 99), max_size=2, unique=True).map(sorted),
    company=st.lists(st.integers(1, 60), max_size=5),
)
def test_a_questions_cuts_do_not_depend_on_its_company(
    num_prompt: int, boundaries: list[int], company: list[int]
) -> None:
    """The segments of a question are the same alone and beside any others: same shapes, same bits."""
    own = tuple(b for b in boundaries if b < num_prompt)

    def cuts(others: list[int]) -> list[tuple[int, int]]:
        rig = Rig(max_slots=6, num_positions=2000)
        for other in others[: len(others) // 2]:
            rig.add(other)
        target = rig.add(num_prompt, boundaries=own)
        for other in others[len(others) // 2 :]:
            rig.add(other)
        rig.run()
        return [(s.position, s.num_rows) for plan in rig.plans for s in plan.segments if s.sequence_id == target]

    alone = cuts([])
    assert alone == cuts(company)
    assert [position for position, _ in alone] == sorted(position for position, _ in alone)
    assert {0, *own} <= {position for position, _ in alone}, "cut at every boundary"


def test_a_freed_slot_is_refilled_at_the_next_step() -> None:
    """The step after a question ends already runs the next one."""
    rig = Rig(max_slots=1)
    rig.add(max_tokens=1)
    rig.add(max_tokens=1)
    first, second = rig.step(), rig.step()
    assert first is not None and second is not None
    assert [s.sequence_id for s in (*first.segments, *second.segments)] == [1, 2]


def test_a_long_prompt_alternates_with_its_neighbours_decoding() -> None:
    """While a prompt of many segments is read, the neighbour gets a token after every prefill forward."""
    rig = Rig()
    rig.add(num_prompt=2, max_tokens=8)
    rig.step()
    rig.add(num_prompt=110, max_tokens=1)
    kinds = [plan.kind for plan in (rig.step() for _ in range(7)) if plan is not None]
    prefill, decode = StepKind.PREFILL, StepKind.DECODE
    assert kinds == [decode, prefill, decode, prefill, decode, prefill, decode]


def test_max_parallel_bounds_one_request_and_holds_up_nobody_else() -> None:
    """At most two questions of request r in a forward; the other request passes by."""
    rig = Rig(max_slots=3)
    for _ in range(4):
        rig.add(request_id="r", max_parallel=2)
    other = rig.add(request_id="s")
    plan = rig.step()
    assert plan is not None and {s.sequence_id for s in plan.segments} == {1, 2, other}
    rig.run()
    assert all(sum(s.sequence_id <= 4 for s in plan.segments) <= 2 for plan in rig.plans)
    assert len(rig.results()) == 5


def test_admission_is_first_come_first_served_by_exact_positions() -> None:
    """A big question at the head waits for room; a small one behind it does not overtake."""
    rig = Rig(max_slots=3, num_positions=100)
    rig.add(num_prompt=50, max_tokens=20)
    big, small = rig.add(num_prompt=60, max_tokens=20), rig.add(num_prompt=2, max_tokens=2)
    rig.step()
    assert rig.scheduler.num_running == 1
    rig.run()
    order = [e.question_index for e in rig.events if isinstance(e, ChannelResult)]
    assert order[0] == 1 and set(order[1:]) == {big, small}


@pytest.mark.parametrize(("num_prompt", "positions", "words"), [(119, 400, "max_context"), (90, 50, "kv_cache_bytes")])
def test_a_question_that_can_never_fit_ends_at_once(num_prompt: int, positions: int, words: str) -> None:
    """It gets a delivered error that names both numbers and the setting; its neighbour is answered."""
    rig = Rig(num_positions=positions)
    bad, good = rig.add(num_prompt=num_prompt), rig.add()
    rig.run()
    result = rig.results()[bad]
    assert result.finish_reason is FinishReason.ERROR and result.error is not None
    assert result.error.reason == "PROMPT_TOO_LONG" and words in result.error.message
    assert f"queries[{bad}]" in result.error.message and str(num_prompt) in result.error.message
    assert rig.results()[good].finish_reason is FinishReason.LENGTH


def test_unified_reserves_the_whole_context() -> None:
    """kv_cache: unified takes max_context positions whatever the question needs."""
    rig = Rig(reserve=True)
    rig.add(num_prompt=2, max_tokens=5)
    rig.step()
    assert rig.ledger.num_held == 120


def test_timeouts_tell_queued_from_running() -> None:
    """A question that never ran times out as queued, one with a slot as running, with the text it had."""
    rig = Rig(max_slots=1)
    running = rig.add(max_tokens=50, budget_ms=2_000)
    queued = rig.add(budget_ms=2_000)
    rig.step()
    rig.step()
    rig.clock.advance(2.0)
    rig.run()
    results = rig.results()
    assert results[running].finish_reason is FinishReason.TIMEOUT_RUNNING
    assert results[running].text == "aa" and results[queued].finish_reason is FinishReason.TIMEOUT_QUEUED
    assert results[queued].slot == -1


def test_end_of_sequence_and_stop_strings_end_an_answer() -> None:
    """EOS is counted, never shown; a stop string is cut off; both end with reason stop."""
    rig = Rig()
    ended, stopped = rig.add(max_tokens=9), rig.add(max_tokens=9, stop=("aaa",))
    rig.step()
    rig.step()
    rig.step()
    rig.next_token = EOS
    rig.run()
    results = rig.results()
    assert (results[ended].finish_reason, results[ended].text) == (FinishReason.STOP, "aaa")
    assert results[ended].token_ids == (97, 97, 97, EOS)
    assert (results[stopped].finish_reason, results[stopped].text) == (FinishReason.STOP, "")


def test_a_shared_prefix_is_computed_once_and_others_wait_for_it() -> None:
    """Three questions over one prefix: its tokens are planned once, and nobody reads it before it is complete."""
    rig = Rig(max_slots=3)
    for _ in range(3):
        rig.add(num_prompt=44, max_tokens=2, boundaries=(40,), num_shared=40)
    rig.run()
    written = [s for plan in rig.plans for s in plan.segments if s.writes_prefix]
    assert sum(s.num_rows for s in written) == 40 and {s.sequence_id for s in written} == {1}
    assert [rig.results()[i].num_cached_tokens for i in (1, 2, 3)] == [0, 40, 40]
    assert rig.ledger.num_held == 0


def test_kept_prefixes_make_room_when_it_is_needed() -> None:
    """shared_readonly keeps a prefix for later; a question that needs the room gets it."""
    rig = Rig(num_positions=100, keep=True)
    rig.add(num_prompt=44, max_tokens=2, boundaries=(40,), num_shared=40)
    rig.run()
    assert rig.ledger.num_held == 40 and rig.scheduler.num_prefixes == 1
    rig.add(num_prompt=80, max_tokens=5)
    rig.run()
    assert rig.scheduler.num_prefixes == 0 and rig.results()[2].finish_reason is FinishReason.LENGTH


def test_a_failed_question_leaves_its_neighbour_alone() -> None:
    """An error in the forward ends that question; the other's tokens go on."""
    rig = Rig()
    bad, good = rig.add(), rig.add()
    rig.failing.add(bad)
    rig.run()
    assert rig.results()[bad].finish_reason is FinishReason.ERROR
    assert rig.results()[good].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ragged", [False, True])
def test_a_short_prompt_does_not_wait_for_long_ones(ragged: bool) -> None:
    """It ends in the first forward, on its half of the rows; the oldest goes on with the others."""
    rig = Rig(max_slots=4, num_positions=1000, ragged=ragged)
    rows = rig.settings.shapes.prefill_rows
    old, young, short = rig.add(110), rig.add(110), rig.add(7)
    found = rows_of(rig.step())
    assert found[short] == 7
    assert found[old] >= rows // 2 - 7 and found[old] >= found.get(young, 0)


@settings(max_examples=60, deadline=None)
@given(prompts=st.lists(st.integers(1, 100), min_size=2, max_size=9), ragged=st.booleans())
def test_the_oldest_prompt_always_goes_on(prompts: list[int], ragged: bool) -> None:
    """However many short ones come: at least half of the rows are its own as long as it needs them, in one run."""
    rig = Rig(max_slots=9, num_positions=2000, ragged=ragged)
    oldest = rig.add(100, max_tokens=1)
    for size in prompts:
        rig.add(size, max_tokens=1)
    left = 100
    while left:
        plan = rig.step()
        assert plan is not None
        if plan.kind is StepKind.DECODE:
            continue
        own = [segment for segment in plan.segments if segment.sequence_id == oldest]
        found = sum(segment.num_rows for segment in own)
        assert found >= min(left, rig.settings.shapes.prefill_rows // 2)
        assert own[-1].row + own[-1].num_rows - own[0].row == found, "side by side"
        left -= found


def test_ragged_rows_for_prompts_follow_who_waits() -> None:
    """All of them while nobody decodes; beside decoding questions the share of those that wait, at least half."""
    shapes = ForwardShapes.of(8, prefill_rows=128, segment_tokens=64, ragged=True)
    assert [shapes.prompt_rows(*waiting) for waiting in ((1, 0), (7, 1), (4, 4), (1, 7))] == [512, 448, 256, 256]
    assert ForwardShapes.of(8, prefill_rows=128, segment_tokens=64).prompt_rows(1, 7) == 128
    assert ForwardShapes.of(8, prefill_rows=8, segment_tokens=8, ragged=True).prompt_rows(1, 7) == 16
