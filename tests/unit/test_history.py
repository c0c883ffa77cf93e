"""The checker accepts every clean history and finds each planted violation, and nothing else.

Clean histories come from a small model of Kev: requests with retries and refusals, streams that break and resume,
second readers, cancellations, timeouts, new attempts; interleaved at random.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.types import FinishReason, StreamEventType
from tests.chaos.checker import Kind, check, merged
from tests.chaos.history import (
    Broken,
    Cancelled,
    Closed,
    Committed,
    Forgotten,
    Granted,
    History,
    Opened,
    Outcome,
    Phase,
    Record,
    Seen,
    Submitted,
    make_nonce,
)

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**32 - 1)
Records = list[Record]


class Model:
    """Writes the records that a faultless Kev would cause."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)

    def run(self, num_requests: int = 4) -> Records:
        """A whole run; each request has at least one stream reader and at least one answer."""
        threads = [thread for number in range(num_requests) for thread in self.request(f"request-{number}")]
        threads.append([Broken(fault="kill", num_fired=self.numbers.randint(0, 3))])
        return self.interleaved(threads)

    def interleaved(self, threads: list[Records]) -> Records:
        merged: Records = []
        while threads := [thread for thread in threads if thread]:
            merged.append(self.numbers.choice(threads).pop(0))
        return merged

    def request(self, request_id: str) -> list[Records]:
        numbers = self.numbers
        nonces = tuple(make_nonce(numbers) for _ in range(numbers.randint(1, 3)))
        begun: Records = []
        for phase in numbers.choices([Phase.FAIL, Phase.INFO], k=numbers.randint(0, 2)):
            begun += self.submission(request_id, nonces, phase)
        begun += self.submission(request_id, nonces, Phase.OK)
        outcomes = [self.outcome(request_id, index, nonce) for index, nonce in enumerate(nonces)]
        log = self.log(request_id, outcomes)
        threads = [begun + self.stream(f"{request_id}/0", request_id, log, outcomes)]
        threads.append(self.stream(f"{request_id}/1", request_id, log, outcomes))
        threads.append(self.view(f"{request_id}/2", request_id, outcomes))
        threads += [self.attempts(outcome) for outcome in outcomes]
        return threads

    def submission(self, request_id: str, nonces: tuple[str, ...], phase: Phase) -> Records:
        invoked = Submitted(client="c", phase=Phase.INVOKE, request_id=request_id, nonces=nonces)
        reason = "" if phase is Phase.OK else "QUEUE_FULL"
        return [invoked, Submitted(client="c", phase=phase, request_id=request_id, reason=reason)]

    def outcome(self, request_id: str, index: int, nonce: str) -> Outcome:
        reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.TIMEOUT_QUEUED]
        reason = FinishReason.STOP if index == 0 else self.numbers.choice(reasons)
        text = nonce + "..." if reason is FinishReason.STOP else nonce[: self.numbers.randint(0, 12)]
        return Outcome(
            reader="",
            request_id=request_id,
            question_index=index,
            finish_reason=reason,
            attempt=self.numbers.randint(1, 3),
            text=text,
        )

    def log(self, request_id: str, outcomes: list[Outcome]) -> list[Seen]:
        """The events of a request, numbered."""
        order = self.interleaved([self.question_events(outcome) for outcome in outcomes])
        order.append(Seen(reader="", request_id=request_id, event_index=0, kind=StreamEventType.DONE))
        return [replace(event, event_index=index) for index, event in enumerate(order)]  # type: ignore[misc]

    def question_events(self, outcome: Outcome) -> Records:
        def event(kind: StreamEventType, text: str = "") -> Seen:
            return Seen(
                reader="",
                request_id=outcome.request_id,
                event_index=0,
                kind=kind,
                question_index=outcome.question_index,
                text=text,
            )

        begun = [event(StreamEventType.STARTED)] if outcome.text else []
        rest = outcome.text
        if outcome.attempt > 1 and rest:
            cut = self.numbers.randint(0, len(rest))
            begun += [event(StreamEventType.DELTA, "wrong start"), event(StreamEventType.ATTEMPT_CHANGED, rest[:cut])]
            rest = rest[cut:]
        while rest:
            cut = self.numbers.randint(1, len(rest))
            begun.append(event(StreamEventType.DELTA, rest[:cut]))
            rest = rest[cut:]
        return [*begun, event(StreamEventType.RESULT)]

    def stream(self, reader: str, request_id: str, log: list[Seen], outcomes: list[Outcome]) -> Records:
        """A reader that loses its stream now and then."""
        records: Records = [Opened(reader=reader, request_id=request_id)]
        for event in log:
            records.append(replace(event, reader=reader))
            if event.kind is StreamEventType.RESULT:
                records.append(replace(outcomes[event.question_index or 0], reader=reader))
            if event.kind is not StreamEventType.DONE and self.numbers.random() < 0.2:
                lost = Closed(reader=reader, request_id=request_id, phase=Phase.INFO, reason="STORE_UNAVAILABLE")
                again = Opened(reader=reader, request_id=request_id, from_event_index=event.event_index + 1)
                records += [lost, again]
        return [*records, Closed(reader=reader, request_id=request_id, phase=Phase.OK)]

    def view(self, reader: str, request_id: str, outcomes: list[Outcome]) -> Records:
        cancelled = [
            Cancelled(client="c", phase=phase, request_id=request_id)
            for phase in ([Phase.INVOKE, Phase.OK] if self.numbers.random() < 0.3 else [])
        ]
        results = [replace(outcome, reader=reader) for outcome in outcomes]
        return [
            *cancelled,
            Opened(reader=reader, request_id=request_id),
            *results,
            Closed(reader=reader, request_id=request_id, phase=Phase.OK),
        ]

    def attempts(self, outcome: Outcome) -> Records:
        key = {"request_id": outcome.request_id, "question_index": outcome.question_index}
        granted = [Granted(**key, attempt=attempt) for attempt in range(1, outcome.attempt + 1)]
        is_answer = outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return [*granted, *([Committed(**key, attempt=outcome.attempt, text=outcome.text)] if is_answer else [])]


