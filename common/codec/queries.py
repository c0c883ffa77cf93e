"""What a caller submits, before anybody has checked it, and the rules it will be checked against.

Invariants and semantics: nothing is changed on the way: decoding gives ``parse_request`` the same request as the
caller's own objects would, or encoding refuses (``Uncarriable``) because protobuf has no place for a value, such as
text where a number belongs. Whether what can be carried makes sense is not looked at.

Not here: the check itself (``common.request``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from common.codec.requests import decode_question
from common.codec.wire import LEVEL, MODE, STRATEGY, TRUNCATE, EnumCodec, optional, require, to_duration, to_whole_ms
from common.field_rules import plain_items
from common.request import RequestRules
from common.types import AggregateMode, IsolationLevel, Question, Strategy, Truncate
from common.wording import is_a
from kev.v1 import types_pb2 as pb
from kev.v1.router_service_pb2 import Query

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_MAX_DURATION_MS = 10**14
_QUESTION_FIELDS = tuple(field.name for field in fields(Question))


class Uncarriable(Exception):
    """The request has a value that its messages have no place for; whoever checks it will refuse it."""


def encode_query(queries: object, options: Mapping[str, object]) -> Query:
    """The wire form of what a caller submits; takes what ``parse_request`` takes.

    Raises:
        Uncarriable: protobuf cannot carry it.
    """
    items = plain_items(queries)
    if items is None:
        raise Uncarriable
    try:
        given = {key: value for key, value in options.items() if value is not None}
        query = Query(questions=[_encode_item(item) for item in items])
        for name, put in _OPTIONS.items():
            if name in given:
                put(query, given.pop(name))
        if given:
            query.defaults.CopyFrom(_encode_fields(given.items(), skip="text"))
    except (UnicodeEncodeError, ValueError, TypeError) as error:
        raise Uncarriable from error
    return query


def decode_query(message: Query, path: str = "query") -> tuple[list[Question], dict[str, object]]:
    """Queries and options for ``parse_request``.

    Raises:
        InvalidRequestError: an enum value is not known here.
    """
    options: dict[str, object] = {}
    if message.HasField("defaults"):
        defaults = decode_question(message.defaults, f"{path}.defaults")
        options = {name: getattr(defaults, name) for name in _QUESTION_FIELDS if name != "text" or defaults.text}
    for name, codec in (("isolation", LEVEL), ("strategy", STRATEGY), ("mode", MODE)):
        if number := getattr(message, name):
            options[name] = codec.decode(number, f"{path}.{name}")
    for name in ("request_id", "system_prompt", "tenant"):
        if text := getattr(message, name):
            options[name] = text
    options["max_parallel"] = optional(message, "max_parallel")
    if message.HasField("timeout_duration"):
        options["timeout_ms"] = to_whole_ms(message.timeout_duration)
    return [decode_question(item, f"{path}.questions[{i}]") for i, item in enumerate(message.questions)], options


def _encode_item(item: object) -> pb.Question:
    if is_a(item, str):
        return pb.Question(text=str.__str__(item))
    if is_a(item, Question):
        return _encode_fields((name, getattr(item, name)) for name in _QUESTION_FIELDS)
    try:
        pairs = list(item.items()) if isinstance(item, Mapping) else None
    except Exception as error:  # the methods of foreign mappings are the caller's code
        raise Uncarriable from error
    if pairs is None or not any(is_a(key, str) and key == "text" for key, _ in pairs):
        raise Uncarriable
    return _encode_fields(pairs)


def _encode_fields(pairs: Any, skip: str = "") -> pb.Question:
    question = pb.Question()
    for name, value in pairs:
        put = _FIELDS.get(name) if is_a(name, str) and name != skip else None
        if put is None or (value is None and name == "text"):
            raise Uncarriable
        if value is not None:
            put(question, value)
    return question


_Put = Callable[[Any, object], None]


def _integer(name: str, limit: int) -> _Put:
    def put(message: Any, value: object) -> None:
        if not is_a(value, int) or is_a(value, bool) or abs(value) > limit:
            raise Uncarriable
        setattr(message, name, value)

    return put


def _number(name: str) -> _Put:
    def put(message: Any, value: object) -> None:
        if is_a(value, bool) or not (is_a(value, float) or (is_a(value, int) and abs(value) <= _MAX_INT64)):
            raise Uncarriable
        setattr(message, name, value)

    return put


def _text(name: str, *, cleared: str = "", may_be_empty: bool = True) -> _Put:
    def put(message: Any, value: object) -> None:
        if not is_a(value, str) or not (value or may_be_empty):
            raise Uncarriable
        setattr(message, name, str.__str__(value))
        if cleared and not value:
            setattr(message, cleared, True)

    return put


def _enum(name: str, kind: type[StrEnum], codec: EnumCodec[Any]) -> _Put:
    def put(message: Any, value: object) -> None:
        if not is_a(value, str):
            raise Uncarriable
        setattr(message, name, codec.number(kind(str.__str__(value))))

    return put


def _list(name: str, cleared: str, kind: type[str] | type[int]) -> _Put:
    def put(message: Any, value: object) -> None:
        items = (value,) if kind is str and is_a(value, str) else plain_items(value)
        if items is None or not all(is_a(item, kind) and not is_a(item, bool) for item in items):
            raise Uncarriable
        getattr(message, name).extend(items)
        if not items:
            setattr(message, cleared, True)

    return put


def _flag(message: Any, value: object) -> None:
    if not is_a(value, bool):
        raise Uncarriable
    message.ignore_eos = value


def _timeout(message: Any, value: object) -> None:
    if not is_a(value, int) or is_a(value, bool) or abs(value) > _MAX_DURATION_MS:
        raise Uncarriable
    message.timeout_duration.CopyFrom(to_duration(value))


_FIELDS: dict[str, _Put] = {
    "text": _text("text"),
    **{name: _integer(name, _MAX_INT32) for name in ("max_tokens", "top_k", "min_tokens", "logprobs", "priority")},
    "seed": _integer("seed", _MAX_INT64),
    **{
        name: _number(name)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    },
    "stop": _list("stop", "no_stop", str),
    "stop_token_ids": _list("stop_token_ids", "no_stop_token_ids", int),
    "ignore_eos": _flag,
    "timeout_ms": _timeout,
    "category": _text("category", cleared="no_category"),
    "truncate": _enum("truncate", Truncate, TRUNCATE),
}
_OPTIONS: dict[str, _Put] = {
    "request_id": _text("request_id", may_be_empty=False),
    "system_prompt": _text("system_prompt"),
    "tenant": _text("tenant"),
    "isolation": _enum("isolation", IsolationLevel, LEVEL),
    "strategy": _enum("strategy", Strategy, STRATEGY),
    "mode": _enum("mode", AggregateMode, MODE),
    "max_parallel": _integer("max_parallel", _MAX_INT32),
    "timeout_ms": _timeout,
}


def encode_rules(value: RequestRules) -> pb.RequestRules:
    """The wire form of the rules of a deployment."""
    return pb.RequestRules(
        max_queries_per_request=value.max_queries_per_request,
        max_question_bytes=value.max_question_bytes,
        max_system_prompt_bytes=value.max_system_prompt_bytes,
        max_context=value.max_context,
        max_parallel_queries=value.max_parallel_queries,
        vocab_size=value.vocab_size,
        isolation=LEVEL.encode(value.isolation),
        strategy=STRATEGY.encode(value.strategy),
        mode=MODE.encode(value.mode),
        max_tokens=value.max_tokens,
        timeout_duration=to_duration(value.timeout_ms),
        prompt_stop=value.prompt_stop,
        categories=value.categories,
        takes_any_category=value.takes_any_category,
    )


def decode_rules(message: pb.RequestRules, path: str = "rules") -> RequestRules:
    """The rules of a deployment.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    require(message, path, "timeout_duration")
    return RequestRules(
        max_queries_per_request=message.max_queries_per_request,
        max_question_bytes=message.max_question_bytes,
        max_system_prompt_bytes=message.max_system_prompt_bytes,
        max_context=message.max_context,
        max_parallel_queries=message.max_parallel_queries,
        vocab_size=optional(message, "vocab_size"),
        isolation=LEVEL.decode(message.isolation, f"{path}.isolation"),
        strategy=STRATEGY.decode(message.strategy, f"{path}.strategy"),
        mode=MODE.decode(message.mode, f"{path}.mode"),
        max_tokens=message.max_tokens,
        timeout_ms=to_whole_ms(message.timeout_duration),
        prompt_stop=tuple(message.prompt_stop),
        categories=tuple(message.categories),
        takes_any_category=message.takes_any_category,
    )
