"""The codec keeps every value as it was, and refuses what it would have to guess."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import codec
from common import types as domain
from common.codec import wire
from common.errors import InvalidRequestError
from common.request import RequestRules
from kev.v1 import types_pb2 as pb

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNKNOWN_FIELD = b"\x80\x7d\x01"  # field 2000, varint 1
ENUM_DEFAULTS = {"Question.truncate", "QuestionSpec.truncate", "StreamEvent.state"}
"""Enum fields in which "not set" has a meaning."""
TOLD = {
    "Route.diverted_why",
    "Result.diverted_why",
    "ChannelSnapshot.breaker",
    "ChannelSnapshot.breaker_why",
    "HotSpot.kind",
    "HotSpot.strategy",
    "HotSpot.hot_by",
    "BucketHeat.strategy",
}
"""Enum fields that are told to somebody and decide nothing: what is not known is left out."""

INT32 = 2**31 - 1
INT_LIMITS = {"hash_bucket": 2**64 - 1, "seed": 2**63 - 1, "num_steps": 2**63 - 1, "kv_bytes_total": 2**63 - 1}


@dataclass(frozen=True)
class Crossing:
    """One value type, its message and the two ways between them."""

    value: Any
    message: type[Message]
    encode: Callable[[Any], Message]
    decode: Callable[[Any], Any]


CROSSINGS = [
    Crossing(domain.SamplingParams, pb.SamplingParams, codec.encode_sampling, codec.decode_sampling),
    Crossing(domain.Question, pb.Question, codec.encode_question, codec.decode_question),
    Crossing(domain.RequestSpec, pb.RequestSpec, codec.encode_request_spec, codec.decode_request_spec),
    Crossing(domain.WorkItem, pb.WorkItem, codec.encode_work_item, codec.decode_work_item),
    Crossing(domain.RequestRecord, pb.RequestRecord, codec.encode_request_record, codec.decode_request_record),
    Crossing(domain.ErrorInfo, pb.ErrorInfo, codec.encode_error, codec.decode_error),
    Crossing(domain.ChannelStarted, pb.ChannelEvent, codec.encode_channel_event, codec.decode_channel_event),
    Crossing(domain.ChannelDelta, pb.ChannelEvent, codec.encode_channel_event, codec.decode_channel_event),
    Crossing(domain.ChannelResult, pb.ChannelEvent, codec.encode_channel_event, codec.decode_channel_event),
    Crossing(domain.Result, pb.Result, codec.encode_result, codec.decode_result),
    Crossing(domain.StreamEvent, pb.StreamEvent, codec.encode_stream_event, codec.decode_stream_event),
    Crossing(domain.RequestView, pb.RequestView, codec.encode_request_view, codec.decode_request_view),
    Crossing(domain.NodeStats, pb.NodeStats, codec.encode_node_stats, codec.decode_node_stats),
    Crossing(domain.ChannelSnapshot, pb.ChannelSnapshot, codec.encode_channel_snapshot, codec.decode_channel_snapshot),
    Crossing(domain.RouterStats, pb.RouterStats, codec.encode_router_stats, codec.decode_router_stats),
    Crossing(RequestRules, pb.RequestRules, codec.encode_rules, codec.decode_rules),
    Crossing(domain.IsolationReport, pb.IsolationReport, codec.encode_isolation_report, codec.decode_isolation_report),
]
every_crossing = pytest.mark.parametrize("crossing", CROSSINGS, ids=lambda crossing: crossing.value.__name__)


# --- values from the declared types, so that a new field is tried without a word here ---


def hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def floats(name: str) -> st.SearchStrategy[float]:
    if name.endswith("_ms"):
        return st.integers(0, 10**15).map(lambda ns: ns / 1e6)
    if name.endswith("_at"):
        return st.integers(0, 2**24 * 10**9).map(lambda ns: ns / 1e9) | st.floats(2.0**24, 2.0**33)
    return st.floats(allow_nan=False)


def integers(name: str) -> st.SearchStrategy[int]:
    if name == "slot":
        return st.integers(-1, INT32)
    if name == "priority":
        return st.integers(-INT32 - 1, INT32)
    return st.integers(0, INT_LIMITS.get(name, INT32))


def values(hint: Any, name: str) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(hint):
        return instances(typing.cast("type", hint))
    if isinstance(hint, types.UnionType):
        return st.one_of([values(arg, name) for arg in typing.get_args(hint)])
    if typing.get_origin(hint) is tuple:
        first, *rest = typing.get_args(hint)
        if rest == [...]:
            return st.lists(values(first, name), max_size=3).map(tuple)
        return st.tuples(values(first, name), *(values(arg, name) for arg in rest))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    plain: dict[Any, Callable[[str], st.SearchStrategy[Any]]] = {
        bool: lambda _: st.booleans(),
        int: integers,
        float: floats,
        str: lambda field: st.text(min_size=1 if field == "request_id" else 0, max_size=20),
        types.NoneType: lambda _: st.none(),
    }
    return plain[hint](name)


@functools.cache
def instances(cls: type) -> st.SearchStrategy[Any]:
    special = special_fields(cls)
    fields = {name: special[name] if name in special else values(hint, name) for name, hint in hints(cls).items()}
    return st.builds(cls, **fields)


def special_fields(cls: type) -> dict[str, st.SearchStrategy[Any]]:
    if cls is not domain.Question:
        return {}
    return {
        "stop": st.none() | st.lists(st.text(), max_size=3).map(tuple),
        "stop_token_ids": st.none() | st.lists(st.integers(0, INT32), max_size=3).map(tuple),
        "category": st.none() | st.text(),
        "truncate": st.none() | st.sampled_from([member.value for member in domain.Truncate]),
    }


def full(hint: Any, name: str = "") -> Any:
    """A value with everything set: no empty tuple, no None, no zero."""
    if dataclasses.is_dataclass(hint):
        return typing.cast("type", hint)(
            **{field: full(h, field) for field, h in hints(typing.cast("type", hint)).items()}
        )
    if isinstance(hint, types.UnionType):
        return full(typing.get_args(hint)[0], name)
    if typing.get_origin(hint) in (tuple, list):
        return tuple(full(arg, name) for arg in typing.get_args(hint) if arg is not ...)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return list(hint)[-1]
    return {bool: True, int: 3, float: 2.5, str: "left"}[hint]


# --- the properties ---


@every_crossing
@SETTINGS
@given(data=st.data())
def test_round_trip_is_exact(crossing: Crossing, data: st.DataObject) -> None:
    """A field that the codec forgets, swaps or rounds would change answers between the tiers."""
    value = data.draw(instances(crossing.value))
    wire_bytes = crossing.encode(value).SerializeToString()
    assert crossing.decode(crossing.message.FromString(wire_bytes)) == value


@every_crossing
def test_unknown_fields_are_ignored(crossing: Crossing) -> None:
    """A peer of the next version adds fields; failing on them would forbid rolling upgrades."""
    value = full(crossing.value)
    newer = crossing.encode(value).SerializeToString() + UNKNOWN_FIELD
    assert crossing.decode(crossing.message.FromString(newer)) == crossing.decode(crossing.encode(value))


def leaves(message: Message, path: str = "") -> Iterator[tuple[str, Message, FieldDescriptor]]:
    """Every set field below ``message`` as (path, owner, field), submessages included."""
    for field, value in message.ListFields():
        yield f"{path}.{field.name}", message, field
        if field.message_type is not None and not field.message_type.full_name.startswith("google."):
            for child in value if field.is_repeated else [value]:
                yield from leaves(child, f"{path}.{field.name}")


def test_every_wire_field_is_written() -> None:
    """A field that is on the wire but never filled is a promise to clients that nothing keeps."""
    written: dict[str, set[str]] = {}
    for crossing in CROSSINGS:
        for _, owner, field in leaves(crossing.encode(full(crossing.value))):
            written.setdefault(owner.DESCRIPTOR.name, set()).add(field.name)
    cleared = codec.encode_question(domain.Question("a", stop=(), stop_token_ids=(), category=""))
    written["Question"] |= {field.name for field, _ in cleared.ListFields()}
    declared = {name: {f.name for f in m.fields} for name, m in pb.DESCRIPTOR.message_types_by_name.items()}
    del declared["Envelope"]
    assert written == declared


def enum_fields(*, told: bool = False) -> Iterator[Any]:
    for crossing in CROSSINGS:
        for path, owner, field in leaves(crossing.encode(full(crossing.value))):
            if field.enum_type is not None and (f"{owner.DESCRIPTOR.name}.{field.name}" in TOLD) == told:
                yield pytest.param(crossing, path, id=crossing.value.__name__ + path)


def with_enum(crossing: Crossing, wanted: str, number: int) -> tuple[Message, str]:
    message = crossing.encode(full(crossing.value))
    for path, owner, field in leaves(message):
        if path == wanted:
            setattr(owner, field.name, number)
            return message, f"{owner.DESCRIPTOR.name}.{field.name}"
    raise AssertionError(wanted)


@pytest.mark.parametrize(("crossing", "path"), list(enum_fields()))
def test_unknown_enum_value_names_its_field(crossing: Crossing, path: str) -> None:
    """A value of a newer peer, guessed or passed on, could run a question at the wrong isolation level."""
    message, _ = with_enum(crossing, path, 99)
    with pytest.raises(InvalidRequestError) as caught:
        crossing.decode(message)
    assert caught.value.violations[0].field.endswith(path.rpartition(".")[2])
    assert "99" in caught.value.violations[0].message


@pytest.mark.parametrize(("crossing", "path"), list(enum_fields(told=True)))
def test_what_is_only_told_is_left_out_when_it_is_not_known(crossing: Crossing, path: str) -> None:
    """An answer would be lost, or an operator told nothing at all, for a word that only a newer router knows."""
    unset, unknown = (crossing.decode(with_enum(crossing, path, number)[0]) for number in (0, 99))
    assert unset == unknown != crossing.decode(crossing.encode(full(crossing.value)))


@pytest.mark.parametrize(("crossing", "path"), list(enum_fields()))
def test_missing_enum_value_is_refused_unless_it_has_a_default(crossing: Crossing, path: str) -> None:
    """UNSPECIFIED must not quietly become the first member."""
    message, name = with_enum(crossing, path, 0)
    if name in ENUM_DEFAULTS:
        crossing.decode(message)
    else:
        with pytest.raises(InvalidRequestError):
            crossing.decode(message)


@pytest.mark.parametrize(
    ("values", "descriptor"),
    [
        (domain.IsolationLevel, pb.IsolationLevel.DESCRIPTOR),
        (domain.Strategy, pb.Strategy.DESCRIPTOR),
        (domain.AggregateMode, pb.AggregateMode.DESCRIPTOR),
        (domain.Truncate, pb.Truncate.DESCRIPTOR),
        (domain.FinishReason, pb.FinishReason.DESCRIPTOR),
        (domain.RequestState, pb.RequestState.DESCRIPTOR),
        (domain.Verdict, pb.Verdict.DESCRIPTOR),
        (domain.StreamEventType, pb.StreamEventType.DESCRIPTOR),
        (domain.Diversion, pb.Diversion.DESCRIPTOR),
        (domain.BreakerState, pb.BreakerState.DESCRIPTOR),
        (domain.HotSpotKind, pb.HotSpotKind.DESCRIPTOR),
        (domain.HeatUnit, pb.HeatUnit.DESCRIPTOR),
    ],
    ids=lambda argument: getattr(argument, "__name__", ""),
)
def test_enums_have_the_same_members(values: type[StrEnum], descriptor: EnumDescriptor) -> None:
    """A member on one side only could not be sent, or not be understood."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    assert {value.name.removeprefix(prefix) for value in descriptor.values} == {m.name for m in values} | {
        "UNSPECIFIED"
    }


