from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunLeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_LEASE_STATE_UNSPECIFIED: _ClassVar[RunLeaseState]
    RUN_LEASE_STATE_IDLE: _ClassVar[RunLeaseState]
    RUN_LEASE_STATE_WAITING: _ClassVar[RunLeaseState]
    RUN_LEASE_STATE_RUNNING: _ClassVar[RunLeaseState]
RUN_LEASE_STATE_UNSPECIFIED: RunLeaseState
RUN_LEASE_STATE_IDLE: RunLeaseState
RUN_LEASE_STATE_WAITING: RunLeaseState
RUN_LEASE_STATE_RUNNING: RunLeaseState

class RunFence(_message.Message):
    __slots__ = ("training_run", "epoch")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    epoch: int
    def __init__(self, training_run: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RunLease(_message.Message):
    __slots__ = ("training_run", "policy", "state", "owner", "owner_address", "epoch", "held", "expire_time", "record", "update_time", "storage")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    policy: str
    state: RunLeaseState
    owner: str
    owner_address: str
    epoch: int
    held: bool
    expire_time: _timestamp_pb2.Timestamp
    record: bytes
    update_time: _timestamp_pb2.Timestamp
    storage: str
    def __init__(self, training_run: _Optional[str] = ..., policy: _Optional[str] = ..., state: _Optional[_Union[RunLeaseState, str]] = ..., owner: _Optional[str] = ..., owner_address: _Optional[str] = ..., epoch: _Optional[int] = ..., held: bool = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., record: _Optional[bytes] = ..., update_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., storage: _Optional[str] = ...) -> None: ...

class CreateRunLeaseRequest(_message.Message):
    __slots__ = ("training_run", "policy", "record", "request_id", "storage", "next_stages")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_STAGES_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    policy: str
    record: bytes
    request_id: str
    storage: str
    next_stages: _containers.RepeatedCompositeFieldContainer[NextStage]
    def __init__(self, training_run: _Optional[str] = ..., policy: _Optional[str] = ..., record: _Optional[bytes] = ..., request_id: _Optional[str] = ..., storage: _Optional[str] = ..., next_stages: _Optional[_Iterable[_Union[NextStage, _Mapping]]] = ...) -> None: ...

class NextStage(_message.Message):
    __slots__ = ("training_run", "policy", "record")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    policy: str
    record: bytes
    def __init__(self, training_run: _Optional[str] = ..., policy: _Optional[str] = ..., record: _Optional[bytes] = ...) -> None: ...

class CreateRunLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: RunLease
    def __init__(self, lease: _Optional[_Union[RunLease, _Mapping]] = ...) -> None: ...

class AcquireRunLeaseRequest(_message.Message):
    __slots__ = ("training_run", "owner", "owner_address", "ttl", "after_epoch", "storage", "for_change")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    AFTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    FOR_CHANGE_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    owner: str
    owner_address: str
    ttl: _duration_pb2.Duration
    after_epoch: int
    storage: str
    for_change: bool
    def __init__(self, training_run: _Optional[str] = ..., owner: _Optional[str] = ..., owner_address: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., after_epoch: _Optional[int] = ..., storage: _Optional[str] = ..., for_change: bool = ...) -> None: ...

class AcquireRunLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: RunLease
    def __init__(self, lease: _Optional[_Union[RunLease, _Mapping]] = ...) -> None: ...

class RenewRunLeasesRequest(_message.Message):
    __slots__ = ("owner", "owner_address", "ttl", "leases")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    owner: str
    owner_address: str
    ttl: _duration_pb2.Duration
    leases: _containers.RepeatedCompositeFieldContainer[RenewedLease]
    def __init__(self, owner: _Optional[str] = ..., owner_address: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[RenewedLease, _Mapping]]] = ...) -> None: ...

class RenewedLease(_message.Message):
    __slots__ = ("training_run", "epoch", "record")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    epoch: int
    record: bytes
    def __init__(self, training_run: _Optional[str] = ..., epoch: _Optional[int] = ..., record: _Optional[bytes] = ...) -> None: ...

class RenewRunLeasesResponse(_message.Message):
    __slots__ = ("lost_training_runs",)
    LOST_TRAINING_RUNS_FIELD_NUMBER: _ClassVar[int]
    lost_training_runs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost_training_runs: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRunLeaseRequest(_message.Message):
    __slots__ = ("training_run", "epoch", "state", "record")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    epoch: int
    state: RunLeaseState
    record: bytes
    def __init__(self, training_run: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[RunLeaseState, str]] = ..., record: _Optional[bytes] = ...) -> None: ...

class ReleaseRunLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunLeasesRequest(_message.Message):
    __slots__ = ("project", "update_after_time", "unowned_for", "without_records", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_AFTER_TIME_FIELD_NUMBER: _ClassVar[int]
    UNOWNED_FOR_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_RECORDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    update_after_time: _timestamp_pb2.Timestamp
    unowned_for: _duration_pb2.Duration
    without_records: bool
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., update_after_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., unowned_for: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., without_records: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRunLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token", "store_time")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STORE_TIME_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[RunLease]
    next_page_token: str
    store_time: _timestamp_pb2.Timestamp
    def __init__(self, leases: _Optional[_Iterable[_Union[RunLease, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., store_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
