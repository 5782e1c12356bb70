from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_AGENT_ERROR: _ClassVar[FailureKind]
    FAILURE_KIND_TIMEOUT: _ClassVar[FailureKind]
    FAILURE_KIND_LEASE_LOST: _ClassVar[FailureKind]
    FAILURE_KIND_INFRA: _ClassVar[FailureKind]
    FAILURE_KIND_REWARD_MISSING: _ClassVar[FailureKind]
    FAILURE_KIND_CANCELLED: _ClassVar[FailureKind]
    FAILURE_KIND_RELEASED: _ClassVar[FailureKind]
    FAILURE_KIND_SUPERSEDED: _ClassVar[FailureKind]
    FAILURE_KIND_RUNNER_LOST: _ClassVar[FailureKind]
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_AGENT_ERROR: FailureKind
FAILURE_KIND_TIMEOUT: FailureKind
FAILURE_KIND_LEASE_LOST: FailureKind
FAILURE_KIND_INFRA: FailureKind
FAILURE_KIND_REWARD_MISSING: FailureKind
FAILURE_KIND_CANCELLED: FailureKind
FAILURE_KIND_RELEASED: FailureKind
FAILURE_KIND_SUPERSEDED: FailureKind
FAILURE_KIND_RUNNER_LOST: FailureKind
