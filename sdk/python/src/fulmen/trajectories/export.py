"""Trajectories as rows of a file: one per training row, model call or conversation of an attempt.

Invariant: a view always has the same columns; ids and log-probabilities are lists, values without a fixed form are
JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final, assert_never

from fulmen.ids import parse_attempt_name
from fulmen.row_files import Column
from fulmen.trajectories.credit import CreditedRow, Credits
from fulmen.trajectories.rewards import RewardRange, ScoredTrajectory
from fulmen.trajectories.views import conversations, triplets

NO_VERSION: Final = -1
"""Policy version of unsampled tokens."""


class View(StrEnum):
    """Content of a row of the file: a training row, one model call, or one conversation."""

    ROWS = "rows"
    TRIPLETS = "triplets"
    MESSAGES = "messages"


_ATTEMPT: Final = {"rollout": Column.TEXT, "attempt": Column.INT32, "agent": Column.TEXT}
_REWARDS: Final = {"reward": Column.FLOAT64, "final_rewards": Column.NESTED}

COLUMNS: Final[Mapping[View, Mapping[str, Column]]] = {
    View.ROWS: {
        **_ATTEMPT,
        "policy": Column.TEXT,
        "row": Column.INT32,
        "prompt_ids": Column.INT32S,
        "response_ids": Column.INT32S,
        "loss_mask": Column.BOOLS,
        "logprobs": Column.FLOAT32S,
        "policy_versions": Column.INT64S,
        "temperature": Column.FLOAT64,
        "finish_reason": Column.TEXT,
        **_REWARDS,
        "reward_ranges": Column.NESTED,
        "calls": Column.NESTED,
        "messages": Column.NESTED,
        "tools": Column.NESTED,
    },
    View.TRIPLETS: {
        **_ATTEMPT,
        "policy": Column.TEXT,
        "step": Column.INT32,
        "span_id": Column.TEXT,
        "prompt_ids": Column.INT32S,
        "response_ids": Column.INT32S,
        "logprobs": Column.FLOAT32S,
        "policy_versions": Column.INT64S,
        "finish_reason": Column.TEXT,
        **_REWARDS,
        "prompt": Column.NESTED,
        "response": Column.NESTED,
    },
    View.MESSAGES: {
        **_ATTEMPT,
        "span_id": Column.TEXT,
        "is_trainable": Column.BOOL,
        "finish_reason": Column.TEXT,
        **_REWARDS,
        "messages": Column.NESTED,
        "tools": Column.NESTED,
    },
}
"""Columns of each view, in order."""


def records(view: View, attempt: str, scored: ScoredTrajectory, credit: Credits) -> Iterator[dict[str, Any]]:
    """Yields an attempt as rows of a file.

    Args:
        view: Content of a row.
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        scored: The attempt's trajectory with its rewards.
        credit: Credit assigned to `scored`.

    Raises:
        ModelCallInvalid: If a recorded request or answer is not JSON.
    """
    name = parse_attempt_name(attempt)
    match view:
        case View.ROWS:
            found = _rows(credit)
        case View.TRIPLETS:
            found = _triplets(credit)
        case View.MESSAGES:
            found = _conversations(scored, credit)
        case _:
            assert_never(view)
    final = {each.dimension: each.value for each in scored.rewards if each.is_final}
    for each in found:
        whole = {"rollout": name.rollout, "attempt": name.number, "final_rewards": final, **each}
        yield {name: whole[name] for name in COLUMNS[view]}


def _rows(credit: Credits) -> Iterator[dict[str, Any]]:
    for place, credited in enumerate(credit.rows):
        row = credited.scored.row
        yield {
            "agent": row.agent_name,
            "policy": row.policy,
            "row": place,
            "prompt_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "loss_mask": row.loss_mask,
            "logprobs": row.logprobs,
            "policy_versions": row.version_per_token(masked=NO_VERSION),
            "temperature": row.temperature,
            "finish_reason": row.finish_reason,
            "reward": credited.reward,
            "reward_ranges": [_range(each) for each in credited.scored.ranges],
            "calls": list(_calls(credited)),
            "messages": row.messages,
            "tools": row.tools,
        }


def _range(each: RewardRange) -> dict[str, Any]:
    return {
        "dimension": each.reward.dimension,
        "value": each.reward.value,
        "step": each.reward.step,
        "span_id": each.reward.span_id.hex(),
        "start": each.start,
        "end": each.end,
    }


def _calls(credited: CreditedRow) -> Iterator[dict[str, Any]]:
    for each, value in zip(credited.scored.row.calls, credited.credits, strict=True):
        span_id = each.call.span_id.hex()
        yield {"span_id": span_id, "step": each.step, "start": each.start, "end": each.end, "reward": value}


def _triplets(credit: Credits) -> Iterator[dict[str, Any]]:
    for each in triplets(credit.rows):
        versions = [v.version for v in each.versions for _ in range(v.end - v.start)]
        yield {
            "agent": each.agent_name,
            "policy": each.policy,
            "step": each.step,
            "span_id": each.span_id.hex(),
            "prompt_ids": each.prompt_ids,
            "response_ids": each.response_ids,
            "logprobs": each.logprobs,
            "policy_versions": versions or [0] * len(each.response_ids),
            "finish_reason": each.finish_reason,
            "reward": each.reward,
            "prompt": each.prompt,
            "response": each.response,
        }


def _conversations(scored: ScoredTrajectory, credit: Credits) -> Iterator[dict[str, Any]]:
    for each in conversations(scored.trajectory, credit.rows):
        yield {
            "agent": each.agent_name,
            "span_id": each.span_id.hex(),
            "is_trainable": each.is_trainable,
            "finish_reason": each.finish_reason,
            "reward": each.reward,
            "messages": each.messages,
            "tools": each.tools,
        }
