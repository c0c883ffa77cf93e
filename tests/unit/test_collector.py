"""The collector: one outcome per question, in order, with a stream that never lies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator_svc.audit import Moment
from aggregator_svc.collector import Collector
from common.errors import InvariantError
from common.types import (
    AggregateMode,
    ChannelDelta,
    ChannelEvent,
    ChannelResult,
    ChannelStarted,
    ErrorInfo,
    FinishReason,
    IsolationLevel,
    Receipt,
    RequestState,
    Route,
    Strategy,
    StreamEvent,
    StreamEventType,
    TokenLogprob,
    Verdict,
)
from tests.unit.aggregator_builders import (
    cancel,
    channel_of,
    delta,
    deltas,
    expire,
    moment,
    outcome,
    question,
    read_text,
    request,
    shape,
    started,
)

T0 = moment(100.0)


def make(*arguments: object, **changes: object) -> Collector:
    return Collector(request(*arguments, **changes), T0)  # type: ignore[arg-type]


def feed(collector: Collector, *events: ChannelEvent, now: Moment = T0) -> None:
    for event in events:
        match event:
            case ChannelStarted():
                collector.start(event, now)
            case ChannelDelta():
                collector.append(event, now)
            case ChannelResult():
                collector.place(event, now)


# ---- outcomes


def test_results_return_in_question_order() -> None:
    """The caller would get another question's answer at its position."""
    collector = make(3)
    feed(collector, outcome("c", 2), outcome("a", 0), outcome("b", 1))
    assert [(r.question_index, r.channel_id, r.text) for r in collector.results()] == [
        (0, 10, "a"),
        (1, 11, "b"),
        (2, 12, "c"),
    ]


def test_results_so_far_leave_no_holes() -> None:
    """A poll in between would show invented results."""
    collector = make(3)
    feed(collector, outcome("c", 2))
    view = collector.view()
    assert [r.question_index for r in view.results] == [2]
    assert (view.num_questions, view.state, view.done, view.mode) == (3, RequestState.PENDING, False, "slot_map")


def test_seq_append_is_the_order_of_completion() -> None:
    """The mode would have no effect."""
    collector = make(3, mode=AggregateMode.SEQ_APPEND)
    feed(collector, outcome("c", 2), outcome("a", 0), outcome("b", 1))
    assert [r.question_index for r in collector.results()] == [2, 0, 1]


def test_priority_goes_before_completion() -> None:
    """An urgent answer would stand behind an idle one, or equals would be shuffled."""
    questions = [question(0, priority=-1), question(1, priority=5), question(2), question(3, priority=5)]
    collector = make(questions, mode=AggregateMode.PRIORITY)
    feed(collector, *(outcome(question_index=index) for index in (0, 3, 2, 1)))
    assert [(r.question_index, r.priority) for r in collector.results()] == [(3, 5), (1, 5), (2, 0), (0, -1)]


def test_the_first_outcome_wins_and_others_are_counted() -> None:
    """A second attempt would overwrite what the caller has already read."""
    collector = make()
    assert collector.place(outcome("first", attempt=2), T0)
    assert not collector.place(outcome("second", attempt=1), T0)
    assert not collector.place(outcome("third", attempt=2), T0)
    assert [r.text for r in collector.results()] == ["first"]
    assert collector.late == {(0, 1): 1, (0, 2): 1}
    assert [event.type for event in collector.events].count(StreamEventType.RESULT) == 1


def test_what_is_told_twice_changes_nothing() -> None:
    """A request taken over would count what it is told by its log and by the stream as late, or stream it twice."""
    collector = make([question(0), question(1, timeout_ms=500)])
    collector.place(outcome(), T0)
    [placeholder] = expire(collector, moment(101))
    events = list(collector.events)
    assert not collector.place(outcome(), moment(102))
    assert not collector.place(placeholder, moment(102))
    assert (collector.late, list(collector.events)) == ({}, events)
    assert collector.outcomes() == (outcome(), placeholder)


