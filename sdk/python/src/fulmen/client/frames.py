"""Records as tables of pandas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fulmen.client.extras import imported
from fulmen.client.rollouts import Rollout
from fulmen.client.runs import Step
from fulmen.store.v1 import rollout_pb2

__all__ = ["rollouts_frame", "steps_frame"]

_EMPTY = rollout_pb2.Rollout()


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
        "attempts": len(rollout.attempts),
        "duration_s": attempt.duration_s if attempt is not None else None,
        "task": rollout.task,
        "output": rollout.output,
        "failure_message": attempt.failure_message if attempt is not None else "",
        "created": rollout.create_time,
        "ended": rollout.end_time,
    }