@pytest.mark.parametrize(
    ("crossing", "field"),
    [
        (crossing, field)
        for crossing in CROSSINGS
        for field in {
            domain.WorkItem: ["prompt", "sampling", "time_budget"],
            domain.Result: ["isolation"],
        }.get(crossing.value, [])
    ],
    ids=lambda argument: argument if isinstance(argument, str) else argument.value.__name__,
)
def test_missing_message_is_named(crossing: Crossing, field: str) -> None:
    """A work item without a prompt or a budget would run an empty prompt for ever."""
    message = crossing.encode(full(crossing.value))
    message.ClearField(field)
    with pytest.raises(InvalidRequestError, match=field):
        crossing.decode(message)


@pytest.mark.parametrize(
    "crossing",
    [crossing for crossing in CROSSINGS if "request_id" in hints(crossing.value)],
    ids=lambda crossing: crossing.value.__name__,
)
def test_empty_request_id_is_refused(crossing: Crossing) -> None:
    """An outcome without a request id could be given to any caller."""
    value = dataclasses.replace(full(crossing.value), request_id="")
    with pytest.raises(InvalidRequestError, match="request_id"):
        crossing.decode(crossing.encode(value))


def test_missing_part_of_a_nested_question_names_its_index() -> None:
    """With 256 questions in a request, "timeout is missing" alone helps nobody."""
    message = codec.encode_request_spec(full(domain.RequestSpec))
    message.questions.add().CopyFrom(message.questions[0])
    message.questions[1].ClearField("timeout_duration")
    with pytest.raises(InvalidRequestError, match=r"request\.questions\[1\]\.timeout_duration"):
        codec.decode_request_spec(message)