@pytest.mark.parametrize(
    ("reasons", "state"),
    [
        ("stop length", RequestState.COMPLETE),
        ("stop error", RequestState.PARTIAL),
        ("timeout_queued stop", RequestState.PARTIAL),
        ("cancelled rejected", RequestState.FAILED),
        ("error timeout_running", RequestState.FAILED),
        ("stop", RequestState.PENDING),
    ],
)
def test_the_state_follows_from_the_outcomes(reasons: str, state: RequestState) -> None:
    """A request with holes would look complete."""
    collector = make(2)
    for index, reason in enumerate(reasons.split()):
        feed(collector, outcome(question_index=index, finish_reason=FinishReason(reason)))
    assert collector.state is state
    assert collector.done == (state is not RequestState.PENDING)
    assert [e.state for e in collector.events if e.type is StreamEventType.DONE] == [state] * collector.done


@pytest.mark.parametrize("event", [started(7), delta("x", question_index=7), outcome(question_index=7)])
def test_a_foreign_question_is_refused(event: ChannelEvent) -> None:
    """A stray event would create a question nobody asked."""
    collector = make(2)
    with pytest.raises(InvariantError):
        feed(collector, event)
    assert (collector.num_done, list(collector.events)) == (0, [])


@pytest.mark.parametrize("bad", [outcome(queued_ms=float("nan")), outcome(attempt=0)])
def test_a_senseless_outcome_changes_nothing(bad: ChannelResult) -> None:
    """Half an outcome would stay and keep the real one out."""
    collector = make()
    with pytest.raises((InvariantError, ValueError)):
        collector.place(bad, T0)
    assert not collector.events
    assert collector.place(outcome(), T0)


@pytest.mark.parametrize("questions", [[], [question(0), question(0)]])
def test_a_senseless_request_is_refused(questions: list[object]) -> None:
    """A request would be done before it began, or wait for ever for a question that exists once."""
    with pytest.raises(InvariantError):
        make(questions)


# ---- timeouts and cancellation


def test_a_question_that_never_ran_times_out_as_queued() -> None:
    """The caller would not learn that raising max_tokens cannot help."""
    collector = make([question(0, timeout_ms=500)])
    assert collector.next_deadline_s == 100.5
    assert expire(collector, moment(100.4)) == ()
    [placeholder] = expire(collector, moment(100.5))
    [result] = collector.results()
    assert (placeholder.key, placeholder.channel_id) == (("r", 0), channel_of(0))
    assert (result.finish_reason, result.text, result.tokens, result.slot) == ("timeout_queued", "", 0, -1)
    assert (result.elapsed_ms, result.queued_ms, result.started_at, result.finished_at) == (500, 500, None, 3700.5)
    assert result.error is not None and result.error.reason == "BUDGET_SPENT"
    assert "question 0" in result.error.message and "500 ms" in result.error.message
    assert result.isolation == Receipt(level=IsolationLevel.STRICT, verdict=Verdict.UNVERIFIED)
    assert shape(collector.events) == [("result", ""), ("done", "")]


def test_a_running_question_times_out_with_its_text() -> None:
    """Text that the reader already has would be missing from the result."""
    collector = make([question(0, timeout_ms=500)])
    feed(collector, started(), *deltas("ab", "c"), now=moment(100.2))
    expire(collector, moment(101))
    [result] = collector.results()
    assert (result.finish_reason, result.text, result.tokens) == ("timeout_running", "abc", 2)
    assert (result.slot, result.node_id, result.queued_ms, result.started_at) == (3, "node-1", 200, 3700.2)
    assert result.prompt_tokens == 5
    assert read_text(collector.events) == {0: "abc"}


def test_a_timeout_tells_of_the_newest_attempt() -> None:
    """The audit would name the node and slot of an attempt that was replaced."""
    collector = make([question(0, timeout_ms=900)])
    feed(collector, started(), *deltas("a", "b"), now=moment(100.2))
    feed(collector, delta("a", attempt=2), now=moment(100.5))
    expire(collector, moment(101))
    [result] = collector.results()
    assert (result.attempt, result.text, result.tokens) == (2, "ab", 1)
    assert (result.slot, result.node_id, result.queued_ms, result.started_at) == (-1, "", 500, 3700.5)


def test_a_placeholder_is_only_proposed() -> None:
    """An answer that was committed at the same moment would be told to some callers, and the timeout to others."""
    collector = make([question(0, timeout_ms=500)])
    [placeholder] = collector.due(moment(100.5), again_after_s=5)
    assert (collector.num_done, list(collector.events)) == (0, [])
    assert collector.place(outcome("just in time"), moment(100.6))
    assert not collector.place(placeholder, moment(100.7))
    assert [r.text for r in collector.results()] == ["just in time"]


