"""Records as tables of pandas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fulmen.client.calls import RecordedCall
from fulmen.client.extras import imported
from fulmen.client.rollouts import Rollout
from fulmen.client.runs import Step
from fulmen.store.v1 import call_pb2, rollout_pb2

__all__ = ["calls_frame", "rollouts_frame", "steps_frame"]

_EMPTY = rollout_pb2.Rollout()
_NO_CALL = call_pb2.RecordedCall()


def calls_frame(calls: Iterable[RecordedCall]) -> Any:
    """Returns a `pandas.DataFrame` with one row per recorded call.

    Raises:
        ExtraMissing: if pandas is not installed.
    """
    pandas = imported("pandas", extra="pandas", purpose="to_pandas()")
    return pandas.DataFrame([_call_row(each) for each in calls], columns=list(_call_row(RecordedCall(_NO_CALL))))


def rollouts_frame(rollouts: Iterable[Rollout]) -> Any:
    """Returns a `pandas.DataFrame` with one row per rollout.

    Raises:
        ExtraMissing: if pandas is not installed.
    """
    pandas = imported("pandas", extra="pandas", purpose="to_pandas()")
    return pandas.DataFrame([_row(each) for each in rollouts], columns=list(_row(Rollout(_EMPTY))))


def steps_frame(steps: Iterable[Step]) -> Any:
    """Returns a `pandas.DataFrame` with one row per step, indexed by its number, and a column per metric.

    Raises:
        ExtraMissing: if pandas is not installed.
    """
    pandas = imported("pandas", extra="pandas", purpose="to_pandas()")
    rows = [{"step": each.number, **each.metrics} for each in steps]
    return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")


def _call_row(call: RecordedCall) -> dict[str, Any]:
    return {
        "call": call.name,
        "conversation": call.conversation,
        "model": call.model,
        "backend": call.backend,
        "policy": call.policy,
        "policy_version": call.policy_version,
        "http_status": call.http_status,
        "error": call.error,
        "finish_reason": call.finish_reason,
        "messages": call.messages,
        "answer": call.answer,
        "prompt_tokens": call.prompt_token_count,
        "completion_tokens": call.completion_token_count,
        "cost_usd": call.cost_usd,
        "duration_s": call.duration_s,
        "score": call.score,
        "label": call.label,
        "created": call.create_time,
    }


def _row(rollout: Rollout) -> dict[str, Any]:
    attempt = rollout.attempt
    return {
        "rollout": rollout.name,
        "state": rollout.state,
        "failure": rollout.failure,
        "mode": rollout.mode,
        "group": rollout.group_id,
        "training_run": rollout.training_run,
        "reward": rollout.reward,
        "attempts": max(len(rollout.attempts), rollout.proto.ended_attempt_count),
        "duration_s": attempt.duration_s if attempt is not None else None,
        "task": rollout.task,
        "output": rollout.output,
        "failure_message": attempt.failure_message if attempt is not None else "",
        "created": rollout.create_time,
        "ended": rollout.end_time,
    }
