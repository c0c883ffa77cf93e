"""Entries that other versions have put into Redis are read as what they were, or refused with a reason.

``recorded/<version>.json`` holds entries as that version wrote them, and as a later and an earlier version would: with
unknown fields in every message, and with nothing but what an entry cannot do without.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, get_args

import pytest

from common.codec import ENVELOPE_VERSION, EnvelopeValue, open_envelope, seal
from common.errors import InvalidRequestError, KevError
from kev.v1 import types_pb2 as pb
from tests.contract.recorded.record import FOLDER, TRACE, VALUES, plain, variants

RECORDS = sorted(FOLDER.glob("*.json"))
ENTRIES = [
    pytest.param(entry, id=f"{path.stem} {entry['name']}, {entry['variant']}")
    for path in RECORDS
    for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]
]
REFUSED = [
    pytest.param(entry, id=f"{path.stem} {entry['field']}")
    for path in RECORDS
    for entry in json.loads(path.read_text(encoding="utf-8"))["refused"]
]


def data_of(entry: dict[str, Any]) -> bytes:
    return base64.b64decode(entry["envelope"], validate=True)


def differences(recorded: object, decoded: object, path: str = "") -> list[str]:
    """Where the decoded value differs; fields that came later may be there in addition."""
    if isinstance(recorded, dict) and isinstance(decoded, dict):
        return [
            place for name in recorded for place in differences(recorded[name], decoded.get(name), f"{path}.{name}")
        ]
    if isinstance(recorded, list) and isinstance(decoded, list) and len(recorded) == len(decoded):
        pairs = enumerate(zip(recorded, decoded, strict=True))
        return [place for i, (one, other) in pairs for place in differences(one, other, f"{path}[{i}]")]
    return [] if recorded == decoded else [f"{path}: {recorded!r} became {decoded!r}"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_recorded_entry_is_read_as_what_it_was(entry: dict[str, Any]) -> None:
    """During a rolling upgrade both versions read what the other one wrote; an entry misread is a wrong answer."""
    value, trace = open_envelope(data_of(entry))
    assert differences(entry["value"], plain(value)) == []
    assert trace == ("" if entry["variant"] == "earlier" else TRACE)


@pytest.mark.parametrize("entry", REFUSED)
def test_entry_that_would_have_to_be_guessed_is_refused(entry: dict[str, Any]) -> None:
    """An entry of a version that broke with this one must end in the dead letters with its reason, not as an answer."""
    with pytest.raises(KevError) as caught:
        open_envelope(data_of(entry))
    assert isinstance(caught.value, InvalidRequestError)
    assert [violation.field for violation in caught.value.violations] == [entry["field"]]
    assert caught.value.reason == "INVALID_QUERY"


def test_a_refused_version_says_both_numbers() -> None:
    """The operator who finds it in the dead letters must see which side to upgrade."""
    data = pb.Envelope(version=ENVELOPE_VERSION + 1, type="kev.v1.WorkItem").SerializeToString()
    with pytest.raises(InvalidRequestError, match=re.escape(f"is {ENVELOPE_VERSION + 1}; this process reads")):
        open_envelope(data)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_written_now_has_all_that_was_recorded(name: str) -> None:
    """The newest version writes entries that the recorded one reads: the same bytes still stand in the payload."""
    written = pb.Envelope.FromString(variants(VALUES[name])["current"])
    for path in RECORDS:
        for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
            if (entry["name"], entry["variant"]) == (name, "current"):
                former = pb.Envelope.FromString(data_of(entry))
                assert (written.type, written.version) == (former.type, former.version)
                assert differences(plain(open_envelope(data_of(entry))[0]), plain(VALUES[name])) == []
                again, _ = open_envelope(seal(open_envelope(data_of(entry))[0]))
                assert again == open_envelope(data_of(entry))[0]


def test_every_kind_of_entry_is_recorded() -> None:
    """A kind that nobody recorded could change without anybody noticing."""
    kinds = {kind.__name__ for kind in get_args(EnvelopeValue)}
    for path in RECORDS:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        assert {entry["value"]["value"] for entry in entries} == kinds
        assert {entry["variant"] for entry in entries} == {"current", "later", "earlier"}


def test_there_is_a_record() -> None:
    """Without one all of this passes and proves nothing."""
    assert [path.name for path in RECORDS][:1] == ["0.1.0.json"]


@pytest.mark.parametrize("name", VALUES)
def test_later_and_earlier_really_differ(name: str) -> None:
    """A variant that equals the current entry tests nothing."""
    made = variants(VALUES[name])
    assert len(made["later"]) > len(made["current"]) > len(made["earlier"])
    assert b"later" in made["later"]