def test_a_placeholder_that_got_lost_is_proposed_again() -> None:
    """A question whose placeholder never came back would stay open for ever."""
    collector = make([question(0, timeout_ms=500), question(1, timeout_ms=2_000)])
    assert len(collector.due(moment(100.5), again_after_s=5)) == 1
    assert collector.due(moment(100.6), again_after_s=5) == ()
    assert collector.next_deadline_s == 102
    assert [p.question_index for p in collector.due(moment(105.5), again_after_s=5)] == [0, 1]


def test_a_placeholder_keeps_text_that_came_before_it() -> None:
    """Text that was on its way when the placeholder was made would be taken back from readers who have it."""
    collector = make([question(0, timeout_ms=500)])
    feed(collector, started(), delta("ab"))
    [placeholder] = collector.due(moment(100.5), again_after_s=5)
    feed(collector, delta("c", 1))
    assert collector.place(placeholder, moment(100.6))
    assert collector.results()[0].text == read_text(collector.events)[0] == "abc"


def test_a_timeout_leaves_the_neighbours_alone() -> None:
    """One slow channel would end the others, or hold them up."""
    collector = make([question(0, timeout_ms=500), question(1, timeout_ms=900), question(2)])
    feed(collector, outcome("a", 0))
    assert collector.next_deadline_s == 100.9
    expire(collector, moment(101))
    assert collector.next_deadline_s == 110
    feed(collector, outcome("c", 2))
    assert [(r.finish_reason, r.text) for r in collector.results()] == [
        ("stop", "a"),
        ("timeout_queued", ""),
        ("stop", "c"),
    ]
    assert (collector.state, collector.next_deadline_s) == (RequestState.PARTIAL, None)


def test_an_answer_after_its_timeout_is_late() -> None:
    """A placeholder that the caller has seen would turn into an answer."""
    collector = make([question(0, timeout_ms=500)])
    expire(collector, moment(101))
    events = list(collector.events)
    assert not collector.start(started(), T0)
    assert not collector.append(delta("x"), T0)
    assert not collector.place(outcome(), T0)
    assert collector.late == {(0, 1): 1}
    assert list(collector.events) == events


def test_cancelling_ends_only_open_questions() -> None:
    """Answers that are there would be taken back."""
    collector = make(3)
    feed(collector, outcome("b", 1), started(2), delta("part", question_index=2))
    placeholders = cancel(collector, T0, ErrorInfo(reason="NODE_DRAINING", message="over"))
    assert [p.question_index for p in placeholders] == [0, 2]
    assert [(r.finish_reason, r.text) for r in collector.results()] == [
        ("cancelled", ""),
        ("stop", "b"),
        ("cancelled", "part"),
    ]
    assert collector.results()[0].error == ErrorInfo(reason="NODE_DRAINING", message="over")
    assert cancel(collector, T0) == ()


# ---- streaming


def test_the_stream_of_an_undisturbed_question() -> None:
    """Events would be out of order or unnumbered."""
    collector = make()
    feed(collector, started(), *deltas("你", "", "好"), outcome("你好"))
    assert shape(collector.events) == [("started", ""), ("delta", "你"), ("delta", "好"), ("result", ""), ("done", "")]
    assert [e.event_index for e in collector.events] == [0, 1, 2, 3, 4]
    assert {(e.question_index, e.channel_id) for e in collector.events[:4]} == {(0, channel_of(0))}
    assert collector.events[3].result == collector.results()[0]


def test_a_missing_tail_comes_before_the_result() -> None:
    """Text that the node held back (a possible stop string) would be missing from the stream."""
    collector = make()
    feed(collector, started(), delta("A B"), outcome("A B own"))
    assert shape(collector.events)[1:4] == [("delta", "A B"), ("delta", " own"), ("result", "")]


def test_an_answer_without_deltas_is_streamed_too() -> None:
    """A reader that joins deltas would have nothing."""
    collector = make()
    feed(collector, outcome("all"))
    assert shape(collector.events) == [("started", ""), ("delta", "all"), ("result", ""), ("done", "")]


def test_a_delta_before_started_starts_the_question() -> None:
    """Text would arrive for a question that never started."""
    collector = make()
    feed(collector, delta("a"), started(), delta("b", 1))
    assert shape(collector.events) == [("started", ""), ("delta", "a"), ("delta", "b")]


