"""What all codecs share: enums by name, times in whole nanoseconds, and the refusal of what would be guessed.

Invariants and semantics: pure functions; every refusal is an ``InvalidRequestError`` that names the field's path.

Not here: the messages themselves.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from common.errors import InvalidRequestError
from common.types import (
    AggregateMode,
    BreakerState,
    Diversion,
    FinishReason,
    HeatUnit,
    HotSpotKind,
    IsolationLevel,
    RequestState,
    Strategy,
    StreamEventType,
    Truncate,
    Verdict,
)
from kev.v1 import types_pb2 as pb

E = TypeVar("E", bound=StrEnum)
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


class EnumCodec(Generic[E]):
    """One domain enum and its wire twin, matched by member name."""

    def __init__(self, values: type[E], prefix: str, wire: EnumTypeWrapper) -> None:
        self._names = {member: f"{prefix}_{member.name}" for member in values}
        self._numbers = {member: wire.Value(name) for member, name in self._names.items()}
        self._members = {number: member for member, number in self._numbers.items()}

    def encode(self, member: E) -> str:
        """The wire name, which every message constructor takes for the number."""
        return self._names[member]

    def number(self, member: E) -> int:
        """The wire number."""
        return self._numbers[member]

    def encode_maybe(self, member: E | None) -> str | None:
        """As ``encode``; ``None`` stays unset."""
        return None if member is None else self._names[member]

    def decode_maybe(self, number: int) -> E | None:
        """The member; ``None`` when it is not set or not known here. For what is told and decides nothing."""
        return self._members.get(number)

    def decode(self, number: int, path: str) -> E:
        """The member.

        Raises:
            InvalidRequestError: not set, or a value that only a newer peer knows.
        """
        member = self._members.get(number)
        if member is None:
            known = ", ".join(self._names.values())
            raise InvalidRequestError.of(path, f"the enum value {number} is not known here; known are {known}")
        return member


LEVEL = EnumCodec(IsolationLevel, "ISOLATION_LEVEL", pb.IsolationLevel)
STRATEGY = EnumCodec(Strategy, "STRATEGY", pb.Strategy)
MODE = EnumCodec(AggregateMode, "AGGREGATE_MODE", pb.AggregateMode)
TRUNCATE = EnumCodec(Truncate, "TRUNCATE", pb.Truncate)
FINISH_REASON = EnumCodec(FinishReason, "FINISH_REASON", pb.FinishReason)
STATE = EnumCodec(RequestState, "REQUEST_STATE", pb.RequestState)
VERDICT = EnumCodec(Verdict, "VERDICT", pb.Verdict)
DIVERSION = EnumCodec(Diversion, "DIVERSION", pb.Diversion)
BREAKER_STATE = EnumCodec(BreakerState, "BREAKER_STATE", pb.BreakerState)
HEAT_UNIT = EnumCodec(HeatUnit, "HEAT_UNIT", pb.HeatUnit)
HOT_SPOT_KIND = EnumCodec(HotSpotKind, "HOT_SPOT_KIND", pb.HotSpotKind)
EVENT_TYPE = EnumCodec(StreamEventType, "STREAM_EVENT_TYPE", pb.StreamEventType)


def to_duration(ms: float) -> Duration:
    """Milliseconds as a Duration, to the nearest nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(ms * _NS_PER_MS))
    return duration


def to_maybe_duration(ms: float | None) -> Duration | None:
    """As ``to_duration``; ``None`` stays unset."""
    return None if ms is None else to_duration(ms)


def to_ms(duration: Duration) -> float:
    """Milliseconds of a Duration; unset is 0."""
    return duration.ToNanoseconds() / _NS_PER_MS


def to_whole_ms(duration: Duration) -> int:
    """Whole milliseconds of a Duration, rounded down; unset is 0."""
    return duration.ToNanoseconds() // _NS_PER_MS


def to_timestamp(time_s: float) -> Timestamp:
    """Unix seconds as a Timestamp, to the nearest nanosecond."""
    # Split first: a float of 1e18 nanoseconds would be coarser than the seconds it came from.
    seconds = math.floor(time_s)
    timestamp = Timestamp()
    timestamp.FromNanoseconds(seconds * _NS_PER_S + round((time_s - seconds) * _NS_PER_S))
    return timestamp


def to_maybe_timestamp(time_s: float | None) -> Timestamp | None:
    """As ``to_timestamp``; ``None`` stays unset."""
    return None if time_s is None else to_timestamp(time_s)


def to_time_s(timestamp: Timestamp) -> float:
    """Unix seconds of a Timestamp; unset is 0."""
    return timestamp.ToNanoseconds() / _NS_PER_S


def optional(message: Message, field: str) -> Any:
    """The value of an ``optional`` field, ``None`` if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def require(message: Message, path: str, *fields: str) -> None:
    """Refuse a message that lacks one of the message fields it cannot do without."""
    for field in fields:
        if not message.HasField(field):
            raise InvalidRequestError.of(f"{path}.{field}", "is missing; the sender must set it")


def require_request_id(value: str, path: str) -> str:
    """Refuse an empty request id, which no answer could be matched to."""
    if not value:
        raise InvalidRequestError.of(f"{path}.request_id", "is empty; the sender must set it")
    return value
