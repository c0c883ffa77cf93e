import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kev.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Query(_message.Message):
    __slots__ = ("request_id", "questions", "isolation", "strategy", "mode", "max_parallel", "system_prompt", "tenant", "timeout_duration", "defaults")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_DURATION_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    questions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Question]
    isolation: _types_pb2.IsolationLevel
    strategy: _types_pb2.Strategy
    mode: _types_pb2.AggregateMode
    max_parallel: int
    system_prompt: str
    tenant: str
    timeout_duration: _duration_pb2.Duration
    defaults: _types_pb2.Question
    def __init__(self, request_id: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[_types_pb2.Question, _Mapping]]] = ..., isolation: _Optional[_Union[_types_pb2.IsolationLevel, str]] = ..., strategy: _Optional[_Union[_types_pb2.Strategy, str]] = ..., mode: _Optional[_Union[_types_pb2.AggregateMode, str]] = ..., max_parallel: _Optional[int] = ..., system_prompt: _Optional[str] = ..., tenant: _Optional[str] = ..., timeout_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., defaults: _Optional[_Union[_types_pb2.Question, _Mapping]] = ...) -> None: ...

class SubmitQueryRequest(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: Query
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ...) -> None: ...

class SubmitQueryResponse(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AskQueryRequest(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: Query
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ...) -> None: ...

class AskQueryResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.StreamEvent
    def __init__(self, event: _Optional[_Union[_types_pb2.StreamEvent, _Mapping]] = ...) -> None: ...

class GetChannelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetChannelsResponse(_message.Message):
    __slots__ = ("channels",)
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    channels: _containers.RepeatedCompositeFieldContainer[_types_pb2.ChannelSnapshot]
    def __init__(self, channels: _Optional[_Iterable[_Union[_types_pb2.ChannelSnapshot, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("router", "nodes")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    router: _types_pb2.RouterStats
    nodes: _containers.RepeatedCompositeFieldContainer[_types_pb2.NodeStats]
    def __init__(self, router: _Optional[_Union[_types_pb2.RouterStats, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[_types_pb2.NodeStats, _Mapping]]] = ...) -> None: ...

class GetIsolationReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetIsolationReportResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _types_pb2.IsolationReport
    def __init__(self, report: _Optional[_Union[_types_pb2.IsolationReport, _Mapping]] = ...) -> None: ...

class GetRulesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRulesResponse(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _types_pb2.RequestRules
    def __init__(self, rules: _Optional[_Union[_types_pb2.RequestRules, _Mapping]] = ...) -> None: ...
