"""Errors on the wire: `FulmenError` to `google.rpc.Status` and back to the same class."""

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from fulmen import errors
from fulmen.errors import Code, FulmenError, Violation

STATUS_METADATA_KEY = "grpc-status-details-bin"
CLOCK_METADATA_KEY = "fulmen-unix-nanos"
"""Trailer of health checks: the service's time."""
# The status is in the trailing metadata, of which clients accept 8 KiB; base64 takes a third of it.
MAX_VIOLATION_BYTES = 3072
MAX_METADATA_CHARS = 256
MAX_MESSAGE_BYTES = 1200

_GENERIC: dict[grpc.StatusCode, type[FulmenError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
    grpc.StatusCode.UNAUTHENTICATED: errors.TokenInvalid,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.INVALID_ARGUMENT: errors.ArgumentInvalid,
}


def grpc_code(code: Code) -> grpc.StatusCode:
    """Returns the grpc status code of a canonical code."""
    return grpc.StatusCode[code.value]


def encode(error: FulmenError) -> status_pb2.Status:
    """Returns the status of an error, with `ErrorInfo`, `RetryInfo`, and `BadRequest` if it has violations.

    The last violation has the number of violations that do not fit, and a long text is truncated: gRPC drops a status
    whose metadata have more than 8 KiB.
    """
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.value), message=_shortened(error.message))
    metadata = {key: value[:MAX_METADATA_CHARS] for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=errors.ERROR_DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for index, violation in enumerate(error.violations):
            bad.field_violations.add(field=violation.field, description=violation.description)
            if bad.ByteSize() > MAX_VIOLATION_BYTES:
                rest = len(error.violations) - index
                bad.field_violations[-1].CopyFrom(_more(rest))
                break
        status.details.add().Pack(bad)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def _shortened(text: str) -> str:
    given = text.encode(errors="replace")
    return text if len(given) <= MAX_MESSAGE_BYTES else given[:MAX_MESSAGE_BYTES].decode(errors="ignore") + " …"


def _more(count: int) -> error_details_pb2.BadRequest.FieldViolation:
    return error_details_pb2.BadRequest.FieldViolation(field="", description=f"and {count} more problems")


def decode(error: grpc.RpcError) -> FulmenError:
    """Decodes a grpc error to the class that the server raised.

    A status without `ErrorInfo` (a broken connection, one of grpc's own limits, another server) becomes the general
    class of its code.
    """
    status = _status_of(error)
    violations: list[Violation] = []
    cls, metadata = None, {}
    retry_after_s = None
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            cls, metadata = errors.error_class(info.reason), dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = [Violation(field=v.field, description=v.description) for v in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if cls is None:
        cls = _GENERIC.get(error.code(), errors.InternalError)
    decoded = cls(error.details() or error.code().name, violations=violations, retry_after_s=retry_after_s)
    decoded.metadata = metadata
    return decoded


def _status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_METADATA_KEY:
            return status_pb2.Status.FromString(value)
    return None