def test_deltas_out_of_order_and_twice() -> None:
    """The text would be shuffled or repeated."""
    collector = make()
    [a, b, c] = deltas("a", "b", "c")
    feed(collector, started(), b, c, b, a, a, c)
    assert shape(collector.events) == [("started", ""), ("delta", "abc")]


def test_repeated_deltas_take_no_room() -> None:
    """A node that repeats itself would fill the buffer for early deltas."""
    collector = make()
    feed(collector, *(delta("x", seq) for seq in range(1100)), *(delta("x", seq) for seq in range(1100)))
    feed(collector, delta("z", 1101), delta("y", 1100))
    assert read_text(collector.events) == {0: "x" * 1100 + "yz"}


def test_a_gap_is_closed_by_the_result() -> None:
    """A lost delta would leave a hole in the text."""
    collector = make()
    [a, _, c] = deltas("a", "b", "c")
    feed(collector, started(), a, c)
    assert read_text(collector.events) == {0: "a"}
    feed(collector, outcome("abc"))
    assert read_text(collector.events) == {0: "abc"}


def test_early_deltas_are_bounded() -> None:
    """A gap that never closes would collect text without end."""
    collector = make()
    feed(collector, *(delta("x", seq) for seq in range(1, 3000)))
    feed(collector, delta("x", 0))
    assert len(read_text(collector.events)[0]) <= 1025
    feed(collector, outcome("x" * 3000))
    assert read_text(collector.events) == {0: "x" * 3000}


def test_a_new_attempt_continues_where_the_reader_is() -> None:
    """After a node's death the reader would get the beginning again."""
    collector = make()
    feed(collector, started(), *deltas("ab", "cd"))
    feed(collector, started(attempt=2), *deltas("a", "bc", "def", "g", attempt=2), outcome("abcdefg", attempt=2))
    assert shape(collector.events) == [
        ("started", ""),
        ("delta", "ab"),
        ("delta", "cd"),
        ("attempt_changed", "abcd"),
        ("delta", "ef"),
        ("delta", "g"),
        ("result", ""),
        ("done", ""),
    ]


def test_a_new_attempt_that_differs_says_so() -> None:
    """Two different answers would be glued together."""
    collector = make()
    feed(collector, started(), delta("The cat"))
    feed(collector, started(attempt=2), *deltas("The", " dog", " sat", attempt=2), outcome("The dog sat", attempt=2))
    assert shape(collector.events)[2:] == [
        ("attempt_changed", "The cat"),
        ("attempt_changed", "The dog"),
        ("delta", " sat"),
        ("result", ""),
        ("done", ""),
    ]


def test_a_shorter_final_text_is_no_silent_rewind() -> None:
    """The reader would keep text that is not in the answer."""
    collector = make()
    feed(collector, started(), delta("Hello wor"), outcome("Hello", attempt=2))
    assert shape(collector.events)[2:5] == [
        ("attempt_changed", "Hello wor"),
        ("attempt_changed", "Hello"),
        ("result", ""),
    ]


def test_a_former_attempt_is_not_heard() -> None:
    """A node that was replaced would write into the answer."""
    collector = make()
    feed(collector, started(attempt=2), delta("new", attempt=2))
    assert not collector.start(started(), T0)
    assert not collector.append(delta("old", 1), T0)
    assert read_text(collector.events) == {0: "new"}


def test_the_first_attempt_that_is_heard_of_just_starts() -> None:
    """A reader would be told of a change before there was anything to change."""
    collector = make()
    feed(collector, started(attempt=3))
    assert shape(collector.events) == [("started", "")]


@pytest.mark.parametrize("text", ["", "ab", "other"])
def test_an_error_keeps_the_text_that_was_delivered(text: str) -> None:
    """The stream would have to take text back, or differ from the result."""
    collector = make()
    error = ErrorInfo(reason="OUT_OF_MEMORY", message="no room")
    feed(collector, started(), *deltas("ab", "c"), outcome(text, finish_reason=FinishReason.ERROR, error=error))
    [result] = collector.results()
    assert (result.text, result.tokens, result.error) == ("abc", 2, error)
    assert shape(collector.events)[-3:] == [("delta", "c"), ("result", ""), ("done", "")]


