"""The hierarchy of errors: raised in a service's domain, sent as `google.rpc.ErrorInfo`, raised again in the client.

A class has a canonical code, a reason of `fulmen.errors.v1.ErrorReason` and a sentence. To add one, add the reason to
`reasons.proto` and subclass here; the test of the catalogue checks that both agree. Nothing here imports grpc.
"""

from fulmen.errors.base import Code, FulmenError


class InternalError(FulmenError):
    """Unexpected server error; `metadata["error_id"]` identifies it in the server's log."""


class ArgumentInvalid(FulmenError):
    """The request is malformed; `violations` lists every problem."""

    code, reason = Code.INVALID_ARGUMENT, "ARGUMENT_INVALID"


class PageTokenInvalid(FulmenError):
    """The page token does not belong to this list."""

    code, reason = Code.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID"


class CursorInvalid(FulmenError):
    """The cursor does not belong to this feed."""

    code, reason = Code.INVALID_ARGUMENT, "CURSOR_INVALID"


class SettingsInvalid(FulmenError):
    """Settings of a training run are unknown or out of range; `violations` lists every problem."""

    code, reason = Code.INVALID_ARGUMENT, "SETTINGS_INVALID"


class TokenInvalid(FulmenError):
    """The token is missing, malformed, expired, revoked or signed with another key."""

    code, reason = Code.UNAUTHENTICATED, "TOKEN_INVALID"


class PermissionDenied(FulmenError):
    """The token's role or project does not allow this."""

    code, reason = Code.PERMISSION_DENIED, "PERMISSION_DENIED"


class AttemptOver(FulmenError):
    """The attempt and its key are no longer valid: stop acting for it."""

    code, reason = Code.PERMISSION_DENIED, "ATTEMPT_OVER"


class TooManyInvalidTokens(FulmenError):
    """The caller's address has sent too many forged tokens; retry after `retry_after_s`."""

    code, reason = Code.RESOURCE_EXHAUSTED, "TOO_MANY_INVALID_TOKENS"


class MessageTooLarge(FulmenError):
    """The message exceeds the server's limit."""

    code, reason = Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"


class Unimplemented(FulmenError):
    """The rpc is part of the API but is not implemented by this server."""

    code, reason = Code.UNIMPLEMENTED, "UNIMPLEMENTED"


class QuotaExceeded(FulmenError):
    """The project's quota is exhausted; retry after `retry_after_s`."""

    code, reason = Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"


class ModelLimitExceeded(FulmenError):
    """A limit of model calls is exceeded; retry after `retry_after_s`."""

    code, reason = Code.RESOURCE_EXHAUSTED, "MODEL_LIMIT_EXCEEDED"


class BudgetExceeded(FulmenError):
    """A budget in dollars is used up."""

    code, reason = Code.PERMISSION_DENIED, "BUDGET_EXCEEDED"


class PriceUnknown(FulmenError):
    """A budget in dollars applies to a call whose model has no price."""

    code, reason = Code.PERMISSION_DENIED, "PRICE_UNKNOWN"


class TokenBudgetExceeded(FulmenError):
    """The attempt has exceeded its token budget; do not retry."""

    code, reason = Code.PERMISSION_DENIED, "TOKEN_BUDGET_EXCEEDED"


class Unavailable(FulmenError):
    """The server is unreachable or temporarily unavailable; retry."""

    code, reason = Code.UNAVAILABLE, "UNSPECIFIED"


class Draining(Unavailable):
    """The server is shutting down; retry with another replica, or after its restart."""

    reason = "DRAINING"


class DatabaseUnavailable(Unavailable):
    """The store cannot reach its database."""

    reason = "DATABASE_UNAVAILABLE"


class BlobStorageUnavailable(Unavailable):
    """The store cannot reach its blob storage."""

    reason = "BLOB_STORAGE_UNAVAILABLE"


class RunStorageUnavailable(Unavailable):
    """The storage of training runs is full or cannot be reached."""

    reason = "RUN_STORAGE_UNAVAILABLE"


