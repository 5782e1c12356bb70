from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_FAILURE_UNSPECIFIED: _ClassVar[PeerFailure]
    PEER_FAILURE_SLOW: _ClassVar[PeerFailure]
    PEER_FAILURE_WRONG: _ClassVar[PeerFailure]

class WeightsKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_KIND_UNSPECIFIED: _ClassVar[WeightsKind]
    WEIGHTS_KIND_FULL: _ClassVar[WeightsKind]
    WEIGHTS_KIND_DELTA: _ClassVar[WeightsKind]
    WEIGHTS_KIND_LORA: _ClassVar[WeightsKind]
PEER_FAILURE_UNSPECIFIED: PeerFailure
PEER_FAILURE_SLOW: PeerFailure
PEER_FAILURE_WRONG: PeerFailure
WEIGHTS_KIND_UNSPECIFIED: WeightsKind
WEIGHTS_KIND_FULL: WeightsKind
WEIGHTS_KIND_DELTA: WeightsKind
WEIGHTS_KIND_LORA: WeightsKind

class JoinEngineRequest(_message.Message):
    __slots__ = ("hello", "status", "gate", "loaded", "refused")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    status: EngineStatus
    gate: GateCall
    loaded: WeightsLoaded
    refused: WeightsRefused
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., status: _Optional[_Union[EngineStatus, _Mapping]] = ..., gate: _Optional[_Union[GateCall, _Mapping]] = ..., loaded: _Optional[_Union[WeightsLoaded, _Mapping]] = ..., refused: _Optional[_Union[WeightsRefused, _Mapping]] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("training_run", "engine_id", "base_url", "requires_token", "policy_version", "sha256", "peer_target", "peer_key")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PEER_TARGET_FIELD_NUMBER: _ClassVar[int]
    PEER_KEY_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    engine_id: str
    base_url: str
    requires_token: bool
    policy_version: int
    sha256: str
    peer_target: str
    peer_key: str
    def __init__(self, training_run: _Optional[str] = ..., engine_id: _Optional[str] = ..., base_url: _Optional[str] = ..., requires_token: bool = ..., policy_version: _Optional[int] = ..., sha256: _Optional[str] = ..., peer_target: _Optional[str] = ..., peer_key: _Optional[str] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("healthy", "sampled_token_count")
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    healthy: bool
    sampled_token_count: int
    def __init__(self, healthy: bool = ..., sampled_token_count: _Optional[int] = ...) -> None: ...

class GateCall(_message.Message):
    __slots__ = ("order", "hold", "idle", "promote", "release")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    order: int
    hold: _duration_pb2.Duration
    idle: _duration_pb2.Duration
    promote: _empty_pb2.Empty
    release: _empty_pb2.Empty
    def __init__(self, order: _Optional[int] = ..., hold: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., idle: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., promote: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., release: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ...) -> None: ...

class WeightsLoaded(_message.Message):
    __slots__ = ("order", "sha256", "pause", "fetched_bytes", "peer_bytes", "peer_failure")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_FAILURE_FIELD_NUMBER: _ClassVar[int]
    order: int
    sha256: str
    pause: _duration_pb2.Duration
    fetched_bytes: int
    peer_bytes: int
    peer_failure: PeerFailure
    def __init__(self, order: _Optional[int] = ..., sha256: _Optional[str] = ..., pause: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., fetched_bytes: _Optional[int] = ..., peer_bytes: _Optional[int] = ..., peer_failure: _Optional[_Union[PeerFailure, str]] = ...) -> None: ...

class WeightsRefused(_message.Message):
    __slots__ = ("order", "reason")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    order: int
    reason: str
    def __init__(self, order: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class JoinEngineResponse(_message.Message):
    __slots__ = ("load", "gate_done")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GATE_DONE_FIELD_NUMBER: _ClassVar[int]
    load: LoadWeights
    gate_done: GateDone
    def __init__(self, load: _Optional[_Union[LoadWeights, _Mapping]] = ..., gate_done: _Optional[_Union[GateDone, _Mapping]] = ...) -> None: ...

class LoadWeights(_message.Message):
    __slots__ = ("order", "policy_version", "kind", "sha256", "base_version", "base_sha256", "adapters", "engine_json", "peer")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_SHA256_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JSON_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    order: int
    policy_version: str
    kind: WeightsKind
    sha256: str
    base_version: int
    base_sha256: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    engine_json: str
    peer: Peer
    def __init__(self, order: _Optional[int] = ..., policy_version: _Optional[str] = ..., kind: _Optional[_Union[WeightsKind, str]] = ..., sha256: _Optional[str] = ..., base_version: _Optional[int] = ..., base_sha256: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., engine_json: _Optional[str] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("target", "key", "patience")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    target: str
    key: str
    patience: _duration_pb2.Duration
    def __init__(self, target: _Optional[str] = ..., key: _Optional[str] = ..., patience: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GateDone(_message.Message):
    __slots__ = ("order", "idle")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    order: int
    idle: bool
    def __init__(self, order: _Optional[int] = ..., idle: bool = ...) -> None: ...