# ---- audit


def test_the_result_carries_the_audit_fields() -> None:
    """An operator could not find the channel, the cost or the route of an answer."""
    route = Route(
        channel_id=10,
        strategy=Strategy.SEMANTIC_HASH,
        hash_bucket=42,
        diverted_from=4,
        normalized_text="q",
        removed=("!!", "um"),
    )
    receipt = Receipt(level=IsolationLevel.STRICT, verdict=Verdict.BITWISE, mask_digest="m", fingerprint="f")
    logprobs = (TokenLogprob(token_id=1, logprob=-0.5),)
    collector = make([question(0, priority=2, route=route)])
    feed(
        collector,
        outcome(
            "ok",
            attempt=2,
            slot=6,
            token_ids=(1, 2, 3),
            num_prompt_tokens=9,
            num_truncated=1,
            num_cached_tokens=4,
            queued_ms=10.6,
            first_token_ms=20.4,
            started_at=5.0,
            finished_at=6.0,
            receipt=receipt,
            logprobs=logprobs,
        ),
        now=moment(101.5),
    )
    [result] = collector.results()
    assert (result.request_id, result.question_index, result.channel_id, result.slot) == ("r", 0, 10, 6)
    assert (result.tokens, result.prompt_tokens, result.num_truncated, result.num_cached_tokens) == (3, 9, 1, 4)
    assert (result.elapsed_ms, result.queued_ms, result.first_token_ms) == (1500, 11, 20)
    assert (result.started_at, result.finished_at, result.attempt, result.node_id) == (5.0, 6.0, 2, "node-2")
    assert (result.hash_bucket, result.strategy, result.diverted_from) == (42, Strategy.SEMANTIC_HASH, 4)
    assert (result.removed, result.priority, result.isolation, result.error) == (("!!", "um"), 2, receipt, None)
    assert (result.logprobs, result.token_ids) == (logprobs, (1, 2, 3))


def test_a_question_that_moved_later_shows_both_channels() -> None:
    """The audit would name a channel on which the question never was."""
    collector = make()
    feed(collector, outcome(channel_id=3))
    [result] = collector.results()
    assert (result.channel_id, result.diverted_from) == (3, channel_of(0))


# ---- properties

TEXTS = st.text(alphabet="abé你🫨 ", max_size=6)


@st.composite
def attempts(draw: st.DrawFn, question_index: int) -> list[ChannelEvent]:
    """Everything that nodes report about one question, in order: up to three attempts, the last ones with outcome."""
    events: list[ChannelEvent] = []
    base = draw(st.lists(TEXTS, max_size=5))
    num_attempts = draw(st.integers(1, 3))
    for attempt in range(1, num_attempts + 1):
        pieces = base if draw(st.booleans()) else draw(st.lists(TEXTS, max_size=5))
        events.append(started(question_index, attempt))
        events += deltas(*pieces, question_index=question_index, attempt=attempt)
        if attempt == num_attempts or draw(st.booleans()):
            reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR]))
            text = "".join(pieces) + draw(TEXTS)
            events.append(outcome(text, question_index, attempt, finish_reason=reason))
    return events


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_questions=st.integers(1, 4), in_order=st.booleans(), seed=st.integers(0, 2**32))
def test_any_order_gives_one_outcome_and_a_true_stream(
    data: st.DataObject, num_questions: int, in_order: bool, seed: int
) -> None:
    """Some order of events, losses, timeouts and cancellations would double an outcome or garble a stream."""
    timeouts_ms = data.draw(st.lists(st.integers(1, 60), min_size=num_questions, max_size=num_questions))
    collector = make([question(index, timeout_ms=timeouts_ms[index]) for index in range(num_questions)])
    queues = [data.draw(attempts(index)) for index in range(num_questions)]
    order = [index for index, queue in enumerate(queues) for _ in queue]
    random.Random(seed).shuffle(order)
    if not in_order:
        for queue in queues:
            random.Random(seed).shuffle(queue)
    now_s = 100.0
    num_placeholders = num_outcomes = 0
    for index in order:
        event = queues[index].pop(0)
        feed(collector, event, now=moment(now_s))
        num_outcomes += isinstance(event, ChannelResult)
        now_s += 0.001
        num_placeholders += len(expire(collector, moment(now_s)))
        deadline_s = collector.next_deadline_s
        assert deadline_s is None or deadline_s > now_s
    num_placeholders += len(cancel(collector, moment(now_s)))

    results = collector.results()
    assert [result.question_index for result in results] == list(range(num_questions))
    assert num_outcomes + num_placeholders - sum(collector.late.values()) == num_questions
    events = list(collector.events)
    assert [event.event_index for event in events] == list(range(len(events)))
    assert events[-1].type is StreamEventType.DONE
    kinds = Counter((event.type, event.question_index) for event in events)
    assert kinds[StreamEventType.DONE, None] == 1
    texts = read_text(events)
    for result in results:
        assert kinds[StreamEventType.RESULT, result.question_index] == 1
        assert kinds[StreamEventType.STARTED, result.question_index] <= 1
        assert texts.get(result.question_index, "") == result.text
        own = [event for event in events if event.question_index == result.question_index]
        assert own[-1].result == result
        assert own[0].type in (StreamEventType.STARTED, StreamEventType.RESULT)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), neighbour_timeout_ms=st.integers(1, 30), cancel_at=st.none() | st.integers(0, 30))
