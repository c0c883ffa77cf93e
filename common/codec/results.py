"""What happens to a question, from the node to the caller, as protobuf.

Invariants and semantics: see the package. "Never ran" (slot -1) and "not asked for" (logprobs ``None``) are absent
fields on the wire.

Not here: requests (``common.codec.requests``).
"""

from __future__ import annotations

from common.codec.wire import (
    DIVERSION,
    EVENT_TYPE,
    FINISH_REASON,
    LEVEL,
    MODE,
    STATE,
    STRATEGY,
    VERDICT,
    optional,
    require,
    require_request_id,
    to_duration,
    to_maybe_duration,
    to_maybe_timestamp,
    to_ms,
    to_time_s,
    to_timestamp,
    to_whole_ms,
)
from common.errors import InvalidRequestError
from common.types import (
    ChannelDelta,
    ChannelEvent,
    ChannelResult,
    ChannelStarted,
    ErrorInfo,
    Receipt,
    RequestView,
    Result,
    StreamEvent,
    TokenLogprob,
)
from kev.v1 import types_pb2 as pb

_NO_SLOT = -1
_FIRST_ATTEMPT = 1


def encode_error(value: ErrorInfo) -> pb.ErrorInfo:
    """The wire form of an error."""
    return pb.ErrorInfo(reason=value.reason, message=value.message)


def decode_error(message: pb.ErrorInfo) -> ErrorInfo:
    """An error as data."""
    return ErrorInfo(reason=message.reason, message=message.message)


def _encode_logprobs(value: tuple[TokenLogprob, ...]) -> pb.Logprobs:
    return pb.Logprobs(
        tokens=[
            pb.TokenLogprob(
                token_id=token.token_id,
                logprob=token.logprob,
                top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
            )
            for token in value
        ]
    )


def _decode_logprobs(message: pb.Logprobs) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob,
            top=tuple((top.token_id, top.logprob) for top in token.top),
        )
        for token in message.tokens
    )


def _encode_receipt(value: Receipt) -> pb.Receipt:
    return pb.Receipt(
        level=LEVEL.encode(value.level),
        verdict=VERDICT.encode(value.verdict),
        mask_digest=value.mask_digest,
        fingerprint=value.fingerprint,
    )


def _decode_receipt(message: pb.Receipt, path: str) -> Receipt:
    return Receipt(
        level=LEVEL.decode(message.level, f"{path}.level"),
        verdict=VERDICT.decode(message.verdict, f"{path}.verdict"),
        mask_digest=message.mask_digest,
        fingerprint=message.fingerprint,
    )


def _encode_started(value: ChannelStarted) -> pb.ChannelStarted:
    return pb.ChannelStarted(
        request_id=value.request_id,
        question_index=value.question_index,
        channel_id=value.channel_id,
        slot=value.slot,
        attempt=value.attempt,
        node_id=value.node_id,
    )


def _decode_started(message: pb.ChannelStarted, path: str) -> ChannelStarted:
    return ChannelStarted(
        request_id=require_request_id(message.request_id, path),
        question_index=message.question_index,
        channel_id=message.channel_id,
        slot=message.slot,
        attempt=message.attempt,
        node_id=message.node_id,
    )


def _encode_delta(value: ChannelDelta) -> pb.ChannelDelta:
    return pb.ChannelDelta(
        request_id=value.request_id,
        question_index=value.question_index,
        channel_id=value.channel_id,
        attempt=value.attempt,
        seq=value.seq,
        text=value.text,
        num_tokens=value.num_tokens,
    )


def _decode_delta(message: pb.ChannelDelta, path: str) -> ChannelDelta:
    return ChannelDelta(
        request_id=require_request_id(message.request_id, path),
        question_index=message.question_index,
        channel_id=message.channel_id,
        attempt=message.attempt,
        seq=message.seq,
        text=message.text,
        num_tokens=message.num_tokens,
    )


