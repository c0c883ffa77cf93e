"""Requests: one verdict for any input, in words that point into it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config, load_config
from common.errors import InvalidRequestError
from common.request import RequestRules, parse_request
from common.types import (
    AggregateMode,
    IsolationLevel,
    Question,
    QuestionSpec,
    RequestSpec,
    SamplingParams,
    Strategy,
    Truncate,
)

RULES = RequestRules()


def parse(queries: object, rules: RequestRules = RULES, **options: Any) -> RequestSpec:
    return parse_request(queries, options, rules)


def first(query: object, **options: Any) -> QuestionSpec:
    return parse([query], **options).questions[0]


def refusals(queries: object, options: object = None, rules: RequestRules = RULES) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(queries, {} if options is None else options, rules)  # type: ignore[arg-type]
    return {violation.field: violation.message for violation in caught.value.violations}


def test_text_question_and_mapping_are_the_same_question() -> None:
    """HTTP and Engine would treat the same question differently."""
    specs = [
        parse([query], seed=1)
        for query in (
            "q",
            Question("q"),
            {"text": "q"},
            {"text": "q", "stop": None, "top_k": None},
            MappingProxyType({"text": "q"}),
        )
    ]
    assert len({spec.questions for spec in specs}) == 1
    assert len({spec.content_digest for spec in specs}) == 1


def test_every_field_of_a_question_arrives() -> None:
    """A field would be accepted and ignored."""
    query = {
        "text": "q",
        "max_tokens": 7,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 9,
        "stop": ["a", " "],
        "stop_token_ids": [4, 0],
        "ignore_eos": True,
        "min_tokens": 7,
        "logprobs": 0,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "timeout_ms": 5,
        "priority": -1000,
        "category": "退款",
        "truncate": "left",
    }
    assert set(query) == {field.name for field in dataclasses.fields(Question)}
    spec = first(query)
    expected = {**query, "stop": ("a", " "), "stop_token_ids": (4, 0)}
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    assert dataclasses.asdict(spec.sampling) == {key: value for key, value in expected.items() if key in sampling}
    rest = {key: value for key, value in expected.items() if key not in sampling}
    assert {field: getattr(spec, field) for field in rest} == rest
    assert isinstance(spec.sampling.temperature, float)
    assert spec.truncate is Truncate.LEFT


def test_question_goes_before_request_before_configuration() -> None:
    """A question's own setting would be lost, or the request's default would not reach its questions."""
    config = load_config(
        {
            "kev": {
                "core": {"max_tokens": 11},
                "aggregator": {"timeout_ms": 12, "mode": "priority"},
                "isolation": {"level": "shared"},
                "router": {"strategy": "round_robin", "max_parallel_queries": 4},
            }
        },
        {},
    )
    rules = RequestRules.from_config(config, vocab_size=100)
    spec = parse(["a", {"text": "b", "max_tokens": 3, "timeout_ms": 5}], rules, temperature=0.5, timeout_ms=7)
    assert [(q.sampling.max_tokens, q.timeout_ms, q.sampling.temperature) for q in spec.questions] == [
        (11, 7, 0.5),
        (3, 5, 0.5),
    ]
    assert first({"text": "b", "min_tokens": 1, "max_tokens": 2}, min_tokens=9).sampling.min_tokens == 1
    assert parse(["a"], rules).questions[0].timeout_ms == 12
    assert (spec.isolation, spec.strategy) == (IsolationLevel.SHARED, Strategy.ROUND_ROBIN)
    assert (spec.mode, spec.max_parallel) == (AggregateMode.PRIORITY, 4)
    spec = parse(["a"], rules, max_tokens=2, isolation=IsolationLevel.LOOSE, strategy="length_aware", mode="seq_append")
    assert spec.questions[0].sampling.max_tokens == 2
    assert (spec.isolation, spec.strategy) == (IsolationLevel.LOOSE, Strategy.LENGTH_AWARE)
    assert "stop_token_ids[1]" in refusals(["a"], {"stop_token_ids": [99, 100]}, rules)


def test_default_rules_are_those_of_the_default_configuration() -> None:
    """Tests with default rules would test other limits than the product has."""
    assert RequestRules.from_config(Config()) == RULES


def test_options_of_the_request_arrive() -> None:
    """An option would be accepted and ignored."""
    spec = parse(["a"], request_id="A.b_c:d-1", system_prompt="", tenant="t", max_parallel=3)
    assert (spec.request_id, spec.system_prompt, spec.tenant, spec.max_parallel) == ("A.b_c:d-1", "", "t", 3)
    assert re.fullmatch("[0-9a-f]{32}", parse(["a"]).request_id)
    assert parse(["a"]).request_id != parse(["a"]).request_id


def test_a_channels_seed_is_its_own_then_the_requests_then_random() -> None:
    """Equal questions of one request would get equal noise, or a seeded question would depend on its place."""
    spec = parse(["a", {"text": "a", "seed": 0}, "a"], seed=2**63 - 2)
    assert [question.sampling.seed for question in spec.questions] == [2**63 - 2, 0, 0]
    assert parse(["a", "a", "a"], seed=5).questions[2].sampling.seed == 7
    random = {question.sampling.seed for _ in range(4) for question in parse(["a", "a"]).questions}
    assert len(random) == 8
    assert all(0 <= seed < 2**63 for seed in random)


def test_digest_is_equal_for_a_resubmit_only() -> None:
    """A retry would be a conflict, or another request under the same id would get the first one's answers."""
    same = [
        parse(["a", {"text": "b", "temperature": 1}], request_id="x", stop="s"),
        parse(["a", {"temperature": 1.0, "text": "b"}], request_id="x", stop=["s"], seed=None),
        parse(("a", Question("b", temperature=1)), request_id="y", stop=("s",)),
    ]
    assert len({spec.content_digest for spec in same}) == 1
    other = [
        parse(["a", "b"], stop="s"),
        parse([{"text": "b", "temperature": 1}, "a"], stop="s"),
        parse(["a", {"text": "b", "temperature": 1}], stop="s", isolation="loose"),
        parse(["a", {"text": "b", "temperature": 1}], stop="s", seed=1),
        parse(["a", {"text": "b", "temperature": 1}], stop="s", tenant="t"),
    ]
    assert len({spec.content_digest for spec in [*same, *other]}) == 6


