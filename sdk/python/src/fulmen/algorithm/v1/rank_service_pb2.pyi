from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRanksRequest(_message.Message):
    __slots__ = ("hello", "seen", "status", "ended")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    hello: RanksHello
    seen: FoldersSeen
    status: RanksStatus
    ended: RankEnded
    def __init__(self, hello: _Optional[_Union[RanksHello, _Mapping]] = ..., seen: _Optional[_Union[FoldersSeen, _Mapping]] = ..., status: _Optional[_Union[RanksStatus, _Mapping]] = ..., ended: _Optional[_Union[RankEnded, _Mapping]] = ...) -> None: ...

class RanksHello(_message.Message):
    __slots__ = ("training_run", "node", "ranks", "gpus", "cpus", "memory_bytes", "build")
    class BuildEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    node: str
    ranks: int
    gpus: int
    cpus: int
    memory_bytes: int
    build: _containers.ScalarMap[str, str]
    def __init__(self, training_run: _Optional[str] = ..., node: _Optional[str] = ..., ranks: _Optional[int] = ..., gpus: _Optional[int] = ..., cpus: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., build: _Optional[_Mapping[str, str]] = ...) -> None: ...

class FoldersSeen(_message.Message):
    __slots__ = ("unseen",)
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    unseen: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unseen: _Optional[_Iterable[str]] = ...) -> None: ...

class RanksStatus(_message.Message):
    __slots__ = ("order", "running")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    order: int
    running: int
    def __init__(self, order: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class RankEnded(_message.Message):
    __slots__ = ("order", "status")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    order: int
    status: int
    def __init__(self, order: _Optional[int] = ..., status: _Optional[int] = ...) -> None: ...

class JoinRanksResponse(_message.Message):
    __slots__ = ("look", "start", "end")
    LOOK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    look: LookAtFolders
    start: StartRanks
    end: EndRanks
    def __init__(self, look: _Optional[_Union[LookAtFolders, _Mapping]] = ..., start: _Optional[_Union[StartRanks, _Mapping]] = ..., end: _Optional[_Union[EndRanks, _Mapping]] = ...) -> None: ...

class LookAtFolders(_message.Message):
    __slots__ = ("folders", "status_interval")
    class FoldersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FOLDERS_FIELD_NUMBER: _ClassVar[int]
    STATUS_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    folders: _containers.ScalarMap[str, str]
    status_interval: _duration_pb2.Duration
    def __init__(self, folders: _Optional[_Mapping[str, str]] = ..., status_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StartRanks(_message.Message):
    __slots__ = ("order", "count", "ticket")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    order: int
    count: int
    ticket: str
    def __init__(self, order: _Optional[int] = ..., count: _Optional[int] = ..., ticket: _Optional[str] = ...) -> None: ...

class EndRanks(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: int
    def __init__(self, order: _Optional[int] = ...) -> None: ...