def _encode_channel_result(value: ChannelResult) -> pb.ChannelResult:
    return pb.ChannelResult(
        request_id=value.request_id,
        question_index=value.question_index,
        channel_id=value.channel_id,
        finish_reason=FINISH_REASON.encode(value.finish_reason),
        slot=None if value.slot == _NO_SLOT else value.slot,
        text=value.text,
        token_ids=value.token_ids,
        num_prompt_tokens=value.num_prompt_tokens,
        num_truncated=value.num_truncated,
        num_cached_tokens=value.num_cached_tokens,
        queued_duration=to_duration(value.queued_ms),
        first_token_duration=to_maybe_duration(value.first_token_ms),
        start_time=to_maybe_timestamp(value.started_at),
        finish_time=to_timestamp(value.finished_at),
        attempt=value.attempt,
        node_id=value.node_id,
        receipt=None if value.receipt is None else _encode_receipt(value.receipt),
        error=None if value.error is None else encode_error(value.error),
        logprobs=None if value.logprobs is None else _encode_logprobs(value.logprobs),
    )


def _decode_channel_result(message: pb.ChannelResult, path: str) -> ChannelResult:
    return ChannelResult(
        request_id=require_request_id(message.request_id, path),
        question_index=message.question_index,
        channel_id=message.channel_id,
        finish_reason=FINISH_REASON.decode(message.finish_reason, f"{path}.finish_reason"),
        slot=message.slot if message.HasField("slot") else _NO_SLOT,
        text=message.text,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_truncated=message.num_truncated,
        num_cached_tokens=message.num_cached_tokens,
        queued_ms=to_ms(message.queued_duration),
        first_token_ms=to_ms(message.first_token_duration) if message.HasField("first_token_duration") else None,
        started_at=to_time_s(message.start_time) if message.HasField("start_time") else None,
        finished_at=to_time_s(message.finish_time),
        attempt=message.attempt if message.HasField("attempt") else _FIRST_ATTEMPT,
        node_id=message.node_id,
        receipt=_decode_receipt(message.receipt, f"{path}.receipt") if message.HasField("receipt") else None,
        error=decode_error(message.error) if message.HasField("error") else None,
        logprobs=_decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
    )


def encode_channel_event(value: ChannelEvent) -> pb.ChannelEvent:
    """The wire form of what a node reports."""
    match value:
        case ChannelStarted():
            return pb.ChannelEvent(started=_encode_started(value))
        case ChannelDelta():
            return pb.ChannelEvent(delta=_encode_delta(value))
        case ChannelResult():
            return pb.ChannelEvent(result=_encode_channel_result(value))


def decode_channel_event(message: pb.ChannelEvent, path: str = "event") -> ChannelEvent:
    """What a node reports.

    Raises:
        InvalidRequestError: an unknown kind of event, or something is missing or not known here.
    """
    match message.WhichOneof("event"):
        case "started":
            return _decode_started(message.started, f"{path}.started")
        case "delta":
            return _decode_delta(message.delta, f"{path}.delta")
        case "result":
            return _decode_channel_result(message.result, f"{path}.result")
    raise InvalidRequestError.of(path, "holds no kind of event that is known here")


def encode_result(value: Result) -> pb.Result:
    """The wire form of an answer with its audit fields."""
    return pb.Result(
        request_id=value.request_id,
        question_index=value.question_index,
        channel_id=value.channel_id,
        slot=None if value.slot == _NO_SLOT else value.slot,
        text=value.text,
        finish_reason=FINISH_REASON.encode(value.finish_reason),
        tokens=value.tokens,
        prompt_tokens=value.prompt_tokens,
        elapsed_duration=to_duration(value.elapsed_ms),
        queued_duration=to_duration(value.queued_ms),
        first_token_duration=to_maybe_duration(value.first_token_ms),
        start_time=to_maybe_timestamp(value.started_at),
        finish_time=to_timestamp(value.finished_at),
        hash_bucket=value.hash_bucket,
        strategy=STRATEGY.encode(value.strategy),
        attempt=value.attempt,
        node_id=value.node_id,
        isolation=_encode_receipt(value.isolation),
        error=None if value.error is None else encode_error(value.error),
        logprobs=None if value.logprobs is None else _encode_logprobs(value.logprobs),
        token_ids=value.token_ids,
        num_truncated=value.num_truncated,
        num_cached_tokens=value.num_cached_tokens,
        diverted_from=value.diverted_from,
        removed=value.removed,
        priority=value.priority,
        diverted_why=DIVERSION.encode_maybe(value.diverted_why),
    )