def some(records: Records, numbers: random.Random, wanted: Callable[[Record], bool]) -> int:
    """The place of a record of this kind."""
    return numbers.choice([place for place, record in enumerate(records) if wanted(record)])


# --- what can be planted ---


def drop_outcomes(records: Records, numbers: random.Random) -> Records:
    victim = records[some(records, numbers, lambda record: isinstance(record, Outcome))]
    assert isinstance(victim, Outcome)
    key = victim.request_id, victim.question_index
    return [r for r in records if not (isinstance(r, Outcome) and (r.request_id, r.question_index) == key)]


def never_answer(records: Records, numbers: random.Random) -> Records:
    return records + Model(numbers.getrandbits(32)).submission("forgotten", (make_nonce(numbers),), Phase.OK)


def change_outcome(records: Records, numbers: random.Random) -> Records:
    place = some(records, numbers, lambda r: isinstance(r, Outcome) and r.finish_reason is FinishReason.STOP)
    outcome = records[place]
    assert isinstance(outcome, Outcome)
    changes = [{"attempt": outcome.attempt + 1}, {"finish_reason": FinishReason.LENGTH}]
    return [*records[:place], replace(outcome, **numbers.choice(changes)), *records[place + 1 :]]


def repeat_outcome(records: Records, numbers: random.Random) -> Records:
    return [*records, records[some(records, numbers, lambda record: isinstance(record, Outcome))]]


def commit_twice(records: Records, numbers: random.Random) -> Records:
    commit = records[some(records, numbers, lambda record: isinstance(record, Committed))]
    assert isinstance(commit, Committed)
    return [*records, replace(commit, attempt=commit.attempt + 1)]


def swap_answers(records: Records, numbers: random.Random) -> Records:
    """Each gets the other's answer, for every reader and in the streams, as a mixed-up reply would do it."""
    nonces = {r.request_id: r.nonces[0] for r in records if isinstance(r, Submitted) and r.nonces}
    one, other = numbers.sample(sorted(nonces), 2)
    exchanged = {one: (nonces[one], nonces[other]), other: (nonces[other], nonces[one])}

    def changed(record: Record) -> Record:
        if isinstance(record, Outcome) and record.request_id in exchanged and record.question_index == 0:
            return replace(record, text=record.text.replace(*exchanged[record.request_id]))
        return record

    return [changed(r) for r in records if not isinstance(r, Seen | Closed)]


