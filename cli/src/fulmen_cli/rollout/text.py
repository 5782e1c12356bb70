"""A rollout and the history of its attempts, as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from fulmen.store.v1 import attempt_pb2, failure_pb2, rollout_pb2
from fulmen_cli.output import enum_word, when

__all__ = ["attempt_text", "facts_of"]

MAX_OUTPUT_SHOWN: Final = 2_000
RETRY_OF: Final = "fulmen.retry_of"


def facts_of(rollout: rollout_pb2.Rollout) -> Iterator[tuple[str, str]]:
    """Yields what is known of a rollout, by label; an empty text is not worth a line."""
    yield "rollout", rollout.name
    yield "state", " ".join(filter(None, (enum_word(rollout, "state"), enum_word(rollout, "failure_kind"))))
    yield "mode", enum_word(rollout, "mode")
    yield "agent", rollout.agent
    yield "task type", rollout.task_type
    yield "training run", rollout.training_run
    yield "group", f"{rollout.group_id} ({rollout.group_size})" if rollout.group_id else ""
    yield "priority", str(rollout.priority) if rollout.priority else ""
    yield "labels", _pairs(rollout.required_labels)
    yield "policy", _policy(rollout.policy)
    yield "runs again", rollout.metadata.get(RETRY_OF, "")
    yield "created", when(rollout.create_time)
    yield "not before", when(rollout.not_before_time)
    yield "deadline", when(rollout.deadline_time)
    yield "ended", when(rollout.end_time)
    yield "attempts", f"{rollout.ended_attempt_count} ended" if rollout.ended_attempt_count else ""
    yield "task", rollout.input.decode("utf-8", errors="replace")


def attempt_text(attempt: attempt_pb2.Attempt) -> str:
    """Writes one attempt: how it ended, where and when it ran, its rewards, its outcome and what failed."""
    state = " ".join(filter(None, (enum_word(attempt, "state"), enum_word(attempt, "failure_kind"))))
    decided = ", decided the rollout" if attempt.final else ""
    lines = [
        f"attempt {attempt.name.rpartition('/')[2]}: {state}{decided}",
        f"  runner     {attempt.runner_host or attempt.runner}",
        f"  time       {when(attempt.start_time)} to {when(attempt.end_time) or 'now'}{_took(attempt)}",
    ]
    for reward in attempt.rewards:
        step = f" at step {reward.step}" if reward.HasField("step") else ""
        lines.append(f"  reward     {reward.dimension or 'reward'} {reward.value:g}{step}")
    if attempt.output:
        lines.append(f"  outcome    {attempt.output.decode('utf-8', errors='replace')[:MAX_OUTPUT_SHOWN]}")
    if attempt.failure_message:
        lines.append("  failure    " + attempt.failure_message.replace("\n", "\n             "))
    return "\n".join(lines)


def _took(attempt: attempt_pb2.Attempt) -> str:
    if not attempt.HasField("end_time"):
        return ""
    return f" ({(attempt.end_time.ToNanoseconds() - attempt.start_time.ToNanoseconds()) / 1e9:.1f} s)"


def _policy(policy: rollout_pb2.RolloutPolicy) -> str:
    kinds = [failure_pb2.FailureKind.Name(kind).removeprefix("FAILURE_KIND_").lower() for kind in policy.retry_on]
    parts = [
        f"{policy.max_attempts} attempts" if policy.max_attempts else "",
        f"{_seconds(policy.attempt_timeout)} each" if policy.HasField("attempt_timeout") else "",
        f"again after {', '.join(kinds)}" if kinds else "",
        "hedged" if policy.hedged else "",
    ]
    return ", ".join(filter(None, parts))


def _seconds(duration: Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e9:g} s"


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))