def decode_result(message: pb.Result, path: str = "result") -> Result:
    """An answer with its audit fields.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    require(message, path, "isolation")
    return Result(
        request_id=require_request_id(message.request_id, path),
        question_index=message.question_index,
        channel_id=message.channel_id,
        slot=message.slot if message.HasField("slot") else _NO_SLOT,
        text=message.text,
        finish_reason=FINISH_REASON.decode(message.finish_reason, f"{path}.finish_reason"),
        tokens=message.tokens,
        prompt_tokens=message.prompt_tokens,
        elapsed_ms=to_whole_ms(message.elapsed_duration),
        queued_ms=to_whole_ms(message.queued_duration),
        first_token_ms=to_whole_ms(message.first_token_duration) if message.HasField("first_token_duration") else None,
        started_at=to_time_s(message.start_time) if message.HasField("start_time") else None,
        finished_at=to_time_s(message.finish_time),
        hash_bucket=message.hash_bucket,
        strategy=STRATEGY.decode(message.strategy, f"{path}.strategy"),
        attempt=message.attempt if message.HasField("attempt") else _FIRST_ATTEMPT,
        node_id=message.node_id,
        isolation=_decode_receipt(message.isolation, f"{path}.isolation"),
        error=decode_error(message.error) if message.HasField("error") else None,
        logprobs=_decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        token_ids=tuple(message.token_ids),
        num_truncated=message.num_truncated,
        num_cached_tokens=message.num_cached_tokens,
        diverted_from=optional(message, "diverted_from"),
        removed=tuple(message.removed),
        priority=message.priority,
        diverted_why=DIVERSION.decode_maybe(message.diverted_why),
    )


def encode_stream_event(value: StreamEvent) -> pb.StreamEvent:
    """The wire form of one event of a request's stream."""
    return pb.StreamEvent(
        type=EVENT_TYPE.encode(value.type),
        request_id=value.request_id,
        event_index=value.event_index,
        question_index=value.question_index,
        channel_id=value.channel_id,
        text=value.text,
        result=None if value.result is None else encode_result(value.result),
        state=None if value.state is None else STATE.encode(value.state),
    )


def decode_stream_event(message: pb.StreamEvent, path: str = "event") -> StreamEvent:
    """One event of a request's stream.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    return StreamEvent(
        type=EVENT_TYPE.decode(message.type, f"{path}.type"),
        request_id=require_request_id(message.request_id, path),
        event_index=message.event_index,
        question_index=optional(message, "question_index"),
        channel_id=optional(message, "channel_id"),
        text=message.text,
        result=decode_result(message.result, f"{path}.result") if message.HasField("result") else None,
        state=STATE.decode(message.state, f"{path}.state") if message.state else None,
    )


def encode_request_view(value: RequestView) -> pb.RequestView:
    """The wire form of a request as it stands."""
    return pb.RequestView(
        request_id=value.request_id,
        state=STATE.encode(value.state),
        mode=MODE.encode(value.mode),
        num_questions=value.num_questions,
        results=[encode_result(result) for result in value.results],
    )


def decode_request_view(message: pb.RequestView, path: str = "view") -> RequestView:
    """A request as it stands.

    Raises:
        InvalidRequestError: something is missing or not known here.
    """
    return RequestView(
        request_id=require_request_id(message.request_id, path),
        state=STATE.decode(message.state, f"{path}.state"),
        mode=MODE.decode(message.mode, f"{path}.mode"),
        num_questions=message.num_questions,
        results=tuple(decode_result(result, f"{path}.results[{i}]") for i, result in enumerate(message.results)),
    )
