"""Converts between the store's lease messages and the runner's types."""

from collections.abc import Mapping

from fulmen.ids import DEFAULT_PROJECT, parse_attempt_name
from fulmen.store.v1 import attempt_pb2, failure_pb2, lease_pb2, reward_pb2, rollout_pb2
from fulmen.store.v1 import lease_service_pb2 as messages
from fulmen_runner.attempts.assignment import JSON_CONTENT_TYPE, Assignment, Mode
from fulmen_runner.attempts.outcome import NOTHING_PRINTED, Failed, FailureKind, Reward, Succeeded, cut_at_front
from fulmen_runner.attempts.progress import ProgressReport
from fulmen_runner.attempts.session import AckStatus, Report
from fulmen_runner.slots.load import Load

_MODES = {
    rollout_pb2.ROLLOUT_MODE_VALIDATION: Mode.VALIDATION,
    rollout_pb2.ROLLOUT_MODE_TEST: Mode.TEST,
}
_KINDS = {kind: failure_pb2.FailureKind.Value(f"FAILURE_KIND_{kind.value}") for kind in FailureKind}
_STATUSES = {
    lease_pb2.COMPLETION_STATUS_APPLIED: AckStatus.APPLIED,
    lease_pb2.COMPLETION_STATUS_DUPLICATE: AckStatus.DUPLICATE,
    lease_pb2.COMPLETION_STATUS_LEASE_LOST: AckStatus.LEASE_LOST,
    lease_pb2.COMPLETION_STATUS_INVALID: AckStatus.INVALID,
}


def read_assignment(assignment: lease_pb2.Assignment) -> Assignment:
    """Decodes an assignment.

    Raises:
        ArgumentInvalid: If the attempt's name is malformed.
    """
    rollout = assignment.rollout
    return Assignment(
        attempt=assignment.attempt,
        rollout=rollout.name,
        number=parse_attempt_name(assignment.attempt).number,
        lease_id=assignment.lease_id,
        epoch=assignment.epoch,
        project=rollout.project or DEFAULT_PROJECT,
        mode=_MODES.get(rollout.mode, Mode.TRAIN),
        agent=rollout.agent,
        input=rollout.input,
        input_content_type=rollout.input_content_type or JSON_CONTENT_TYPE,
        resource_versions=dict(rollout.resource_versions),
        attempt_key=assignment.attempt_key,
        timeout_s=assignment.timeout.seconds + assignment.timeout.nanos / 1e9,
    )


def write_result(report: Report) -> lease_pb2.AttemptResult:
    """Encodes a report with an outcome.

    Raises:
        ValueError: If it has no outcome; such a lease is released.
    """
    result = lease_pb2.AttemptResult(
        attempt=report.assignment.attempt, lease_id=report.assignment.lease_id, epoch=report.assignment.epoch
    )
    match report.outcome:
        case Succeeded(rewards=rewards):
            result.rewards.extend(map(_reward, rewards))
        case Failed(kind=kind, message=message):
            result.failure_kind = _KINDS[kind]
            # One report that cannot be encoded would end the stream, and with it the attempts of all.
            result.failure_message = cut_at_front(message)
        case None:
            raise ValueError("a report without an outcome is a release")
    if report.outcome.printed != NOTHING_PRINTED:
        result.printed.stdout = report.outcome.printed.stdout
        result.printed.stderr = report.outcome.printed.stderr
    result.output = report.outcome.output.content
    result.output_content_type = report.outcome.output.content_type
    return result


def write_progress(reports: Mapping[str, ProgressReport]) -> list[messages.ReportedProgress]:
    """Encodes reports of progress, given by attempt."""
    return [
        messages.ReportedProgress(
            attempt=attempt, progress=attempt_pb2.AttemptProgress(fraction=report.fraction, text=report.text)
        )
        for attempt, report in reports.items()
    ]


def write_load(load: Load) -> lease_pb2.RunnerLoad:
    """Encodes a load sample."""
    message = lease_pb2.RunnerLoad(
        cpu_ratio=load.cpu,
        memory_bytes=load.memory_bytes,
        memory_limit_bytes=load.memory_limit_bytes,
        gpus=[
            lease_pb2.GpuLoad(
                model=gpu.model,
                utilization_ratio=gpu.utilization,
                memory_bytes=gpu.memory_bytes,
                memory_limit_bytes=gpu.memory_limit_bytes,
            )
            for gpu in load.gpus
        ],
    )
    if load.slots is not None:
        message.slots.configured_count = load.slots.configured
        message.slots.in_use_count = load.slots.in_use
        message.slots.limit_count = load.slots.limit
        message.slots.automatic = load.slots.automatic
    return message


def read_status(ack: lease_pb2.CompletionAck) -> AckStatus | None:
    """Decodes the status of an acknowledgement; None if it is unknown to this version."""
    return _STATUSES.get(ack.status)


def _reward(reward: Reward) -> reward_pb2.Reward:
    return reward_pb2.Reward(dimension=reward.dimension, value=reward.value, step=reward.step, span_id=reward.span_id)