def test_a_neighbour_changes_nothing(data: st.DataObject, neighbour_timeout_ms: int, cancel_at: int | None) -> None:
    """A neighbour's text, failure or timeout would show in a question's result or stream."""
    own = data.draw(attempts(0))
    foreign = data.draw(attempts(1))
    slots = data.draw(st.permutations([0] * len(own) + [1] * len(foreign)))

    def run(*, with_neighbour: bool) -> tuple[object, list[object]]:
        questions = [question(0, timeout_ms=60_000)]
        if with_neighbour:
            questions.append(question(1, timeout_ms=neighbour_timeout_ms))
        collector = make(questions)
        queues = [list(own), list(foreign)]
        for step, slot in enumerate(slots):
            now = moment(100 + step / 1000)
            event = queues[slot].pop(0)
            if slot == 0 or with_neighbour:
                feed(collector, event, now=now)
            if step == cancel_at and with_neighbour:
                feed(collector, outcome("", 1, finish_reason=FinishReason.CANCELLED), now=now)
            expire(collector, now)
        [result] = [result for result in collector.results() if result.question_index == 0]
        stream = [replace(event, event_index=0) for event in collector.events if event.question_index == 0]
        return result, stream

    assert run(with_neighbour=True) == run(with_neighbour=False)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_questions=st.integers(1, 3))
def test_whoever_goes_on_with_the_log_tells_the_same(data: st.DataObject, num_questions: int) -> None:
    """A client that resumes at another aggregator would miss events, be given some twice, or hear another outcome."""
    questions = [question(index, timeout_ms=5) for index in range(num_questions)]
    queues = [data.draw(attempts(index)) for index in range(num_questions)]
    first = make(questions)
    log: list[ChannelEvent] = []
    while any(queues):
        index = data.draw(st.sampled_from([index for index, queue in enumerate(queues) if queue]))
        now = moment(100 + len(log) / 1000)
        proposed = first.due(now, again_after_s=1) if data.draw(st.booleans()) else ()
        for event in (*proposed, queues[index].pop(0)):
            log.append(event)
            feed(first, event, now=now)
    known = data.draw(st.integers(0, len(log)))
    read_again_from = data.draw(st.integers(0, known))
    second = make(questions)
    feed(second, *log[:known], now=moment(200))
    feed(second, *log[read_again_from:], now=moment(201))
    assert [_lasting(event) for event in second.events] == [_lasting(event) for event in first.events]
    assert second.late == first.late or read_again_from < known


def _lasting(event: StreamEvent) -> StreamEvent:
    """An event without what depends on when it was read."""
    if event.result is None:
        return event
    return replace(event, result=replace(event.result, elapsed_ms=0, finished_at=0.0))


def test_a_timeout_that_the_node_noticed_first_says_why_too() -> None:
    """Node and collector watch the same deadline; whoever is first, the caller reads the same sentence."""
    collector = Collector(request([question(0, timeout_ms=400)]), moment(0.0))
    assert collector.place(outcome("so far", finish_reason=FinishReason.TIMEOUT_RUNNING), moment(0.4))
    (result,) = collector.view().results
    assert result.error is not None and result.error.reason == "BUDGET_SPENT" and "400 ms" in result.error.message