@pytest.mark.parametrize(
    ("queries", "sentence"),
    [
        ("hi", "must be a list of questions, got 'hi'; wrap the single question in a list"),
        ({"text": "hi"}, "got a mapping of length 1; wrap the single question in a list"),
        (Question("hi"), "got a value of type Question; wrap the single question in a list"),
        (None, "must be a list of questions, got null; each one text or a mapping with the field text"),
        (7, "must be a list of questions, got 7"),
        (b"hi", "must be a list of questions, got a value of type bytes"),
        ({"a"}, "must be a list of questions, got a value of type set"),
        (iter(["a"]), "must be a list of questions"),
        ([], "must hold 1 to 256 questions, got 0"),
        (["a"] * 257, "must hold 1 to 256 questions, got 257"),
    ],
)
def test_queries_must_be_a_list_of_the_right_length(queries: object, sentence: str) -> None:
    """One text would be taken for a list of letters, or too many questions would be let in."""
    assert sentence in refusals(queries)["queries"]


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\u3000", "\u200b", "\ufeff\u2060 ", "\u3164", "\u00ad", "\x01"])
def test_a_question_that_shows_nothing_is_blank(text: str) -> None:
    """A question without content would reach the model, which then answers nothing in particular."""
    assert "must not be blank" in refusals([text, "good"])["queries[0]"]
    assert "must not be blank" in refusals(["good", {"text": text}])["queries[1].text"]


@pytest.mark.parametrize("text", ["?", "\u200bа\u200b", "🫨", "ᚠ", "<eos>", "\u0301"])
def test_unusual_text_is_not_blank(text: str) -> None:
    """Legal questions would be refused."""
    assert first(text).text == text


def test_text_must_be_whole_unicode_without_nul() -> None:
    """Half an emoji or a NUL would raise deep inside the tokenizer or the queue: an internal error."""
    found = refusals(["ok", "cut \ud83d", {"text": "a\0b"}, "\udcff"], {"system_prompt": "s\ud800", "stop": "\udc00"})
    assert found["queries[1]"] == "must be whole Unicode characters, got half a surrogate pair at character 4"
    assert found["queries[2].text"] == "must not contain the character NUL, found at character 1"
    assert {"queries[3]", "system_prompt", "stop"} <= set(found)
    assert first("\U0001f600").text == "😀"


