import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kev.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetResultRequest(_message.Message):
    __slots__ = ("request_id", "result_offset")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    result_offset: int
    def __init__(self, request_id: _Optional[str] = ..., result_offset: _Optional[int] = ...) -> None: ...

class GetResultResponse(_message.Message):
    __slots__ = ("view", "next_result_offset")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    NEXT_RESULT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.RequestView
    next_result_offset: int
    def __init__(self, view: _Optional[_Union[_types_pb2.RequestView, _Mapping]] = ..., next_result_offset: _Optional[int] = ...) -> None: ...

class WaitResultRequest(_message.Message):
    __slots__ = ("request_id", "wait_duration")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    wait_duration: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WaitResultResponse(_message.Message):
    __slots__ = ("view", "next_result_offset")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    NEXT_RESULT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.RequestView
    next_result_offset: int
    def __init__(self, view: _Optional[_Union[_types_pb2.RequestView, _Mapping]] = ..., next_result_offset: _Optional[int] = ...) -> None: ...

class StreamResultsRequest(_message.Message):
    __slots__ = ("request_id", "from_event_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_EVENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    from_event_index: int
    def __init__(self, request_id: _Optional[str] = ..., from_event_index: _Optional[int] = ...) -> None: ...

class StreamResultsResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.StreamEvent
    def __init__(self, event: _Optional[_Union[_types_pb2.StreamEvent, _Mapping]] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ("num_cancelled",)
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    num_cancelled: int
    def __init__(self, num_cancelled: _Optional[int] = ...) -> None: ...
