"""JSON that leaves the gateway: valid and ASCII whatever is in it; JSON that enters it: strict."""

from __future__ import annotations

import json
import math
from typing import NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError, InvariantError
from common.types import FinishReason, StreamEvent, StreamEventType, TokenLogprob
from kev.gateway.body import parse_object
from kev.gateway.encoding import encode, encode_error_event, encode_event, jsonable

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(FinishReason)
VALUE = st.recursive(SCALAR, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=10)


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=100, deadline=None)
@given(VALUE)
@example({"\udcff": [math.nan, "a\ud83d", "\u2028"]})
def test_whatever_is_encoded_is_strict_ascii_json_on_one_line(value: object) -> None:
    """A NaN, half a surrogate pair or a line separator in an answer makes the whole body unreadable."""
    encoded = encode(value)
    assert not set(b"\r\n") & set(encoded)
    decoded = json.loads(encoded.decode("ascii"), parse_constant=no_constant)
    json.dumps(decoded, ensure_ascii=False).encode("utf-8")
    assert decoded == jsonable(value)


@settings(max_examples=100, deadline=None)
@given(TEXT)
@example("a\ud83d\r\n\u2028")
def test_a_delta_arrives_as_it_was_sent(text: str) -> None:
    """Text changes on its way through the event stream."""
    event = StreamEvent(
        type=StreamEventType.DELTA, request_id="r", event_index=7, question_index=1, channel_id=2, text=text
    )
    name, index, data, end = encode_event(event).decode("ascii").split("\n", 3)
    assert (name, index, end) == ("event: delta", "id: 7", "\n")
    whole = "".join("\ufffd" if 0xD800 <= ord(char) < 0xE000 else char for char in text)
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "delta",
        "request_id": "r",
        "event_index": 7,
        "question_index": 1,
        "channel_id": 2,
        "text": whole,
    }


def test_a_replaced_text_travels_with_its_event() -> None:
    """After a redelivery a stream's reader keeps text that is no longer part of the answer."""
    event = StreamEvent(type=StreamEventType.ATTEMPT_CHANGED, request_id="r", event_index=0, text="all of it")
    assert b'"text":"all of it"' in encode_event(event)


def test_special_values_keep_their_meaning() -> None:
    """Logprobs lose which token they belong to, minus infinity breaks the body, or an error event resumes wrongly."""
    logprob = TokenLogprob(token_id=1, logprob=-math.inf, top=((5, -0.5), (6, -math.inf)))
    assert jsonable(logprob) == {
        "token_id": 1,
        "logprob": None,
        "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": None}],
    }
    assert b"id:" not in encode_error_event({"error": {"reason": "X"}})


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}, StreamEvent, 1j])
def test_what_has_no_json_form_is_a_bug(value: object) -> None:
    """An internal object leaks into an answer as its repr."""
    with pytest.raises(InvariantError):
        encode(value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_an_object_or_a_refusal(content: bytes) -> None:
    """A broken body is a bug in the eyes of the client (5xx)."""
    try:
        assert isinstance(parse_object(content), dict)
    except InvalidRequestError as error:
        assert encode(error.violations)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TEXT, st.recursive(SCALAR, st.lists, max_leaves=5), max_size=5))
def test_a_json_object_is_read_as_it_was_written(value: dict[str, object]) -> None:
    """A valid body is refused, or changed before ``submit`` has seen it."""
    content = json.dumps(value).encode()
    assert repr(parse_object(content)) == repr(json.loads(content)), "as text, for NaN is not equal to itself"