def test_size_is_counted_in_bytes() -> None:
    """A question of 3-byte characters would pass three times the limit."""
    rules = RequestRules(max_question_bytes=6, max_system_prompt_bytes=3)
    assert parse(["退款", "abcdef"], rules, system_prompt="款").questions[0].text == "退款"
    found = refusals(["退款a", "abcdefg"], {"system_prompt": "abcd"}, rules)
    assert found["queries[0]"] == "must be at most 6 bytes of UTF-8, got 7"
    assert found["queries[1]"] == "must be at most 6 bytes of UTF-8, got 7 characters"
    assert "system_prompt" in found


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 4096], [0, 4097, -1, True, 3.0, "3", math.nan, 10**5000, [1]]),
        ("temperature", [0, 0.0, -0.0, 100, 5e-324], [-0.1, 100.1, math.nan, math.inf, -math.inf, True, "1", 10**400]),
        ("top_p", [1, 1.0, 1e-9], [0, 0.0, 1.01, math.nan]),
        ("top_k", [0, 2**31 - 1], [-1, 2**31, 1.0, False]),
        ("min_p", [0, 1], [-0.01, 1.01, math.nan]),
        ("seed", [0, 2**63 - 1], [-1, 2**63, 1.0]),
        ("stop", ["x", [], ["a"] * 16, "s" * 1024, ("a",)], ["", [""], ["a"] * 17, "s" * 1025, 3, [3], {"a": 1}, "\0"]),
        ("stop_token_ids", [[], [0] * 64], [[-1], [0] * 65, [2**31], [1.0], 5, ["a"]]),
        ("ignore_eos", [True, False], [1, 0, "true"]),
        ("min_tokens", [0, 64], [-1, 4097, True]),
        ("logprobs", [0, 20], [-1, 21, True]),
        ("repetition_penalty", [0.1, 10], [0, -1, 10.1, math.nan]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.inf]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, "0"]),
        ("timeout_ms", [1, 86_400_000], [0, 86_400_001, 1.5]),
        ("priority", [-1000, 1000], [-1001, 1001, "high"]),
        ("category", ["", "售后 refund", "c" * 64], ["c" * 65, "a\n", "\ud800", 3]),
        ("truncate", ["none", "left", "right", Truncate.LEFT], ["LEFT", "", 1]),
    ],
)
def test_each_field_has_its_range(field: str, good: list[Any], bad: list[Any]) -> None:
    """A value that the sampler or the scheduler cannot take would reach it."""
    for value in good:
        assert isinstance(parse([{"text": "a", field: value}]), RequestSpec)
        assert isinstance(parse(["a"], **{field: value}), RequestSpec)
    for value in bad:
        for found, place in (
            (refusals(["a", {"text": "b", field: value}]), f"queries[1].{field}"),
            (refusals(["a"], {field: value}), field),
        ):
            (where, message), *others = found.items()
            assert where.startswith(place) and not others, value
            assert len(message) < 200, value


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("request_id", ["a", "a" * 128, "A.b_c:d-9"], ["", "a" * 129, "a b", "é", "a\n", "\ud800", 3]),
        ("system_prompt", ["", " ", "你是客服"], [3, ["a"], "\0", "a" * 262_145]),
        ("isolation", list(IsolationLevel), ["STRICT", "", 1, "none"]),
        ("strategy", list(Strategy), ["hash", 0]),
        ("mode", list(AggregateMode), ["slots"]),
        ("max_parallel", [1, 8], [0, 9, True, 2.0]),
        ("tenant", ["", "acme:eu-1"], ["a" * 65, "a b", 3]),
    ],
)
def test_each_option_has_its_range(option: str, good: list[Any], bad: list[Any]) -> None:
    """A value that the router or the aggregator cannot take would reach it."""
    for value in [*good, None]:
        assert isinstance(parse(["a"], RequestRules(categories=("refund",)), **{option: value}), RequestSpec)
    for value in bad:
        assert list(refusals(["a"], {option: value})) == [option], value


CLASSES = RequestRules(categories=("refund", "退款", "default"))


