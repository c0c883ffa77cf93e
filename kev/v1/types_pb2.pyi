import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IsolationLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ISOLATION_LEVEL_UNSPECIFIED: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_STRICT: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_LOOSE: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_SHARED: _ClassVar[IsolationLevel]

class Strategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STRATEGY_UNSPECIFIED: _ClassVar[Strategy]
    STRATEGY_SEMANTIC_HASH: _ClassVar[Strategy]
    STRATEGY_ROUND_ROBIN: _ClassVar[Strategy]
    STRATEGY_LENGTH_AWARE: _ClassVar[Strategy]
    STRATEGY_CONSISTENT_HASH: _ClassVar[Strategy]
    STRATEGY_PREBUCKET: _ClassVar[Strategy]

class Diversion(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIVERSION_UNSPECIFIED: _ClassVar[Diversion]
    DIVERSION_QUEUE_LENGTH: _ClassVar[Diversion]
    DIVERSION_FULL: _ClassVar[Diversion]
    DIVERSION_AGE: _ClassVar[Diversion]
    DIVERSION_FAILURES: _ClassVar[Diversion]
    DIVERSION_WAITED: _ClassVar[Diversion]
    DIVERSION_SHARE: _ClassVar[Diversion]

class BreakerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_STATE_UNSPECIFIED: _ClassVar[BreakerState]
    BREAKER_STATE_CLOSED: _ClassVar[BreakerState]
    BREAKER_STATE_OPEN: _ClassVar[BreakerState]
    BREAKER_STATE_HALF_OPEN: _ClassVar[BreakerState]

class AggregateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATE_MODE_UNSPECIFIED: _ClassVar[AggregateMode]
    AGGREGATE_MODE_SLOT_MAP: _ClassVar[AggregateMode]
    AGGREGATE_MODE_SEQ_APPEND: _ClassVar[AggregateMode]
    AGGREGATE_MODE_PRIORITY: _ClassVar[AggregateMode]

class Truncate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATE_UNSPECIFIED: _ClassVar[Truncate]
    TRUNCATE_NONE: _ClassVar[Truncate]
    TRUNCATE_LEFT: _ClassVar[Truncate]
    TRUNCATE_RIGHT: _ClassVar[Truncate]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TIMEOUT_QUEUED: _ClassVar[FinishReason]
    FINISH_REASON_TIMEOUT_RUNNING: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_REJECTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_PENDING: _ClassVar[RequestState]
    REQUEST_STATE_COMPLETE: _ClassVar[RequestState]
    REQUEST_STATE_PARTIAL: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_BITWISE: _ClassVar[Verdict]
    VERDICT_UNVERIFIED: _ClassVar[Verdict]

class StreamEventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_EVENT_TYPE_UNSPECIFIED: _ClassVar[StreamEventType]
    STREAM_EVENT_TYPE_STARTED: _ClassVar[StreamEventType]
    STREAM_EVENT_TYPE_DELTA: _ClassVar[StreamEventType]
    STREAM_EVENT_TYPE_ATTEMPT_CHANGED: _ClassVar[StreamEventType]
    STREAM_EVENT_TYPE_RESULT: _ClassVar[StreamEventType]
    STREAM_EVENT_TYPE_DONE: _ClassVar[StreamEventType]

class HotSpotKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOT_SPOT_KIND_UNSPECIFIED: _ClassVar[HotSpotKind]
    HOT_SPOT_KIND_BUCKET: _ClassVar[HotSpotKind]
    HOT_SPOT_KIND_CHANNEL: _ClassVar[HotSpotKind]

class HeatUnit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEAT_UNIT_UNSPECIFIED: _ClassVar[HeatUnit]
    HEAT_UNIT_QUESTIONS: _ClassVar[HeatUnit]
    HEAT_UNIT_TOKENS: _ClassVar[HeatUnit]
ISOLATION_LEVEL_UNSPECIFIED: IsolationLevel
ISOLATION_LEVEL_STRICT: IsolationLevel
ISOLATION_LEVEL_LOOSE: IsolationLevel
ISOLATION_LEVEL_SHARED: IsolationLevel
STRATEGY_UNSPECIFIED: Strategy
STRATEGY_SEMANTIC_HASH: Strategy
STRATEGY_ROUND_ROBIN: Strategy
STRATEGY_LENGTH_AWARE: Strategy
STRATEGY_CONSISTENT_HASH: Strategy
STRATEGY_PREBUCKET: Strategy
DIVERSION_UNSPECIFIED: Diversion
DIVERSION_QUEUE_LENGTH: Diversion
DIVERSION_FULL: Diversion
DIVERSION_AGE: Diversion
DIVERSION_FAILURES: Diversion
DIVERSION_WAITED: Diversion
DIVERSION_SHARE: Diversion
BREAKER_STATE_UNSPECIFIED: BreakerState
BREAKER_STATE_CLOSED: BreakerState
BREAKER_STATE_OPEN: BreakerState
BREAKER_STATE_HALF_OPEN: BreakerState
AGGREGATE_MODE_UNSPECIFIED: AggregateMode
AGGREGATE_MODE_SLOT_MAP: AggregateMode
AGGREGATE_MODE_SEQ_APPEND: AggregateMode
AGGREGATE_MODE_PRIORITY: AggregateMode
TRUNCATE_UNSPECIFIED: Truncate
TRUNCATE_NONE: Truncate
TRUNCATE_LEFT: Truncate
TRUNCATE_RIGHT: Truncate
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TIMEOUT_QUEUED: FinishReason
FINISH_REASON_TIMEOUT_RUNNING: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_REJECTED: FinishReason
FINISH_REASON_ERROR: FinishReason
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_PENDING: RequestState
REQUEST_STATE_COMPLETE: RequestState
REQUEST_STATE_PARTIAL: RequestState
REQUEST_STATE_FAILED: RequestState
VERDICT_UNSPECIFIED: Verdict
VERDICT_BITWISE: Verdict
VERDICT_UNVERIFIED: Verdict
STREAM_EVENT_TYPE_UNSPECIFIED: StreamEventType
STREAM_EVENT_TYPE_STARTED: StreamEventType
STREAM_EVENT_TYPE_DELTA: StreamEventType
STREAM_EVENT_TYPE_ATTEMPT_CHANGED: StreamEventType
STREAM_EVENT_TYPE_RESULT: StreamEventType
STREAM_EVENT_TYPE_DONE: StreamEventType
HOT_SPOT_KIND_UNSPECIFIED: HotSpotKind
HOT_SPOT_KIND_BUCKET: HotSpotKind
HOT_SPOT_KIND_CHANNEL: HotSpotKind
HEAT_UNIT_UNSPECIFIED: HeatUnit
HEAT_UNIT_QUESTIONS: HeatUnit
HEAT_UNIT_TOKENS: HeatUnit

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("text", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout_duration", "priority", "category", "truncate", "no_stop", "no_stop_token_ids", "no_category")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_DURATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NO_STOP_FIELD_NUMBER: _ClassVar[int]
    NO_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NO_CATEGORY_FIELD_NUMBER: _ClassVar[int]
    text: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    timeout_duration: _duration_pb2.Duration
    priority: int
    category: str
    truncate: Truncate
    no_stop: bool
    no_stop_token_ids: bool
    no_category: bool
    def __init__(self, text: _Optional[str] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., timeout_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., category: _Optional[str] = ..., truncate: _Optional[_Union[Truncate, str]] = ..., no_stop: bool = ..., no_stop_token_ids: bool = ..., no_category: bool = ...) -> None: ...

class QuestionSpec(_message.Message):
    __slots__ = ("text", "sampling", "timeout_duration", "priority", "category", "truncate")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_DURATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    text: str
    sampling: SamplingParams
    timeout_duration: _duration_pb2.Duration
    priority: int
    category: str
    truncate: Truncate
    def __init__(self, text: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., timeout_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., category: _Optional[str] = ..., truncate: _Optional[_Union[Truncate, str]] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("request_id", "questions", "isolation", "strategy", "mode", "max_parallel", "system_prompt", "tenant", "content_digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    questions: _containers.RepeatedCompositeFieldContainer[QuestionSpec]
    isolation: IsolationLevel
    strategy: Strategy
    mode: AggregateMode
    max_parallel: int
    system_prompt: str
    tenant: str
    content_digest: str
    def __init__(self, request_id: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[QuestionSpec, _Mapping]]] = ..., isolation: _Optional[_Union[IsolationLevel, str]] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., mode: _Optional[_Union[AggregateMode, str]] = ..., max_parallel: _Optional[int] = ..., system_prompt: _Optional[str] = ..., tenant: _Optional[str] = ..., content_digest: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("ids", "boundaries", "num_truncated")
    IDS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    num_truncated: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., boundaries: _Optional[_Iterable[int]] = ..., num_truncated: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("channel_id", "strategy", "hash_bucket", "diverted_from", "normalized_text", "removed", "diverted_why")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    HASH_BUCKET_FIELD_NUMBER: _ClassVar[int]
    DIVERTED_FROM_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_TEXT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    DIVERTED_WHY_FIELD_NUMBER: _ClassVar[int]
    channel_id: int
    strategy: Strategy
    hash_bucket: int
    diverted_from: int
    normalized_text: str
    removed: _containers.RepeatedScalarFieldContainer[str]
    diverted_why: Diversion
    def __init__(self, channel_id: _Optional[int] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., hash_bucket: _Optional[int] = ..., diverted_from: _Optional[int] = ..., normalized_text: _Optional[str] = ..., removed: _Optional[_Iterable[str]] = ..., diverted_why: _Optional[_Union[Diversion, str]] = ...) -> None: ...

class WorkItem(_message.Message):
    __slots__ = ("request_id", "question_index", "channel_id", "prompt", "num_shared", "sampling", "isolation", "max_parallel", "time_budget", "priority", "tenant", "fingerprint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TIME_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    question_index: int
    channel_id: int
    prompt: Prompt
    num_shared: int
    sampling: SamplingParams
    isolation: IsolationLevel
    max_parallel: int
    time_budget: _duration_pb2.Duration
    priority: int
    tenant: str
    fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., question_index: _Optional[int] = ..., channel_id: _Optional[int] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., num_shared: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., isolation: _Optional[_Union[IsolationLevel, str]] = ..., max_parallel: _Optional[int] = ..., time_budget: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("level", "verdict", "mask_digest", "fingerprint")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    MASK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    level: IsolationLevel
    verdict: Verdict
    mask_digest: str
    fingerprint: str
    def __init__(self, level: _Optional[_Union[IsolationLevel, str]] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., mask_digest: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ChannelStarted(_message.Message):
    __slots__ = ("request_id", "question_index", "channel_id", "slot", "attempt", "node_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    question_index: int
    channel_id: int
    slot: int
    attempt: int
    node_id: str
    def __init__(self, request_id: _Optional[str] = ..., question_index: _Optional[int] = ..., channel_id: _Optional[int] = ..., slot: _Optional[int] = ..., attempt: _Optional[int] = ..., node_id: _Optional[str] = ...) -> None: ...

class ChannelDelta(_message.Message):
    __slots__ = ("request_id", "question_index", "channel_id", "attempt", "seq", "text", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    question_index: int
    channel_id: int
    attempt: int
    seq: int
    text: str
    num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., question_index: _Optional[int] = ..., channel_id: _Optional[int] = ..., attempt: _Optional[int] = ..., seq: _Optional[int] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ChannelResult(_message.Message):
    __slots__ = ("request_id", "question_index", "channel_id", "finish_reason", "slot", "text", "token_ids", "num_prompt_tokens", "num_truncated", "num_cached_tokens", "queued_duration", "first_token_duration", "start_time", "finish_time", "attempt", "node_id", "receipt", "error", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_DURATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_DURATION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISH_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    question_index: int
    channel_id: int
    finish_reason: FinishReason
    slot: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_truncated: int
    num_cached_tokens: int
    queued_duration: _duration_pb2.Duration
    first_token_duration: _duration_pb2.Duration
    start_time: _timestamp_pb2.Timestamp
    finish_time: _timestamp_pb2.Timestamp
    attempt: int
    node_id: str
    receipt: Receipt
    error: ErrorInfo
    logprobs: Logprobs
    def __init__(self, request_id: _Optional[str] = ..., question_index: _Optional[int] = ..., channel_id: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., slot: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_truncated: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queued_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., node_id: _Optional[str] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., error: _Optional[_Union[ErrorInfo, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class ChannelEvent(_message.Message):
    __slots__ = ("started", "delta", "result")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    started: ChannelStarted
    delta: ChannelDelta
    result: ChannelResult
    def __init__(self, started: _Optional[_Union[ChannelStarted, _Mapping]] = ..., delta: _Optional[_Union[ChannelDelta, _Mapping]] = ..., result: _Optional[_Union[ChannelResult, _Mapping]] = ...) -> None: ...

class QuestionRecord(_message.Message):
    __slots__ = ("question_index", "route", "timeout_duration", "priority", "num_prompt_tokens", "num_truncated")
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_DURATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    question_index: int
    route: Route
    timeout_duration: _duration_pb2.Duration
    priority: int
    num_prompt_tokens: int
    num_truncated: int
    def __init__(self, question_index: _Optional[int] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., timeout_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_truncated: _Optional[int] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "content_digest", "mode", "isolation", "questions", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    content_digest: str
    mode: AggregateMode
    isolation: IsolationLevel
    questions: _containers.RepeatedCompositeFieldContainer[QuestionRecord]
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., content_digest: _Optional[str] = ..., mode: _Optional[_Union[AggregateMode, str]] = ..., isolation: _Optional[_Union[IsolationLevel, str]] = ..., questions: _Optional[_Iterable[_Union[QuestionRecord, _Mapping]]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("request_id", "question_index", "channel_id", "slot", "text", "finish_reason", "tokens", "prompt_tokens", "elapsed_duration", "queued_duration", "first_token_duration", "start_time", "finish_time", "hash_bucket", "strategy", "attempt", "node_id", "isolation", "error", "logprobs", "token_ids", "num_truncated", "num_cached_tokens", "diverted_from", "removed", "priority", "diverted_why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_DURATION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_DURATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_DURATION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISH_TIME_FIELD_NUMBER: _ClassVar[int]
    HASH_BUCKET_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIVERTED_FROM_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DIVERTED_WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    question_index: int
    channel_id: int
    slot: int
    text: str
    finish_reason: FinishReason
    tokens: int
    prompt_tokens: int
    elapsed_duration: _duration_pb2.Duration
    queued_duration: _duration_pb2.Duration
    first_token_duration: _duration_pb2.Duration
    start_time: _timestamp_pb2.Timestamp
    finish_time: _timestamp_pb2.Timestamp
    hash_bucket: int
    strategy: Strategy
    attempt: int
    node_id: str
    isolation: Receipt
    error: ErrorInfo
    logprobs: Logprobs
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_truncated: int
    num_cached_tokens: int
    diverted_from: int
    removed: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    diverted_why: Diversion
    def __init__(self, request_id: _Optional[str] = ..., question_index: _Optional[int] = ..., channel_id: _Optional[int] = ..., slot: _Optional[int] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., elapsed_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queued_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., hash_bucket: _Optional[int] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., attempt: _Optional[int] = ..., node_id: _Optional[str] = ..., isolation: _Optional[_Union[Receipt, _Mapping]] = ..., error: _Optional[_Union[ErrorInfo, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_truncated: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., diverted_from: _Optional[int] = ..., removed: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., diverted_why: _Optional[_Union[Diversion, str]] = ...) -> None: ...

class StreamEvent(_message.Message):
    __slots__ = ("type", "request_id", "event_index", "question_index", "channel_id", "text", "result", "state")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    QUESTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    type: StreamEventType
    request_id: str
    event_index: int
    question_index: int
    channel_id: int
    text: str
    result: Result
    state: RequestState
    def __init__(self, type: _Optional[_Union[StreamEventType, str]] = ..., request_id: _Optional[str] = ..., event_index: _Optional[int] = ..., question_index: _Optional[int] = ..., channel_id: _Optional[int] = ..., text: _Optional[str] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., state: _Optional[_Union[RequestState, str]] = ...) -> None: ...

class RequestView(_message.Message):
    __slots__ = ("request_id", "state", "mode", "num_questions", "results")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    mode: AggregateMode
    num_questions: int
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., mode: _Optional[_Union[AggregateMode, str]] = ..., num_questions: _Optional[int] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("node_id", "num_running", "num_waiting", "max_slots", "num_steps", "num_prompt_tokens", "num_completion_tokens", "kv_bytes_used", "kv_bytes_total", "num_prefixes", "alive", "num_replayed", "num_violations", "num_restarts", "num_skipped_replays")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    NUM_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    num_running: int
    num_waiting: int
    max_slots: int
    num_steps: int
    num_prompt_tokens: int
    num_completion_tokens: int
    kv_bytes_used: int
    kv_bytes_total: int
    num_prefixes: int
    alive: bool
    num_replayed: int
    num_violations: int
    num_restarts: int
    num_skipped_replays: int
    def __init__(self, node_id: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_slots: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., kv_bytes_used: _Optional[int] = ..., kv_bytes_total: _Optional[int] = ..., num_prefixes: _Optional[int] = ..., alive: bool = ..., num_replayed: _Optional[int] = ..., num_violations: _Optional[int] = ..., num_restarts: _Optional[int] = ..., num_skipped_replays: _Optional[int] = ...) -> None: ...

class LevelVerdict(_message.Message):
    __slots__ = ("level", "verdict")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    level: IsolationLevel
    verdict: Verdict
    def __init__(self, level: _Optional[_Union[IsolationLevel, str]] = ..., verdict: _Optional[_Union[Verdict, str]] = ...) -> None: ...

class IsolationReport(_message.Message):
    __slots__ = ("levels", "backend", "precision", "num_threads", "decode_rows", "prefill_rows", "row_independent", "position_independent", "fingerprint", "reason", "prefix_independent", "probe_cache_time")
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_INDEPENDENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_INDEPENDENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFIX_INDEPENDENT_FIELD_NUMBER: _ClassVar[int]
    PROBE_CACHE_TIME_FIELD_NUMBER: _ClassVar[int]
    levels: _containers.RepeatedCompositeFieldContainer[LevelVerdict]
    backend: str
    precision: str
    num_threads: int
    decode_rows: int
    prefill_rows: int
    row_independent: bool
    position_independent: bool
    fingerprint: str
    reason: str
    prefix_independent: bool
    probe_cache_time: _timestamp_pb2.Timestamp
    def __init__(self, levels: _Optional[_Iterable[_Union[LevelVerdict, _Mapping]]] = ..., backend: _Optional[str] = ..., precision: _Optional[str] = ..., num_threads: _Optional[int] = ..., decode_rows: _Optional[int] = ..., prefill_rows: _Optional[int] = ..., row_independent: bool = ..., position_independent: bool = ..., fingerprint: _Optional[str] = ..., reason: _Optional[str] = ..., prefix_independent: bool = ..., probe_cache_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RequestRules(_message.Message):
    __slots__ = ("max_queries_per_request", "max_question_bytes", "max_system_prompt_bytes", "max_context", "max_parallel_queries", "vocab_size", "isolation", "strategy", "mode", "max_tokens", "timeout_duration", "prompt_stop", "categories", "takes_any_category")
    MAX_QUERIES_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAX_QUESTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SYSTEM_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_QUERIES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_DURATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STOP_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    TAKES_ANY_CATEGORY_FIELD_NUMBER: _ClassVar[int]
    max_queries_per_request: int
    max_question_bytes: int
    max_system_prompt_bytes: int
    max_context: int
    max_parallel_queries: int
    vocab_size: int
    isolation: IsolationLevel
    strategy: Strategy
    mode: AggregateMode
    max_tokens: int
    timeout_duration: _duration_pb2.Duration
    prompt_stop: _containers.RepeatedScalarFieldContainer[str]
    categories: _containers.RepeatedScalarFieldContainer[str]
    takes_any_category: bool
    def __init__(self, max_queries_per_request: _Optional[int] = ..., max_question_bytes: _Optional[int] = ..., max_system_prompt_bytes: _Optional[int] = ..., max_context: _Optional[int] = ..., max_parallel_queries: _Optional[int] = ..., vocab_size: _Optional[int] = ..., isolation: _Optional[_Union[IsolationLevel, str]] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., mode: _Optional[_Union[AggregateMode, str]] = ..., max_tokens: _Optional[int] = ..., timeout_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_stop: _Optional[_Iterable[str]] = ..., categories: _Optional[_Iterable[str]] = ..., takes_any_category: bool = ...) -> None: ...

class ChannelSnapshot(_message.Message):
    __slots__ = ("channel_id", "num_queued", "num_total", "num_diverted", "breaker_open", "breaker", "breaker_why", "num_bytes", "oldest_duration", "num_recent", "num_recent_failures", "main_failure", "num_recent_tokens")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DIVERTED_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPEN_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    BREAKER_WHY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_DURATION_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    MAIN_FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    channel_id: int
    num_queued: int
    num_total: int
    num_diverted: int
    breaker_open: bool
    breaker: BreakerState
    breaker_why: Diversion
    num_bytes: int
    oldest_duration: _duration_pb2.Duration
    num_recent: int
    num_recent_failures: int
    main_failure: str
    num_recent_tokens: int
    def __init__(self, channel_id: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_total: _Optional[int] = ..., num_diverted: _Optional[int] = ..., breaker_open: bool = ..., breaker: _Optional[_Union[BreakerState, str]] = ..., breaker_why: _Optional[_Union[Diversion, str]] = ..., num_bytes: _Optional[int] = ..., oldest_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_recent: _Optional[int] = ..., num_recent_failures: _Optional[int] = ..., main_failure: _Optional[str] = ..., num_recent_tokens: _Optional[int] = ...) -> None: ...

class HotSpot(_message.Message):
    __slots__ = ("kind", "channel_id", "num_questions", "share", "remedy", "strategy", "hash_bucket", "num_tokens", "token_share", "hot_by")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    HASH_BUCKET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SHARE_FIELD_NUMBER: _ClassVar[int]
    HOT_BY_FIELD_NUMBER: _ClassVar[int]
    kind: HotSpotKind
    channel_id: int
    num_questions: int
    share: float
    remedy: str
    strategy: Strategy
    hash_bucket: int
    num_tokens: int
    token_share: float
    hot_by: HeatUnit
    def __init__(self, kind: _Optional[_Union[HotSpotKind, str]] = ..., channel_id: _Optional[int] = ..., num_questions: _Optional[int] = ..., share: _Optional[float] = ..., remedy: _Optional[str] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., hash_bucket: _Optional[int] = ..., num_tokens: _Optional[int] = ..., token_share: _Optional[float] = ..., hot_by: _Optional[_Union[HeatUnit, str]] = ...) -> None: ...

class BucketHeat(_message.Message):
    __slots__ = ("strategy", "hash_bucket", "num_questions", "num_tokens")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    HASH_BUCKET_FIELD_NUMBER: _ClassVar[int]
    NUM_QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    strategy: Strategy
    hash_bucket: int
    num_questions: int
    num_tokens: int
    def __init__(self, strategy: _Optional[_Union[Strategy, str]] = ..., hash_bucket: _Optional[int] = ..., num_questions: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class BucketCount(_message.Message):
    __slots__ = ("hash_bucket", "num_questions")
    HASH_BUCKET_FIELD_NUMBER: _ClassVar[int]
    NUM_QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    hash_bucket: int
    num_questions: int
    def __init__(self, hash_bucket: _Optional[int] = ..., num_questions: _Optional[int] = ...) -> None: ...

class RouterStats(_message.Message):
    __slots__ = ("num_requests", "num_questions", "num_rejected", "num_overflow", "num_removed_chars", "buckets", "window", "num_recent", "bucket_heat", "hot_spots", "releases_per_s", "num_saved_tokens", "num_recent_tokens")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOVED_CHARS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_FIELD_NUMBER: _ClassVar[int]
    BUCKET_HEAT_FIELD_NUMBER: _ClassVar[int]
    HOT_SPOTS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_questions: int
    num_rejected: int
    num_overflow: int
    num_removed_chars: int
    buckets: _containers.RepeatedCompositeFieldContainer[BucketCount]
    window: _duration_pb2.Duration
    num_recent: int
    bucket_heat: _containers.RepeatedCompositeFieldContainer[BucketHeat]
    hot_spots: _containers.RepeatedCompositeFieldContainer[HotSpot]
    releases_per_s: float
    num_saved_tokens: int
    num_recent_tokens: int
    def __init__(self, num_requests: _Optional[int] = ..., num_questions: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_overflow: _Optional[int] = ..., num_removed_chars: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketCount, _Mapping]]] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_recent: _Optional[int] = ..., bucket_heat: _Optional[_Iterable[_Union[BucketHeat, _Mapping]]] = ..., hot_spots: _Optional[_Iterable[_Union[HotSpot, _Mapping]]] = ..., releases_per_s: _Optional[float] = ..., num_saved_tokens: _Optional[int] = ..., num_recent_tokens: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("version", "type", "payload", "trace", "minor_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    MINOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    type: str
    payload: bytes
    trace: str
    minor_version: int
    def __init__(self, version: _Optional[int] = ..., type: _Optional[str] = ..., payload: _Optional[bytes] = ..., trace: _Optional[str] = ..., minor_version: _Optional[int] = ...) -> None: ...
