"""What a caller sent, checked: the one verdict for Engine, HTTP and gRPC.

Invariants and semantics: a request is taken whole or refused whole, before anything runs; a refusal lists every
wrong field with its path in the caller's own input. Any Python object is an allowed input: only
``InvalidRequestError`` comes out. ``None`` for an option or a field of a question means its default; a question's own
value goes before the request's, the request's before the configuration's.

A channel's seed is the question's own seed; else the request's seed + question_index (modulo 2^63), so that equal
questions of one request differ while each can be repeated alone; else it is random.

Not here: whether a question fits its context (the router counts tokens), what one value may look like
(``common.field_rules``).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from common.config import Config
from common.config_sections import UnknownCategory
from common.errors import FieldViolation, InvalidRequestError
from common.field_rules import (
    Rule,
    WrongValue,
    content,
    flag,
    integer,
    label,
    list_of,
    name,
    number,
    one_of,
    plain_items,
    stop_string,
)
from common.types import (
    DEFAULT_CLASS,
    AggregateMode,
    IsolationLevel,
    Question,
    QuestionSpec,
    RequestSpec,
    SamplingParams,
    Strategy,
    Truncate,
)
from common.wording import is_a, named, nearest, shown

_MAX_SEED = 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1
_MAX_TIMEOUT_MS = 86_400_000
_MAX_NAME_CHARS = 64
_MAX_KEYS = 64
"""More keys than this are refused in one sentence instead of one by one."""
_MAX_GUESSES = 50
"""Looking for the nearest name takes some 50 us, which thousands of unknown names would add up."""

_QUESTION_FIELDS = tuple(field.name for field in fields(Question))
_QUESTION_SPEC_FIELDS = tuple(field.name for field in fields(QuestionSpec) if field.name != "sampling")
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """Limits and defaults that requests are checked against."""

    max_queries_per_request: int = 256
    max_question_bytes: int = 262_144
    max_system_prompt_bytes: int = 262_144
    max_context: int = 4096
    """Upper limit of ``max_tokens``."""
    max_parallel_queries: int = 8
    """Upper limit and default of ``max_parallel``."""
    vocab_size: int | None = None
    """Token ids must be below; ``None`` when no model is known."""
    isolation: IsolationLevel = IsolationLevel.STRICT
    strategy: Strategy = Strategy.SEMANTIC_HASH
    mode: AggregateMode = AggregateMode.SLOT_MAP
    max_tokens: int = 64
    timeout_ms: int = 10_000
    categories: tuple[str, ...] = ()
    """Those that the classes of strategy ``prebucket`` know; none where there are no classes."""
    takes_any_category: bool = False
    """Whether that strategy takes any other one too."""
    prompt_stop: tuple[str, ...] = ()
    """``stop`` of questions that set none: what ends an answer under a plain prompt template."""

    @classmethod
    def from_config(cls, config: Config, vocab_size: int | None = None) -> RequestRules:
        """The rules of a deployment."""
        return cls(
            max_queries_per_request=config.router.max_queries_per_request,
            max_question_bytes=config.router.max_question_bytes,
            max_system_prompt_bytes=config.router.max_system_prompt_bytes,
            max_context=config.core.max_context,
            max_parallel_queries=config.router.max_parallel_queries,
            vocab_size=vocab_size,
            isolation=config.isolation.level,
            strategy=config.router.strategy,
            mode=config.aggregator.mode,
            max_tokens=config.core.max_tokens,
            timeout_ms=config.aggregator.timeout_ms,
            categories=_categories(config),
            takes_any_category=config.router.unknown_category is UnknownCategory.DEFAULT,
        )

    @classmethod
    def for_model(cls, config: Config, *, vocab_size: int, uses_chat_template: bool, max_context: int) -> RequestRules:
        """The rules of a deployment whose model is known.

        Args:
            config: the deployment's.
            vocab_size: token ids must be below.
            uses_chat_template: the model's own prompt is used, so ``core.prompt_stop`` does not apply.
            max_context: positions of one channel.
        """
        return replace(
            cls.from_config(config, vocab_size),
            max_context=max_context,
            prompt_stop=() if uses_chat_template else config.core.prompt_stop,
        )


def parse_request(queries: object, options: Mapping[str, object], rules: RequestRules) -> RequestSpec:
    """Check a request and fill in every default.

    Args:
        queries: a list of texts, ``Question`` values or mappings with the fields of ``Question``.
        options: ``request_id``, ``system_prompt``, ``isolation``, ``strategy``, ``mode``, ``max_parallel``,
            ``tenant``, and any field of a question but ``text`` as the default of all its questions.
        rules: limits and defaults.

    Raises:
        InvalidRequestError: anything is wrong; lists all of it.
    """
    violations: list[FieldViolation] = []
    questions = _read_queries(queries, rules, violations)
    given = _read_options(options, rules, violations)
    if violations:
        raise InvalidRequestError(violations)
    _check_min_tokens(questions, given, rules)
    _check_classes(questions, given, rules)
    return RequestSpec(
        request_id=given.get("request_id") or uuid.uuid4().hex,
        questions=tuple(_question_spec(index, question, given, rules) for index, question in enumerate(questions)),
        isolation=given.get("isolation", rules.isolation),
        strategy=given.get("strategy", rules.strategy),
        mode=given.get("mode", rules.mode),
        max_parallel=given.get("max_parallel", rules.max_parallel_queries),
        system_prompt=given.get("system_prompt", ""),
        tenant=given.get("tenant", ""),
        content_digest=_content_digest(questions, given),
    )


@lru_cache(maxsize=16)
def _question_rules(rules: RequestRules) -> Mapping[str, Rule]:
    token_ids = integer(0, _MAX_TOKEN_ID if rules.vocab_size is None else rules.vocab_size - 1)
    return {
        "text": content(rules.max_question_bytes),
        "max_tokens": integer(1, rules.max_context),
        "temperature": number(0, 100),
        "top_p": number(0, 1, above_low=True),
        "top_k": integer(0, 2**31 - 1),
        "min_p": number(0, 1),
        "seed": integer(0, _MAX_SEED),
        "stop": list_of(stop_string(max_chars=1024), max_items=16, or_one=True),
        "stop_token_ids": list_of(token_ids, max_items=64),
        "ignore_eos": flag,
        "min_tokens": integer(0, rules.max_context),
        "logprobs": integer(0, 20),
        "repetition_penalty": number(0, 10, above_low=True),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "timeout_ms": integer(1, _MAX_TIMEOUT_MS),
        "priority": integer(-1000, 1000),
        "category": label(_MAX_NAME_CHARS),
        "truncate": one_of(Truncate),
    }


@lru_cache(maxsize=16)
def _option_rules(rules: RequestRules) -> Mapping[str, Rule]:
    shared = {key: rule for key, rule in _question_rules(rules).items() if key != "text"}
    return {
        "request_id": name(128),
        "system_prompt": content(rules.max_system_prompt_bytes, may_be_blank=True),
        "isolation": one_of(IsolationLevel),
        "strategy": one_of(Strategy),
        "mode": one_of(AggregateMode),
        "max_parallel": integer(1, rules.max_parallel_queries),
        "tenant": name(_MAX_NAME_CHARS, may_be_empty=True),
        **shared,
    }


def _read_queries(queries: object, rules: RequestRules, violations: list[FieldViolation]) -> list[dict[str, Any]]:
    items = plain_items(queries)
    limit = rules.max_queries_per_request
    if items is None:
        single = any(is_a(queries, kind) for kind in (str, dict, Question))
        hint = "wrap the single question in a list" if single else "each one text or a mapping with the field text"
        violations.append(FieldViolation("queries", f"must be a list of questions, got {shown(queries)}; {hint}"))
    elif not 1 <= len(items) <= limit:
        violations.append(FieldViolation("queries", f"must hold 1 to {limit} questions, got {len(items)}"))
    else:
        return [_read_query(item, f"queries[{index}]", rules, violations) for index, item in enumerate(items)]
    return []


def _read_query(query: object, path: str, rules: RequestRules, violations: list[FieldViolation]) -> dict[str, Any]:
    checks = _question_rules(rules)
    if is_a(query, str):
        found: dict[str, Any] = {}
        _read_value("text", query, path, checks["text"], found, violations)
        return found
    pairs = _pairs(query)
    if pairs is None:
        violations.append(FieldViolation(path, f"must be text or a mapping with the field text, got {shown(query)}"))
        return {}
    if len(pairs) <= _MAX_KEYS and not any(is_a(key, str) and str.__eq__(key, "text") for key, _ in pairs):
        violations.append(FieldViolation(f"{path}.text", "is missing; every question needs it"))
    return _read_fields(pairs, path, checks, violations)


def _read_options(options: object, rules: RequestRules, violations: list[FieldViolation]) -> dict[str, Any]:
    pairs = _pairs(options)
    if pairs is None:
        violations.append(FieldViolation("options", f"must be a mapping of names to values, got {shown(options)}"))
        return {}
    return _read_fields(pairs, "", _option_rules(rules), violations)


def _read_fields(
    pairs: list[tuple[object, object]], path: str, checks: Mapping[str, Rule], violations: list[FieldViolation]
) -> dict[str, Any]:
    """The given values that follow their rules; ``path`` is empty for the options of the request."""
    found: dict[str, Any] = {}
    if len(pairs) > _MAX_KEYS:
        violations.append(
            FieldViolation(path or "options", f"has more than {_MAX_KEYS} keys; known are {_names(checks)}")
        )
        return found
    for key, value in pairs:
        if not is_a(key, str):
            violations.append(FieldViolation(path or "options", f"must have text as keys, got {shown(key)}"))
            continue
        plain_key = str.__str__(key)
        if value is None and plain_key in checks and plain_key != "text":
            continue
        place = _place(path, plain_key)
        if plain_key in checks:
            _read_value(plain_key, value, place, checks[plain_key], found, violations)
            continue
        guess = nearest(plain_key, checks) if len(violations) < _MAX_GUESSES else None
        hint = f"did you mean {guess}?" if guess else f"known are {_names(checks)}"
        violations.append(FieldViolation(place, f"is not a known field; {hint}"))
    return found


def _read_value(
    key: str, value: object, place: str, rule: Rule, found: dict[str, Any], violations: list[FieldViolation]
) -> None:
    try:
        found[key] = rule(value)
    except WrongValue as error:
        violations += [FieldViolation(place + inside, message) for inside, message in error.flaws]


def _pairs(value: object) -> list[tuple[object, object]] | None:
    """Keys and values of a mapping or ``Question``; ``None`` for anything else, also for one that cannot be read."""
    if is_a(value, dict):
        return list(dict.items(value))
    with suppress(Exception):  # the methods of other classes are the caller's code
        if is_a(value, Question):
            return [(field, getattr(value, field)) for field in _QUESTION_FIELDS]
        if isinstance(value, Mapping):
            return [(key, value[key]) for key in islice(value, _MAX_KEYS + 1)]
    return None


def _place(path: str, key: str) -> str:
    inside = named(key)
    return f"{path or 'options'}{inside}" if path or inside.startswith("[") else key


def _names(checks: Mapping[str, Rule]) -> str:
    return ", ".join(checks)


def _check_min_tokens(questions: list[dict[str, Any]], given: dict[str, Any], rules: RequestRules) -> None:
    """Raises ``InvalidRequestError`` where ``min_tokens`` and ``max_tokens``, each valid, exclude each other."""
    wrong: dict[str, str] = {}
    for index, question in enumerate(questions):
        merged = {"min_tokens": 0, "max_tokens": rules.max_tokens, **given, **question}
        fewest, most = merged["min_tokens"], merged["max_tokens"]
        if fewest > most:
            own = next((key for key in ("min_tokens", "max_tokens") if key in question), None)
            place = f"queries[{index}].{own}" if own else "min_tokens"
            wrong[place] = f"min_tokens must be at most max_tokens, got min_tokens {fewest} and max_tokens {most}"
    if wrong:
        raise InvalidRequestError([FieldViolation(place, message) for place, message in wrong.items()])


def _check_classes(questions: list[dict[str, Any]], given: dict[str, Any], rules: RequestRules) -> None:
    """Raises ``InvalidRequestError`` where strategy ``prebucket`` cannot know the class of a question."""
    if given.get("strategy", rules.strategy) is not Strategy.PREBUCKET:
        return
    if not rules.categories:
        told = (
            "prebucket needs classes, and this deployment has none (router.prebucket_classes); choose another strategy"
        )
        raise InvalidRequestError.of("strategy", told)
    if rules.takes_any_category:
        return
    known = ", ".join(rules.categories)
    wrong: dict[str, str] = {}
    for index, question in enumerate(questions):
        category = {**given, **question}.get("category", "")
        if category and category not in rules.categories:
            guess = nearest(category, rules.categories) if len(wrong) < _MAX_GUESSES else None
            hint = f"did you mean {shown(guess)}? " if guess else ""
            place = f"queries[{index}].category" if "category" in question else "category"
            wrong[place] = f"no class has the category {shown(category)}; {hint}known are {known}"
    if wrong:
        raise InvalidRequestError([FieldViolation(place, message) for place, message in wrong.items()])


def _categories(config: Config) -> tuple[str, ...]:
    classes = config.router.prebucket_classes
    own = [category for each in classes for category in (each.name, *each.categories)]
    return (*own, DEFAULT_CLASS) if own else ()


def _question_spec(index: int, question: dict[str, Any], given: dict[str, Any], rules: RequestRules) -> QuestionSpec:
    defaults = {"max_tokens": rules.max_tokens, "timeout_ms": rules.timeout_ms, "stop": rules.prompt_stop}
    merged = {**defaults, **given, **question}
    merged["seed"] = _channel_seed(index, question.get("seed"), given.get("seed"))
    return QuestionSpec(
        sampling=SamplingParams(**{key: merged[key] for key in _SAMPLING_FIELDS if key in merged}),
        **{key: merged[key] for key in _QUESTION_SPEC_FIELDS if key in merged},
    )


def _channel_seed(index: int, own_seed: int | None, request_seed: int | None) -> int:
    if own_seed is not None:
        return own_seed
    if request_seed is not None:
        return (request_seed + index) % (_MAX_SEED + 1)
    return secrets.randbelow(_MAX_SEED + 1)


def _content_digest(questions: list[dict[str, Any]], given: dict[str, Any]) -> str:
    """SHA-256 over what the caller wrote, in one spelling; ids and seeds that Kev made up are not part of it."""
    options = {key: value for key, value in given.items() if key != "request_id"}
    text = json.dumps({"questions": questions, "options": options}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