def leak_into_error(records: Records, numbers: random.Random) -> Records:
    place = some(records, numbers, lambda record: isinstance(record, Outcome))
    outcome = records[place]
    assert isinstance(outcome, Outcome)
    return [*records[:place], replace(outcome, error=f"saw {make_nonce(numbers)}"), *records[place + 1 :]]


def leak_into_stream(records: Records, numbers: random.Random) -> Records:
    """A foreign nonce that comes in two pieces and is replaced later."""
    nonce = make_nonce(numbers)
    pieces = [(0, StreamEventType.DELTA, nonce[:7]), (1, StreamEventType.DELTA, nonce[7:])]
    begun = Model(0).submission("leaky", (make_nonce(numbers),), Phase.INFO)
    events = [
        Seen(reader="r", request_id="leaky", event_index=i, kind=kind, question_index=0, text=text)
        for i, kind, text in pieces
    ]
    return [*records, *begun, Opened(reader="r", request_id="leaky"), *events]


def answer_a_stranger(records: Records, numbers: random.Random) -> Records:
    outcome = records[some(records, numbers, lambda record: isinstance(record, Outcome))]
    assert isinstance(outcome, Outcome)
    return [*records, replace(outcome, reader="stranger")]


def drop_nonce(records: Records, numbers: random.Random) -> Records:
    nonces = (make_nonce(numbers),)
    outcome = Outcome(
        reader="r", request_id="blank", question_index=0, finish_reason=FinishReason.STOP, text="an answer to nothing"
    )
    return [
        *records,
        *Model(0).submission("blank", nonces, Phase.OK),
        Opened(reader="r", request_id="blank"),
        outcome,
    ]


def drop_event(records: Records, numbers: random.Random) -> Records:
    place = some(records, numbers, lambda r: isinstance(r, Seen) and r.kind is not StreamEventType.DONE)
    return [*records[:place], *records[place + 1 :]]


def repeat_event(records: Records, numbers: random.Random) -> Records:
    place = some(records, numbers, lambda record: isinstance(record, Seen))
    return [*records[: place + 1], records[place], *records[place + 1 :]]


def rewind(records: Records, numbers: random.Random) -> Records:
    """A stream that starts again from its beginning without a word."""
    place = some(records, numbers, lambda r: isinstance(r, Seen) and r.kind is StreamEventType.DONE)
    done = records[place]
    assert isinstance(done, Seen)
    again = [r for r in records[:place] if isinstance(r, Seen) and r.reader == done.reader][:1]
    return [*records[:place], *again, *records[place:]]


def rewrite_event(records: Records, numbers: random.Random) -> Records:
    place = some(records, numbers, lambda r: isinstance(r, Seen) and r.kind is StreamEventType.DELTA)
    event = records[place]
    assert isinstance(event, Seen)
    return [*records[:place], replace(event, text=event.text + "!"), *records[place + 1 :]]


def go_on_after_done(records: Records, numbers: random.Random) -> Records:
    done = records[some(records, numbers, lambda r: isinstance(r, Seen) and r.kind is StreamEventType.DONE)]
    assert isinstance(done, Seen)
    return [*records, replace(done, event_index=done.event_index + 1)]


def commit_late(records: Records, numbers: random.Random) -> Records:
    place = some(records, numbers, lambda record: isinstance(record, Committed))
    commit = records[place]
    assert isinstance(commit, Committed)
    newer = Granted(request_id=commit.request_id, question_index=commit.question_index, attempt=commit.attempt + 1)
    return [*records[:place], newer, *records[place:]]


PLANTED = [
    (drop_outcomes, Kind.LOST, True),
    (never_answer, Kind.LOST, True),
    (change_outcome, Kind.DUPLICATED_VISIBLE, True),
    (repeat_outcome, Kind.DUPLICATED_VISIBLE, True),
    (commit_twice, Kind.DUPLICATED_VISIBLE, True),
    (swap_answers, Kind.CROSS_CHANNEL, True),
    (leak_into_error, Kind.CROSS_CHANNEL, True),
    (leak_into_stream, Kind.CROSS_CHANNEL, True),
    (answer_a_stranger, Kind.CROSS_CHANNEL, True),
    (drop_nonce, Kind.CROSS_CHANNEL, True),
    (drop_event, Kind.SEQ_GAP, True),
    (repeat_event, Kind.SEQ_GAP, False),  # a repeated piece of a nonce may also look like a foreign text
    (rewind, Kind.SEQ_GAP, False),
    (rewrite_event, Kind.SEQ_GAP, True),
    (go_on_after_done, Kind.SEQ_GAP, True),
    (commit_late, Kind.LATE_COMMIT_ACCEPTED, True),
]