class BlobMissing(FulmenError):
    """A payload in the blob storage is missing or corrupt; `metadata["blob"]`."""

    reason = "BLOB_MISSING"


class BackendUnavailable(Unavailable):
    """A model backend failed or could not be reached."""

    reason = "BACKEND_UNAVAILABLE"


class DeadlineExceeded(FulmenError):
    """A timeout of the server expired."""

    code, reason = Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class NotFound(FulmenError):
    """The named object does not exist. Abstract: subclasses have the reasons."""

    code, reason = Code.NOT_FOUND, "UNSPECIFIED"


class AttemptNotFound(NotFound):
    """The attempt does not exist."""

    reason = "ATTEMPT_NOT_FOUND"


class RolloutNotFound(NotFound):
    """The rollout does not exist."""

    reason = "ROLLOUT_NOT_FOUND"


class RunnerNotFound(NotFound):
    """The runner session does not exist."""

    reason = "RUNNER_NOT_FOUND"


class ResourceNotFound(NotFound):
    """The resource, version or alias does not exist."""

    reason = "RESOURCE_NOT_FOUND"


class TrainingRunNotFound(NotFound):
    """The training run does not exist."""

    reason = "TRAINING_RUN_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """The checkpoint does not exist or was discarded by a rollback."""

    reason = "CHECKPOINT_NOT_FOUND"


class RouteNotFound(NotFound):
    """No route exists for this model."""

    reason = "ROUTE_NOT_FOUND"


class RouteExists(FulmenError):
    """The model's name belongs to another project or to the operator."""

    code, reason = Code.ALREADY_EXISTS, "ROUTE_EXISTS"


class BackendNotFound(NotFound):
    """The backend does not exist."""

    reason = "BACKEND_NOT_FOUND"


class ProjectNotFound(NotFound):
    """The project does not exist."""

    reason = "PROJECT_NOT_FOUND"


class SecretNotFound(NotFound):
    """Secrets do not exist or can no longer be decrypted; `metadata["secrets"]` names them."""

    reason = "SECRET_NOT_FOUND"


class ScheduleNotFound(NotFound):
    """The schedule does not exist; `metadata["schedule"]` names it."""

    reason = "SCHEDULE_NOT_FOUND"


class ScheduleExists(FulmenError):
    """The name is taken by a schedule with other content; `metadata["schedule"]` names it."""

    code, reason = Code.ALREADY_EXISTS, "SCHEDULE_EXISTS"


class AnnotationNotFound(NotFound):
    """The annotation does not exist; `metadata["annotation"]` names it."""

    reason = "ANNOTATION_NOT_FOUND"


class AnnotationExists(FulmenError):
    """The caller scored this dimension of the rollout before; `metadata["annotation"]` names that score."""

    code, reason = Code.ALREADY_EXISTS, "ANNOTATION_EXISTS"


class CallNotFound(NotFound):
    """The call or conversation is not recorded, or was deleted; `metadata["name"]` names it."""

    reason = "CALL_NOT_FOUND"


class TokenNotFound(NotFound):
    """The token does not exist."""

    reason = "TOKEN_NOT_FOUND"


class ProjectExists(FulmenError):
    """The project exists."""

    code, reason = Code.ALREADY_EXISTS, "PROJECT_EXISTS"


class RolloutExists(FulmenError):
    """A rollout with this name and different content exists."""

    code, reason = Code.ALREADY_EXISTS, "ROLLOUT_EXISTS"


class TrainingRunExists(FulmenError):
    """A different training run with this name exists."""

    code, reason = Code.ALREADY_EXISTS, "TRAINING_RUN_EXISTS"


class RolloutStateInvalid(FulmenError):
    """The rollout's state does not allow this."""

    code, reason = Code.FAILED_PRECONDITION, "ROLLOUT_STATE_INVALID"