def test_a_category_must_be_known_where_it_decides() -> None:
    """A misspelt category would silently join the default class."""
    queries = ["a", {"text": "b", "category": "refnud"}, {"text": "c", "category": "退款"}]
    assert parse(queries, CLASSES).questions[1].category == "refnud", "elsewhere it is a label"
    assert refusals(queries, {"strategy": "prebucket"}, CLASSES) == {
        "queries[1].category": "no class has the category 'refnud'; did you mean 'refund'? "
        "known are refund, 退款, default"
    }
    own = {"strategy": "prebucket", "category": "zzz"}
    assert refusals([*queries[2:], "d"], own, CLASSES) == {
        "category": "no class has the category 'zzz'; known are refund, 退款, default"
    }
    assert refusals(["a"], {"category": "zzz"}, dataclasses.replace(CLASSES, strategy=Strategy.PREBUCKET)).keys() == {
        "category"
    }
    assert parse(queries, dataclasses.replace(CLASSES, takes_any_category=True), strategy="prebucket")
    assert parse(["a", {"text": "b", "category": ""}], CLASSES, strategy="prebucket")


def test_prebucket_without_classes_is_refused() -> None:
    """A caller would believe that categories are kept apart."""
    assert "needs classes" in refusals(["a"], {"strategy": "prebucket"})["strategy"]


def test_minus_zero_is_zero() -> None:
    """Greedy would have two spellings: other digests, and a sampler that compares bits would miss one."""
    assert math.copysign(1, first({"text": "a", "temperature": -0.0}).sampling.temperature) == 1


def test_wrong_choices_are_answered_with_the_right_ones() -> None:
    """A caller could not tell what is allowed."""
    message = refusals(["a"], {"isolation": "strickt"})["isolation"]
    assert message == "must be one of strict, loose or shared, got 'strickt'"
    message = refusals(["a", "b", {"text": "c", "temperature": math.nan}])["queries[2].temperature"]
    assert message == "must be a finite number between 0 and 100, got NaN"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    """A mistyped option would be ignored."""
    found = refusals([{"text": "a", "temprature": 1}, {"txt": "b"}], {"timeout": 3, "qqq": 1, "text": "x", "a b": None})
    assert found["queries[0].temprature"] == "is not a known field; did you mean temperature?"
    assert found["queries[1].txt"] == "is not a known field; did you mean text?"
    assert found["queries[1].text"] == "is missing; every question needs it"
    assert found["timeout"] == "is not a known field; did you mean timeout_ms?"
    assert found["qqq"].startswith("is not a known field; known are request_id, system_prompt")
    assert {"text", "options['a b']"} <= set(found)
    found = refusals([{"text": "a", "k" * 10**6: 1}, {f"k{i}": 1 for i in range(10**5)}, {"text": "c", 3: 1}])
    assert found["queries[1]"].startswith("has more than 64 keys")
    assert found["queries[2]"] == "must have text as keys, got 3"
    assert all(len(place) < 100 for place in found)


@pytest.mark.parametrize("query", [None, 42, 1.5, True, [], ["a"], b"a", object(), type])
def test_a_query_of_the_wrong_type_is_named(query: object) -> None:
    """One bad question would break the whole batch with an unnamed error."""
    assert "must be text or a mapping with the field text" in refusals(["good", query])["queries[1]"]


def test_a_query_without_text_is_named() -> None:
    """A mapping without a question would run as an empty one."""
    assert refusals([{}, {"text": None}, {"text": 3}]) == {
        "queries[0].text": "is missing; every question needs it",
        "queries[1].text": "must be text, got null",
        "queries[2].text": "must be text, got 3",
    }


def test_min_tokens_is_compared_with_the_max_tokens_that_holds() -> None:
    """A question could never end: it must go on and must stop."""
    assert "queries[1].min_tokens" in refusals(["a", {"text": "b", "min_tokens": 300}])
    assert "queries[1].max_tokens" in refusals(["a", {"text": "b", "max_tokens": 2}], {"min_tokens": 3})
    assert list(refusals(["a", "b"], {"min_tokens": 3, "max_tokens": 2})) == ["min_tokens"]
    assert first({"text": "b", "min_tokens": 300}, max_tokens=300).sampling.min_tokens == 300


def test_options_must_be_a_mapping() -> None:
    """A JSON body of another shape would raise."""
    assert refusals(["a"], ["b"]) == {"options": "must be a mapping of names to values, got a list of length 1"}


def test_all_mistakes_are_listed_in_the_order_of_the_request() -> None:
    """A caller would fix one mistake per call."""
    found = refusals(["", {"text": "a", "top_p": 0, "stop": ["a", "", 3]}, 4], {"tenant": "!", "seed": "x"})
    assert list(found) == [
        "queries[0]",
        "queries[1].top_p",
        "queries[1].stop[1]",
        "queries[1].stop[2]",
        "queries[2]",
        "tenant",
        "seed",
    ]