@SETTINGS
@given(SEEDS)
def test_clean_histories_are_accepted(seed: int) -> None:
    """A checker that cries wolf would be switched off."""
    report = check(Model(seed).run())
    assert report.clean, report.summary()
    assert report.num_questions == report.num_answers + report.num_placeholders
    assert report.num_unknown == 0


@pytest.mark.parametrize(("plant", "kind", "alone"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS)
def test_a_planted_violation_is_found(
    plant: Callable[[Records, random.Random], Records], kind: Kind, alone: bool, seed: int
) -> None:
    """Zero violations mean nothing unless each kind would have been found."""
    model = Model(seed)
    counts = check(plant(model.run(), model.numbers)).counts()
    assert counts[kind] > 0
    if alone:
        assert {found for found, number in counts.items() if number} == {kind}


def test_an_empty_history_is_clean_and_says_that_it_is_empty() -> None:
    """A run in which nothing happened must not pass for a proof."""
    report = check([])
    assert report.clean
    assert (report.num_questions, report.num_answers, report.num_faults) == (0, 0, 0)


def test_a_submission_of_unknown_effect_owes_nothing() -> None:
    """A client whose every reply was lost cannot claim an answer; but a refusal by itself is known."""
    model = Model(0)
    unknown = model.submission("a", ("<0000000001>",), Phase.INFO)
    refused = model.submission("b", ("<0000000002>",), Phase.FAIL)
    report = check([*unknown, *refused])
    assert report.clean
    assert (report.num_questions, report.num_unknown) == (0, 1)
    assert report.reasons == {"QUEUE_FULL": 2}


def test_a_request_that_may_be_forgotten() -> None:
    """After a flush an unattached request fails loudly; that is no loss, and only for that request."""
    records = [*Model(0).submission("a", ("<0000000001>",), Phase.OK), Forgotten(request_id="a")]
    assert check(records).clean
    assert check([*records, *Model(0).submission("b", ("<0000000002>",), Phase.OK)]).counts()[Kind.LOST] == 1


def test_faults_and_commits_are_counted() -> None:
    """The report is the proof that something was tried."""
    records = [Broken(fault="a", num_fired=2), Broken(fault="b", num_fired=0), Broken(fault="a", num_fired=1)]
    report = check([*records, Committed(request_id="a", question_index=0, attempt=1)])
    assert (report.num_faults, report.num_commits) == (3, 1)


@SETTINGS
@given(SEEDS)
def test_rounds_judged_apart_are_judged_as_one(seed: int) -> None:
    """A long run is judged in rounds; a figure or a violation could get lost between them."""
    model = Model(seed)
    first, second = model.run(), [change_request(record) for record in drop_outcomes(model.run(), model.numbers)]
    together = merged([check(first), check(second)])
    assert replace(together, violations=()) == replace(check([*first, *second]), violations=())
    assert Counter(together.violations) == Counter(check([*first, *second]).violations)
    assert merged([]) == check([])


def change_request(record: Record) -> Record:
    """The same in another request, of other clients and readers."""
    changes = {"reader": "second/", "client": "second/", "request_id": "second/"}
    own = {name: prefix + getattr(record, name) for name, prefix in changes.items() if hasattr(record, name)}
    return replace(record, **own)  # type: ignore[arg-type]


def test_a_history_knows_its_requests() -> None:
    """The store's own record of a round is read by these ids."""
    model = Model(0)
    refused = model.submission("b", ("<0000000002>",), Phase.FAIL)
    assert History([*model.submission("a", ("<0000000001>",), Phase.OK), *refused]).request_ids() == {"a", "b"}


def test_history_is_written_for_reading(tmp_path: Path) -> None:
    """After a failure the records are all there is to look at."""
    history = History(Model(1).run())
    history.add(Broken(fault="last", num_fired=1))
    path = tmp_path / "history.jsonl"
    history.write(path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len(history) == len(list(history))
    assert lines[-1] == {"record": "Broken", "fault": "last", "num_fired": 1}