def test_absent_sampling_numbers_take_their_defaults() -> None:
    """A caller that sets nothing would otherwise get top_p 0 and max_tokens 0."""
    assert codec.decode_sampling(pb.SamplingParams()) == domain.SamplingParams()
    assert codec.decode_sampling(pb.SamplingParams(top_p=0.5)) == domain.SamplingParams(top_p=0.5)


def test_zero_is_not_unset() -> None:
    """Greedy (temperature 0), seed 0 and logprobs 0 mean something."""
    question = domain.Question("q", temperature=0.0, seed=0, logprobs=0, ignore_eos=False)
    assert codec.decode_question(codec.encode_question(question)) == question


def test_question_as_a_caller_may_write_it() -> None:
    """A single stop string must not be sent as one stop per letter, nor an unknown truncate crash the client."""
    assert codec.decode_question(codec.encode_question(domain.Question("q", stop="\n\n"))).stop == ("\n\n",)
    with pytest.raises(InvalidRequestError, match="truncate"):
        codec.encode_question(domain.Question("q", truncate="middle"))


@SETTINGS
@given(st.floats(0, 1e12))
def test_a_duration_is_off_by_half_a_nanosecond_at_most(ms: float) -> None:
    """Audit times that drift with each hop could not be compared."""
    assert wire.to_ms(wire.to_duration(ms)) == pytest.approx(ms, abs=0.51e-6, rel=2**-52)


