"""Judges a history: which of the guarantees were broken, if any.

Invariants and semantics: pure; the same history gets the same verdict. What each violation means:

- ``lost``: a question of an accepted request for which nobody ever got an outcome.
- ``duplicated_visible``: two different outcomes of one question, one stream that shows an outcome twice, or two
  accepted commits.
- ``cross_channel``: a nonce in the text, stream or error of another question, an answer without its own nonce, or
  something of a request for which its reader did not ask.
- ``seq_gap``: a stream with a missing, repeated or rewritten event, with an event after ``done``, or whose text is not
  the outcome's.
- ``late_commit_accepted``: a commit accepted from an attempt after a newer one had begun.

A submission without a known effect owes nothing, but what is seen of it must be right all the same.

Not here: how the records came about (``workload``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from common.types import FinishReason, StreamEventType
from tests.chaos.history import (
    NONCE,
    Broken,
    Cancelled,
    Closed,
    Committed,
    Forgotten,
    Granted,
    Opened,
    Outcome,
    Phase,
    Record,
    Seen,
    Submitted,
)

Key = tuple[str, int]
"""(request_id, question_index)."""
ANSWERS = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class Kind(StrEnum):
    """Which guarantee was broken; see the module."""

    LOST = "lost"
    DUPLICATED_VISIBLE = "duplicated_visible"
    CROSS_CHANNEL = "cross_channel"
    SEQ_GAP = "seq_gap"
    LATE_COMMIT_ACCEPTED = "late_commit_accepted"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken guarantee."""

    kind: Kind
    request_id: str
    question_index: int | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict with what it rests on: a clean report over nothing proves nothing."""

    violations: tuple[Violation, ...]
    num_questions: int
    """Of accepted requests."""
    num_answers: int
    num_placeholders: int
    """Timeouts, cancellations and errors."""
    num_unknown: int
    """Questions of submissions whose effect is not known."""
    num_events: int
    num_commits: int
    num_faults: int
    """Times that faults have fired."""
    reasons: dict[str, int]
    """Errors that clients met, by reason."""

    @property
    def clean(self) -> bool:
        """No guarantee was broken."""
        return not self.violations

    def counts(self) -> dict[Kind, int]:
        """Violations by kind, zeros included."""
        found = Counter(violation.kind for violation in self.violations)
        return {kind: found[kind] for kind in Kind}

    def summary(self) -> str:
        """One line, and the first violations below it."""
        line = (
            f"{self.num_questions} questions, {self.num_answers} answers, {self.num_placeholders} placeholders, "
            f"{self.num_unknown} of unknown effect, {self.num_events} events, {self.num_commits} commits, "
            f"{self.num_faults} faults; " + ", ".join(f"{number} {kind}" for kind, number in self.counts().items())
        )
        return "\n  ".join([line, *(str(violation) for violation in self.violations[:10])])


def merged(reports: Iterable[Report]) -> Report:
    """The verdict over several histories that share no request."""
    known = list(reports)
    return Report(
        violations=tuple(violation for report in known for violation in report.violations),
        num_questions=sum(report.num_questions for report in known),
        num_answers=sum(report.num_answers for report in known),
        num_placeholders=sum(report.num_placeholders for report in known),
        num_unknown=sum(report.num_unknown for report in known),
        num_events=sum(report.num_events for report in known),
        num_commits=sum(report.num_commits for report in known),
        num_faults=sum(report.num_faults for report in known),
        reasons=dict(sum((Counter(report.reasons) for report in known), Counter())),
    )


@dataclass(slots=True)
class _Facts:
    """The history, sorted by what it is about."""

    nonces: dict[Key, str] = field(default_factory=dict)
    num_questions: dict[str, int] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    invoked: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    tries: Counter[str] = field(default_factory=Counter)
    forgotten: set[str] = field(default_factory=set)
    outcomes: dict[Key, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Requests that a reader asked for."""
    streams: dict[str, list[Opened | Seen]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[Key, list[Granted | Committed]] = field(default_factory=lambda: defaultdict(list))
    num_faults: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Facts:
        facts = cls()
        for record in records:
            facts._note(record)
        return facts

    def _note(self, record: Record) -> None:
        match record:
            case Submitted():
                self._note_submission(record)
            case Opened() | Seen():
                self.streams[record.reader].append(record)
                if isinstance(record, Opened):
                    self.asked[record.reader].add(record.request_id)
            case Outcome():
                self.outcomes[record.request_id, record.question_index].append(record)
            case Granted() | Committed():
                self.attempts[record.request_id, record.question_index].append(record)
            case Closed() | Cancelled():
                self._note_reason(record.reason)
            case Broken():
                self.num_faults += record.num_fired
            case Forgotten():
                self.forgotten.add(record.request_id)

    def _note_submission(self, record: Submitted) -> None:
        request_id = record.request_id
        if record.phase is Phase.INVOKE:
            self.invoked.add(request_id)
            self.tries[request_id] += 1
            self.num_questions[request_id] = len(record.nonces)
            self.nonces.update(((request_id, i), nonce) for i, nonce in enumerate(record.nonces))
        elif record.phase is Phase.OK:
            self.accepted.add(request_id)
        else:
            self.refused[request_id] += record.phase is Phase.FAIL
            self._note_reason(record.reason)

    def _note_reason(self, reason: str) -> None:
        if reason:
            self.reasons[reason] += 1

    def keys(self, request_ids: Iterable[str]) -> list[Key]:
        return [(request_id, i) for request_id in sorted(request_ids) for i in range(self.num_questions[request_id])]

    @property
    def unknown(self) -> set[str]:
        """Requests of which some submission may have had an effect, and none is known to."""
        open_ids = self.invoked - self.accepted
        return {request_id for request_id in open_ids if self.refused[request_id] < self.tries[request_id]}


def check(records: Iterable[Record]) -> Report:
    """Judge a whole history."""
    facts = _Facts.of(records)
    checks: tuple[Callable[[_Facts], Iterator[Violation]], ...] = (
        _lost,
        _duplicated,
        _crossed,
        _strangers,
        _gaps,
        _rewritten,
        _late_commits,
    )
    firsts = [found[0] for found in facts.outcomes.values()]
    num_answers = sum(outcome.finish_reason in ANSWERS for outcome in firsts)
    return Report(
        violations=tuple(violation for judge in checks for violation in judge(facts)),
        num_questions=len(facts.keys(facts.accepted)),
        num_answers=num_answers,
        num_placeholders=len(firsts) - num_answers,
        num_unknown=len(facts.keys(facts.unknown)),
        num_events=sum(isinstance(record, Seen) for stream in facts.streams.values() for record in stream),
        num_commits=sum(isinstance(note, Committed) for notes in facts.attempts.values() for note in notes),
        num_faults=facts.num_faults,
        reasons=dict(facts.reasons),
    )


def _lost(facts: _Facts) -> Iterator[Violation]:
    for key in facts.keys(facts.accepted - facts.forgotten):
        if key not in facts.outcomes:
            yield Violation(Kind.LOST, *key, "the request was accepted and nobody got an outcome")


def _duplicated(facts: _Facts) -> Iterator[Violation]:
    for key, outcomes in facts.outcomes.items():
        versions = {(outcome.finish_reason, outcome.attempt, outcome.text) for outcome in outcomes}
        if len(versions) > 1:
            yield Violation(Kind.DUPLICATED_VISIBLE, *key, f"{len(versions)} different outcomes: {sorted(versions)}")
        readers = Counter(outcome.reader for outcome in outcomes)
        for reader, number in readers.items():
            if number > 1:
                yield Violation(Kind.DUPLICATED_VISIBLE, *key, f"{reader} was given the outcome {number} times")
    for key, notes in facts.attempts.items():
        commits = {(note.attempt, note.text) for note in notes if isinstance(note, Committed)}
        if len(commits) > 1:
            yield Violation(Kind.DUPLICATED_VISIBLE, *key, f"{len(commits)} accepted commits: {sorted(commits)}")


def _crossed(facts: _Facts) -> Iterator[Violation]:
    for key, outcomes in facts.outcomes.items():
        own = facts.nonces.get(key)
        for outcome in outcomes:
            if own is None:
                yield Violation(Kind.CROSS_CHANNEL, *key, f"{outcome.reader} was given a question nobody asked")
            elif outcome.finish_reason is FinishReason.STOP and own not in outcome.text:
                yield Violation(Kind.CROSS_CHANNEL, *key, f"the answer lacks its nonce {own}: {outcome.text[:80]!r}")
            yield from _foreign(key, own, outcome.text + outcome.error)
    for stream in facts.streams.values():
        for key, text in _texts(record for record in stream if isinstance(record, Seen)).items():
            yield from _foreign(key, facts.nonces.get(key), text)


def _foreign(key: Key, own: str | None, text: str) -> Iterator[Violation]:
    for nonce in sorted(set(NONCE.findall(text)) - {own}):
        yield Violation(Kind.CROSS_CHANNEL, *key, f"the nonce {nonce} of another question is in its text")


def _strangers(facts: _Facts) -> Iterator[Violation]:
    """Readers that were given something of another request."""
    events = (record for stream in facts.streams.values() for record in stream if isinstance(record, Seen))
    outcomes = (outcome for found in facts.outcomes.values() for outcome in found)
    for reader, request_id in {(record.reader, record.request_id) for record in (*events, *outcomes)}:
        if request_id not in facts.asked[reader]:
            yield Violation(Kind.CROSS_CHANNEL, request_id, None, f"{reader} was given what it did not ask for")


def _texts(events: Iterable[Seen]) -> dict[Key, str]:
    """Each question's text as the reading rule of ``aggregator_svc.collector`` makes it."""
    texts: dict[Key, str] = {}
    for event in events:
        key = event.request_id, -1 if event.question_index is None else event.question_index
        if event.kind is StreamEventType.DELTA:
            texts[key] = texts.get(key, "") + event.text
        elif event.kind is StreamEventType.ATTEMPT_CHANGED:
            texts[key] = event.text
    return texts


def _gaps(facts: _Facts) -> Iterator[Violation]:
    for reader, stream in facts.streams.items():
        expected: int | None = None
        done = False
        for record in stream:
            if isinstance(record, Opened):  # opening again does not excuse what is missing
                expected = record.from_event_index if expected is None else expected
                continue
            if done:
                yield Violation(Kind.SEQ_GAP, record.request_id, None, f"{reader} got an event after done")
            if record.event_index != expected:
                what = f"{reader} got event {record.event_index} where {expected} was due"
                yield Violation(Kind.SEQ_GAP, record.request_id, record.question_index, what)
            expected = record.event_index + 1
            done = record.kind is StreamEventType.DONE


def _rewritten(facts: _Facts) -> Iterator[Violation]:
    """Two readers who do not see the same log, or a log that does not add up to the outcome."""
    logs: dict[str, dict[int, Seen]] = defaultdict(dict)
    for reader, stream in facts.streams.items():
        for record in stream:
            if not isinstance(record, Seen):
                continue
            known = logs[record.request_id].setdefault(record.event_index, record)
            if (known.kind, known.question_index, known.text) != (record.kind, record.question_index, record.text):
                what = f"event {record.event_index} reads otherwise for {reader} than for {known.reader}"
                yield Violation(Kind.SEQ_GAP, record.request_id, record.question_index, what)
    for request_id, log in logs.items():
        texts = _texts(event for _, event in sorted(log.items()))
        is_whole = len(log) == max(log) + 1 and log[max(log)].kind is StreamEventType.DONE
        for key in facts.keys({request_id} & facts.invoked) if is_whole else ():
            for outcome in facts.outcomes.get(key, [])[:1]:
                if texts.get(key, "") != outcome.text:
                    what = f"the stream adds up to {texts.get(key, '')[:80]!r}, the outcome is {outcome.text[:80]!r}"
                    yield Violation(Kind.SEQ_GAP, *key, what)


def _late_commits(facts: _Facts) -> Iterator[Violation]:
    for key, notes in facts.attempts.items():
        newest = 0
        for note in notes:
            if isinstance(note, Committed) and note.attempt < newest:
                what = f"attempt {note.attempt} committed after attempt {newest} had begun"
                yield Violation(Kind.LATE_COMMIT_ACCEPTED, *key, what)
            newest = max(newest, note.attempt)