class _Hostile:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__

    def __bool__(self) -> bool:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        return 7

    def __len__(self) -> int:
        raise RuntimeError

    def __iter__(self) -> Iterator[object]:
        raise RuntimeError


class _HostileText(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        return 7

    def __len__(self) -> int:
        raise RuntimeError


class _HostileInteger(int):
    def __int__(self) -> int:
        raise RuntimeError

    __index__ = __int__

    def __le__(self, other: object) -> bool:
        raise RuntimeError

    __ge__ = __lt__ = __gt__ = __le__

    def __repr__(self) -> str:
        raise RuntimeError


class _HostileList(list[object]):
    def __iter__(self) -> Iterator[object]:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


class _HostileMapping(Mapping[str, object]):
    def __getitem__(self, key: str) -> object:
        raise RuntimeError

    def __iter__(self) -> Iterator[str]:
        while True:
            yield "text"

    def __len__(self) -> int:
        raise RuntimeError


class _HostileDict(dict[object, object]):
    def __iter__(self) -> Iterator[object]:
        raise RuntimeError

    items = keys = __iter__  # type: ignore[assignment]


def test_subclasses_of_plain_types_are_read_as_plain_values() -> None:
    """A text or number type of another library (numpy, enums) would be refused or would run its code inside Kev."""
    spec = parse(_HostileList([_HostileText("a"), _HostileDict(text="b", max_tokens=_HostileInteger(3))]), seed=1)
    assert [question.text for question in spec.questions] == ["a", "b"]
    assert type(spec.questions[0].text) is str
    assert type(spec.questions[1].sampling.max_tokens) is int


def test_questions_that_cannot_be_read_are_refused() -> None:
    """An object of the caller would raise inside Kev."""
    unset = object.__new__(Question)
    found = refusals([_Hostile(), _HostileMapping(), unset, {_Hostile(): 1, "text": "a"}, {"text": _Hostile()}])
    assert list(found) == ["queries[0]", "queries[1]", "queries[2]", "queries[3]", "queries[4].text"]
    assert found["queries[0]"].endswith("got a value of type _Hostile")


_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63])
    | st.floats()
    | st.text(max_size=6)
    | st.text(st.characters(categories=["Cs", "Cc", "Cf", "Zs"]), max_size=3)
)
_ODD = st.builds(_Hostile) | st.builds(_HostileText, st.just("x")) | st.builds(_HostileInteger) | st.binary(max_size=3)
_NAMES = st.sampled_from(sorted(field.name for field in dataclasses.fields(Question))) | st.text(max_size=6)
_OPTION_NAMES = _NAMES | st.sampled_from(
    ["request_id", "system_prompt", "isolation", "strategy", "mode", "max_parallel", "tenant"]
)
_TREE = st.recursive(
    _PLAIN | _ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=5,
)
_QUERY = st.just("q") | _TREE | st.dictionaries(_NAMES, _TREE, max_size=4).map(lambda fields: {"text": "q", **fields})


def _assert_points_into(place: str, queries: object, options: Mapping[str, object]) -> None:
    if place in ("queries", "options") or place in options or place == "min_tokens":
        return
    if not (parts := re.match(r"queries\[(\d+)\](?:\.(\w+))?", place)):
        name = re.match(r"\w+", place)
        assert name and (name.group() in options or name.group() == "options"), place
        return
    assert isinstance(queries, list)
    query = queries[int(parts.group(1))]
    assert parts.group(2) is None or parts.group(2) == "text" or parts.group(2) in query, place


@settings(max_examples=200, deadline=None)
@given(queries=_TREE | st.lists(_QUERY, max_size=4), options=st.dictionaries(_OPTION_NAMES, _TREE, max_size=4))
def test_any_value_is_a_request_or_a_refusal_that_points_into_it(queries: object, options: dict[str, object]) -> None:
    """Some input would end in an internal error, or in a verdict that names no place."""
    try:
        spec = parse_request(queries, options, RULES)
    except InvalidRequestError as error:
        assert error.violations
        for violation in error.violations:
            _assert_points_into(violation.field, queries, options)
            f"{violation.field}: {violation.message}".encode()
            assert len(violation.message) < 600
        str(error).encode()
    else:
        assert isinstance(queries, list)
        assert len(spec.questions) == len(queries)
        assert all(question.text.strip() for question in spec.questions)
