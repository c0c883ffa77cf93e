"""Requests and their questions, from the caller to the node, as protobuf.

Invariants and semantics: see the package; a request that was validated once is not validated again.

Not here: outcomes (``common.codec.results``).
"""

from __future__ import annotations

from common.codec.wire import (
    DIVERSION,
    LEVEL,
    MODE,
    STRATEGY,
    TRUNCATE,
    optional,
    require,
    require_request_id,
    to_duration,
    to_maybe_duration,
    to_whole_ms,
)
from common.errors import InvalidRequestError
from common.types import (
    Prompt,
    Question,
    QuestionRecord,
    QuestionSpec,
    RequestRecord,
    RequestSpec,
    Route,
    SamplingParams,
    Truncate,
    WorkItem,
)
from kev.v1 import types_pb2 as pb


def encode_sampling(value: SamplingParams) -> pb.SamplingParams:
    """The wire form of sampling params."""
    return pb.SamplingParams(
        max_tokens=value.max_tokens,
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        min_p=value.min_p,
        seed=value.seed,
        stop=value.stop,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
        min_tokens=value.min_tokens,
        logprobs=value.logprobs,
        repetition_penalty=value.repetition_penalty,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
    )


_DEFAULT_SAMPLING = encode_sampling(SamplingParams())


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Sampling params; a number that the sender did not set takes its default."""
    filled = pb.SamplingParams()
    filled.CopyFrom(_DEFAULT_SAMPLING)
    filled.MergeFrom(message)
    return SamplingParams(
        max_tokens=filled.max_tokens,
        temperature=filled.temperature,
        top_p=filled.top_p,
        top_k=filled.top_k,
        min_p=filled.min_p,
        seed=filled.seed,
        stop=tuple(filled.stop),
        stop_token_ids=tuple(filled.stop_token_ids),
        ignore_eos=filled.ignore_eos,
        min_tokens=filled.min_tokens,
        logprobs=optional(filled, "logprobs"),
        repetition_penalty=filled.repetition_penalty,
        presence_penalty=filled.presence_penalty,
        frequency_penalty=filled.frequency_penalty,
    )


def _truncate(name: str) -> Truncate:
    try:
        return Truncate(name)
    except ValueError:
        raise InvalidRequestError.of("truncate", f"is {name!r}; it must be one of {', '.join(Truncate)}") from None


def encode_question(value: Question) -> pb.Question:
    """The wire form of a question whose fields have their declared types; a single stop is a list of one.

    Raises:
        InvalidRequestError: ``truncate`` is no such name.
    """
    message = pb.Question(
        text=value.text,
        max_tokens=value.max_tokens,
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        min_p=value.min_p,
        seed=value.seed,
        stop=[value.stop] if isinstance(value.stop, str) else value.stop,
        stop_token_ids=value.stop_token_ids,
        min_tokens=value.min_tokens,
        logprobs=value.logprobs,
        repetition_penalty=value.repetition_penalty,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        timeout_duration=to_maybe_duration(value.timeout_ms),
        priority=value.priority,
        category=value.category,
        truncate=None if value.truncate is None else TRUNCATE.encode(_truncate(value.truncate)),
        no_stop=value.stop is not None and not value.stop,
        no_stop_token_ids=value.stop_token_ids is not None and not value.stop_token_ids,
        no_category=value.category == "",
    )
    if value.ignore_eos is not None:
        message.ignore_eos = value.ignore_eos
    return message


def decode_question(message: pb.Question, path: str = "question") -> Question:
    """A question as its caller wrote it, not yet validated.

    Raises:
        InvalidRequestError: an enum value is not known here.
    """
    return Question(
        text=message.text,
        max_tokens=optional(message, "max_tokens"),
        temperature=optional(message, "temperature"),
        top_p=optional(message, "top_p"),
        top_k=optional(message, "top_k"),
        min_p=optional(message, "min_p"),
        seed=optional(message, "seed"),
        stop=tuple(message.stop) or (() if message.no_stop else None),
        stop_token_ids=tuple(message.stop_token_ids) or (() if message.no_stop_token_ids else None),
        ignore_eos=optional(message, "ignore_eos"),
        min_tokens=optional(message, "min_tokens"),
        logprobs=optional(message, "logprobs"),
        repetition_penalty=optional(message, "repetition_penalty"),
        presence_penalty=optional(message, "presence_penalty"),
        frequency_penalty=optional(message, "frequency_penalty"),
        timeout_ms=to_whole_ms(message.timeout_duration) if message.HasField("timeout_duration") else None,
        priority=optional(message, "priority"),
        category=message.category or ("" if message.no_category else None),
        truncate=TRUNCATE.decode(message.truncate, f"{path}.truncate") if message.truncate else None,
    )


def encode_request_spec(value: RequestSpec) -> pb.RequestSpec:
    """The wire form of a validated request."""
    return pb.RequestSpec(
        request_id=value.request_id,
        questions=[
            pb.QuestionSpec(
                text=question.text,
                sampling=encode_sampling(question.sampling),
                timeout_duration=to_duration(question.timeout_ms),
                priority=question.priority,
                category=question.category,
                truncate=TRUNCATE.encode(question.truncate),
            )
            for question in value.questions
        ],
        isolation=LEVEL.encode(value.isolation),
        strategy=STRATEGY.encode(value.strategy),
        mode=MODE.encode(value.mode),
        max_parallel=value.max_parallel,
        system_prompt=value.system_prompt,
        tenant=value.tenant,
        content_digest=value.content_digest,
    )


def _decode_question_spec(message: pb.QuestionSpec, path: str) -> QuestionSpec:
    require(message, path, "sampling", "timeout_duration")
    return QuestionSpec(
        text=message.text,
        sampling=decode_sampling(message.sampling),
        timeout_ms=to_whole_ms(message.timeout_duration),
        priority=message.priority,
        category=message.category,
        truncate=TRUNCATE.decode(message.truncate or pb.TRUNCATE_NONE, f"{path}.truncate"),
    )


def decode_request_spec(message: pb.RequestSpec, path: str = "request") -> RequestSpec:
    """A validated request.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    return RequestSpec(
        request_id=require_request_id(message.request_id, path),
        questions=tuple(_decode_question_spec(q, f"{path}.questions[{i}]") for i, q in enumerate(message.questions)),
        isolation=LEVEL.decode(message.isolation, f"{path}.isolation"),
        strategy=STRATEGY.decode(message.strategy, f"{path}.strategy"),
        mode=MODE.decode(message.mode, f"{path}.mode"),
        max_parallel=message.max_parallel,
        system_prompt=message.system_prompt,
        tenant=message.tenant,
        content_digest=message.content_digest,
    )


