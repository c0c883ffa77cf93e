import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kev.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _types_pb2.NodeStats
    def __init__(self, node: _Optional[_Union[_types_pb2.NodeStats, _Mapping]] = ...) -> None: ...

class GetIsolationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetIsolationResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _types_pb2.IsolationReport
    def __init__(self, report: _Optional[_Union[_types_pb2.IsolationReport, _Mapping]] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("grace_duration",)
    GRACE_DURATION_FIELD_NUMBER: _ClassVar[int]
    grace_duration: _duration_pb2.Duration
    def __init__(self, grace_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...
