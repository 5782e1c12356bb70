"""Converts between gRPC messages and the service's values."""

import json
from dataclasses import replace
from datetime import datetime
from statistics import fmean
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.algorithm.v1 import algorithm_pb2
from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.ids import DEFAULT_PROJECT
from fulmen_algorithm.clients.run_history import rewards_message
from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.describing import setting_texts, summary
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, TrainingRun


def drafts(request: service_pb.CreateTrainingRunRequest, project: str) -> list[RunDraft]:
    """Decodes a run to create and the stages that follow it, by default of its project; the request id is that of the first."""
    first = replace(draft(request.training_run, request.request_id), project=project)
    return [first, *(replace(draft(each, ""), project=each.project or project) for each in request.next_stages)]


def draft(message: pb.TrainingRun, request_id: str) -> RunDraft:
    """Decodes a run to create; output-only fields are not read."""
    return RunDraft(
        name=message.name,
        project=message.project or DEFAULT_PROJECT,
        display_name=message.display_name,
        tags=tuple(sorted(set(message.tags))),
        algorithm=message.algorithm,
        settings_json=message.settings_json,
        policy=policy_spec(message.policy),
        inputs=dict(message.inputs),
        request_id=request_id,
        pause_at_step=message.pause_at_step,
    )


def policy_spec(message: pb.PolicySpec) -> PolicySpec:
    """Decodes a policy and the source of its first weights."""
    origin = message.WhichOneof("initial")
    return PolicySpec(
        name=message.name,
        origin=PolicyOrigin(origin) if origin else PolicyOrigin.NEWEST,
        source=getattr(message, origin) if origin else "",
    )


def policy_message(policy: PolicySpec) -> pb.PolicySpec:
    """Encodes a policy and the source of its first weights."""
    message = pb.PolicySpec(name=policy.name)
    if policy.origin is not PolicyOrigin.NEWEST:
        setattr(message, policy.origin.value, policy.source)
    return message


def training_run(run: TrainingRun, *, owner_address: str = "", waiting: str = "") -> pb.TrainingRun:
    """Encodes a run.

    Args:
        run: The run.
        owner_address: Address of the service that runs it; empty for none.
        waiting: What it waits for; empty if it does not wait.
    """
    policy = policy_message(run.policy) if run.policy.name else None
    return pb.TrainingRun(
        name=run.name,
        project=run.project,
        display_name=run.display_name,
        algorithm=run.algorithm,
        settings_json=run.settings_json,
        policy=policy,
        inputs=run.inputs,
        state=pb.TrainingRunState.Value(f"TRAINING_RUN_STATE_{run.state.value}"),
        failure_message=run.failure_message,
        step=run.step,
        step_count=run.step_count,
        policy_version=run.policy_version,
        model_path=run.model_path,
        results=run.results,
        create_time=_timestamp(run.create_time),
        start_time=_timestamp(run.start_time),
        end_time=_timestamp(run.end_time),
        provenance=run.provenance,
        rollback_count=len(run.branch_points),
        owner_address=owner_address,
        waiting_reason=waiting,
        stages=run.stages,
        prompt_version=run.prompt_version,
        tags=run.tags,
        pause_at_step=run.pause_at_step,
    )


def event(value: Event) -> pb.TrainingRunEvent:
    """Encodes an event."""
    message = pb.TrainingRunEvent(sequence=value.sequence, event_time=_timestamp(value.time))
    if value.run is not None:
        message.run.CopyFrom(training_run(value.run))
    elif value.step is not None:
        rewards = rewards_message(value.step.rewards)
        message.step.CopyFrom(pb.StepMetrics(step=value.step.step, values=value.step.values, rewards=rewards))
    elif value.notice is not None:
        message.notice.CopyFrom(pb.RunNotice(severity=value.notice.severity, message=value.notice.message))
    return message


def algorithm(entry: AlgorithmEntry[Any]) -> algorithm_pb2.Algorithm:
    """Encodes the description of an algorithm, without the schema of its settings; takes 20 ms."""
    return algorithm_pb2.Algorithm(
        name=entry.name,
        summary=summary(entry),
        required_inputs=entry.needs,
        optional_inputs=entry.optional_inputs,
        any_of_inputs=entry.any_of,
        trains=entry.trains,
        settings=[
            algorithm_pb2.AlgorithmSetting(name=text.name, default_json=text.default_json, summary=text.summary)
            for text in setting_texts(entry)
        ],
    )


def settings_schema(entry: AlgorithmEntry[Any]) -> str:
    """Encodes the schema of an algorithm's settings; takes 100 ms."""
    return json.dumps(entry.settings.model_json_schema())


def checkpoint(run: TrainingRun, value: Checkpoint) -> pb.Checkpoint:
    """Encodes a checkpoint."""
    step = int(value.progress["step"])
    version = int(value.progress["policy_version"])
    created = datetime.fromtimestamp(value.path.stat().st_mtime).astimezone()
    rewards = value.progress.get("rewards")
    return pb.Checkpoint(
        name=f"{run.name}/checkpoints/{value.sequence}",
        sequence=value.sequence,
        step=step,
        reward_mean=fmean(rewards) if rewards else None,
        policy_version=f"resources/policy.{run.policy.name}/versions/{version}" if version else "",
        size_bytes=value.size_bytes,
        create_time=_timestamp(created),
    )


def _timestamp(time: datetime | None) -> Timestamp | None:
    if time is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(time)
    return stamp