def encode_work_item(value: WorkItem) -> pb.WorkItem:
    """The wire form of a work item."""
    return pb.WorkItem(
        request_id=value.request_id,
        question_index=value.question_index,
        channel_id=value.channel_id,
        prompt=pb.Prompt(
            ids=value.prompt.ids, boundaries=value.prompt.boundaries, num_truncated=value.prompt.num_truncated
        ),
        num_shared=value.num_shared,
        sampling=encode_sampling(value.sampling),
        isolation=LEVEL.encode(value.isolation),
        max_parallel=value.max_parallel,
        time_budget=to_duration(value.time_budget_ms),
        priority=value.priority,
        tenant=value.tenant,
        fingerprint=value.fingerprint,
    )


def decode_work_item(message: pb.WorkItem, path: str = "work_item") -> WorkItem:
    """A work item.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    require(message, path, "prompt", "sampling", "time_budget")
    return WorkItem(
        request_id=require_request_id(message.request_id, path),
        question_index=message.question_index,
        channel_id=message.channel_id,
        prompt=Prompt(
            ids=tuple(message.prompt.ids),
            boundaries=tuple(message.prompt.boundaries),
            num_truncated=message.prompt.num_truncated,
        ),
        num_shared=message.num_shared,
        sampling=decode_sampling(message.sampling),
        isolation=LEVEL.decode(message.isolation, f"{path}.isolation"),
        max_parallel=message.max_parallel,
        time_budget_ms=to_whole_ms(message.time_budget),
        priority=message.priority,
        tenant=message.tenant,
        fingerprint=message.fingerprint,
    )


def _encode_route(value: Route) -> pb.Route:
    return pb.Route(
        channel_id=value.channel_id,
        strategy=STRATEGY.encode(value.strategy),
        hash_bucket=value.hash_bucket,
        diverted_from=value.diverted_from,
        normalized_text=value.normalized_text,
        removed=value.removed,
        diverted_why=DIVERSION.encode_maybe(value.diverted_why),
    )


def _decode_route(message: pb.Route, path: str) -> Route:
    return Route(
        channel_id=message.channel_id,
        strategy=STRATEGY.decode(message.strategy, f"{path}.strategy"),
        hash_bucket=message.hash_bucket,
        diverted_from=optional(message, "diverted_from"),
        normalized_text=message.normalized_text,
        removed=tuple(message.removed),
        diverted_why=DIVERSION.decode_maybe(message.diverted_why),
    )


def encode_request_record(value: RequestRecord) -> pb.RequestRecord:
    """The wire form of a registered request."""
    return pb.RequestRecord(
        request_id=value.request_id,
        content_digest=value.content_digest,
        mode=MODE.encode(value.mode),
        isolation=LEVEL.encode(value.isolation),
        questions=[
            pb.QuestionRecord(
                question_index=question.question_index,
                route=_encode_route(question.route),
                timeout_duration=to_duration(question.timeout_ms),
                priority=question.priority,
                num_prompt_tokens=question.num_prompt_tokens,
                num_truncated=question.num_truncated,
            )
            for question in value.questions
        ],
        tenant=value.tenant,
    )


def _decode_question_record(message: pb.QuestionRecord, path: str) -> QuestionRecord:
    require(message, path, "route", "timeout_duration")
    return QuestionRecord(
        question_index=message.question_index,
        route=_decode_route(message.route, f"{path}.route"),
        timeout_ms=to_whole_ms(message.timeout_duration),
        priority=message.priority,
        num_prompt_tokens=message.num_prompt_tokens,
        num_truncated=message.num_truncated,
    )


def decode_request_record(message: pb.RequestRecord, path: str = "record") -> RequestRecord:
    """A registered request.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    return RequestRecord(
        request_id=require_request_id(message.request_id, path),
        content_digest=message.content_digest,
        mode=MODE.decode(message.mode, f"{path}.mode"),
        isolation=LEVEL.decode(message.isolation, f"{path}.isolation"),
        questions=tuple(_decode_question_record(q, f"{path}.questions[{i}]") for i, q in enumerate(message.questions)),
        tenant=message.tenant,
    )