class SessionEnded(FulmenError):
    """The runner session is unknown or has ended."""

    code, reason = Code.FAILED_PRECONDITION, "SESSION_ENDED"


class TrainingRunStateInvalid(FulmenError):
    """The training run's state does not allow this."""

    code, reason = Code.FAILED_PRECONDITION, "TRAINING_RUN_STATE_INVALID"


class BackendInUse(FulmenError):
    """A route uses the backend."""

    code, reason = Code.FAILED_PRECONDITION, "BACKEND_IN_USE"


class ManagedByFile(FulmenError):
    """A file owns the route or backend."""

    code, reason = Code.FAILED_PRECONDITION, "MANAGED_BY_FILE"


class LeaseLost(FulmenError):
    """The runner no longer holds the lease."""

    code, reason = Code.ABORTED, "LEASE_LOST"


class EtagMismatch(FulmenError):
    """The resource or alias has changed since it was read."""

    code, reason = Code.ABORTED, "ETAG_MISMATCH"


class RunLeaseHeld(FulmenError):
    """Another algorithm service runs the training run, or another run of the same policy."""

    code, reason = Code.ABORTED, "RUN_LEASE_HELD"


class RunLeaseLost(FulmenError):
    """Another algorithm service has taken over the training run."""

    code, reason = Code.ABORTED, "RUN_LEASE_LOST"


class ModelNotFound(NotFound):
    """The model, the upload or the weights of the policy version do not exist."""

    reason = "MODEL_NOT_FOUND"


class ModelExists(FulmenError):
    """The alias belongs to another model."""

    code, reason = Code.ALREADY_EXISTS, "MODEL_EXISTS"


class EngineExists(FulmenError):
    """Another engine has joined the training run under this id; `metadata["engine"]` names it."""

    code, reason = Code.ALREADY_EXISTS, "ENGINE_EXISTS"


class ModelInUse(FulmenError):
    """A training run that has not ended, or a trainer, starts from the model."""

    code, reason = Code.FAILED_PRECONDITION, "MODEL_IN_USE"


class UploadIncomplete(FulmenError):
    """Files of the upload are missing."""

    code, reason = Code.FAILED_PRECONDITION, "UPLOAD_INCOMPLETE"


class UploadOffsetInvalid(FulmenError):
    """The chunk does not continue the file."""

    code, reason = Code.FAILED_PRECONDITION, "UPLOAD_OFFSET_INVALID"


class UploadDamaged(FulmenError):
    """The SHA-256 of the received file does not match."""

    code, reason = Code.ABORTED, "UPLOAD_DAMAGED"


class WeightsUnavailable(FulmenError):
    """The policy version does not have weights of this form."""

    code, reason = Code.FAILED_PRECONDITION, "WEIGHTS_UNAVAILABLE"


class TrainerNotFound(NotFound):
    """The trainer does not exist."""

    reason = "TRAINER_NOT_FOUND"


class TrainerExists(FulmenError):
    """The request id was used for another trainer."""

    code, reason = Code.ALREADY_EXISTS, "TRAINER_EXISTS"


class TrainerSequenceInvalid(FulmenError):
    """The trainer's sequence differs from what the caller assumes: `metadata` has its `sequence` and `step`."""

    code, reason = Code.FAILED_PRECONDITION, "TRAINER_SEQUENCE_INVALID"


class TrainerLost(FulmenError):
    """The process of the trainer ended during the call, which was not carried out."""

    code, reason = Code.ABORTED, "TRAINER_LOST"


def all_error_classes() -> list[type[FulmenError]]:
    """Returns every class of the tree, parents before children."""
    found: list[type[FulmenError]] = [FulmenError]
    for cls in found:  # grows meanwhile
        found.extend(cls.__subclasses__())
    return found


def error_class(reason: str) -> type[FulmenError] | None:
    """Returns the class of a reason, or None if this version does not know it."""
    return next((cls for cls in all_error_classes() if cls.reason == reason and cls is not FulmenError), None)