@SETTINGS
@given(st.floats(-1e9, 2.0**33))
def test_a_time_of_day_is_off_by_half_a_nanosecond_at_most(time_s: float) -> None:
    """Splitting into seconds and nanoseconds goes wrong first before 1970 and at x.9999999999."""
    assert wire.to_time_s(wire.to_timestamp(time_s)) == pytest.approx(time_s, abs=0.51e-9, rel=2**-52)


SEALED = [domain.WorkItem, domain.ChannelStarted, domain.ChannelResult, domain.RequestRecord, domain.RequestSpec]


@pytest.mark.parametrize("cls", SEALED, ids=lambda cls: cls.__name__)
def test_envelope_round_trip(cls: type) -> None:
    """A stream entry must come back as the value and the trace it was."""
    value = full(cls)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert codec.open_envelope(codec.seal(value, trace)) == (value, trace)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\xff\xff\xff", "envelope"),
        (b"", "envelope.version"),
        (pb.Envelope(version=2, type="kev.v1.WorkItem").SerializeToString(), "envelope.version"),
        (pb.Envelope(version=1, type="kev.v1.Nothing").SerializeToString(), "envelope.type"),
        (pb.Envelope(version=1, type="kev.v1.WorkItem", payload=b"\xff").SerializeToString(), "envelope"),
        (pb.Envelope(version=1, type="kev.v1.WorkItem").SerializeToString(), "work_item.prompt"),
        (pb.Envelope(version=1, type="kev.v1.ChannelEvent").SerializeToString(), "event"),
    ],
    ids=["damaged", "empty", "newer", "foreign", "damaged payload", "empty item", "empty event"],
)
def test_bad_envelope_is_a_clear_error(data: bytes, field: str) -> None:
    """A foreign entry must end in the dead letters with a reason, not in a crash of the consumer."""
    with pytest.raises(InvalidRequestError) as caught:
        codec.open_envelope(data)
    assert caught.value.violations[0].field == field
