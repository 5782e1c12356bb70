"""From the store's messages to the domain's values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulmen.model_call import ModelCallInvalid
from fulmen.store.v1 import attempt_pb2, failure_pb2, rollout_pb2, rollout_service_pb2
from fulmen.store.v1.span_pb2 import SpanChunk
from fulmen.trajectories import DropReason, Row, Trajectory, trajectory
from fulmen_algorithm.domain.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.domain.trajectory import RolloutTrajectory, TokenSequence

FINAL_REWARD = "reward"
TRUNCATED = "length"
OUTPUT_SHOWN_CHARS = 2000


def finished_group(message: rollout_service_pb2.FinishedGroup) -> FinishedGroup:
    """Decodes a group of the feed."""
    return FinishedGroup(
        group_id=message.group_id,
        rollouts=tuple(_rollout(r) for r in message.rollouts),
        cursor=message.cursor,
    )


def _rollout(message: rollout_pb2.Rollout) -> FinishedRollout:
    attempt = next((a for a in reversed(message.attempts) if a.final), None)
    succeeded = message.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    failure = "" if succeeded else failure_pb2.FailureKind.Name(message.failure_kind).removeprefix("FAILURE_KIND_")
    return FinishedRollout(
        name=message.name,
        attempt=attempt.name if attempt else "",
        succeeded=succeeded,
        reward=final_reward(attempt) if attempt and succeeded else None,
        failure=failure,
        output=attempt.output[:OUTPUT_SHOWN_CHARS].decode(errors="replace") if attempt else "",
    )


def final_reward(attempt: attempt_pb2.Attempt) -> float | None:
    """Picks the attempt's final reward: the dimension `reward`, or the only dimension there is; of several, the last.

    Rewards of single agent steps and spans do not count.
    """
    finals = {
        (r.dimension or FINAL_REWARD): r.value for r in attempt.rewards if not r.HasField("step") and not r.span_id
    }
    if FINAL_REWARD in finals:
        return finals[FINAL_REWARD]
    return next(iter(finals.values())) if len(finals) == 1 else None


def rollout_trajectory(chunks: Iterable[SpanChunk]) -> RolloutTrajectory:
    """Turns the spans of one attempt into sequences; what cannot be trained on says why."""
    try:
        found = trajectory(chunks)
        prompt, answer = _texts(found)
    except ModelCallInvalid as error:
        return RolloutTrajectory(sequences=(), unusable=str(error))
    unusable = ""
    if found.drops.get(DropReason.UNUSABLE, 0):
        unusable = "a model call was not captured whole"
    elif not found.rows:
        unusable = "no model call of the policy was captured"
    return RolloutTrajectory(
        sequences=tuple(_sequence(row) for row in found.rows),
        truncated=any(row.finish_reason == TRUNCATED for row in found.rows),
        unusable=unusable,
        prompt_text=prompt,
        answer_text=answer,
    )


def _sequence(row: Row) -> TokenSequence:
    before = len(row.prompt_ids)
    return TokenSequence(
        token_ids=(*row.prompt_ids, *row.response_ids),
        loss_mask=(False,) * before + row.loss_mask,
        logprobs=(0.0,) * before + row.logprobs,
        policy_versions=(0,) * before + row.version_per_token(masked=0),
    )


def _texts(found: Trajectory) -> tuple[str, str]:
    if not found.rows:
        return "", ""
    first, last = found.rows[0].messages, found.rows[-1].messages
    prompt = next((_text(m) for m in first if m.get("role") == "user"), "")
    return prompt, _answer(last)


def _answer(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages:
        return ""
    message = messages[-1]
    return _text(message) or json.dumps(message.get("tool_calls") or "")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return json.dumps(content) if content else ""
