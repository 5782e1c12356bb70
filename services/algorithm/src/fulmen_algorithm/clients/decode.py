"""From the store's messages to the domain's values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulmen.agent import RewardKey
from fulmen.model_call import ModelCallInvalid
from fulmen.scores import final_reward
from fulmen.store.v1 import failure_pb2, rollout_pb2, rollout_service_pb2
from fulmen.store.v1.span_pb2 import SpanChunk
from fulmen.trajectories import (
    AttemptReward,
    CreditOption,
    CreditSettings,
    DropReason,
    Row,
    Trajectory,
    assign_credit,
    attach,
    call_units,
    is_constrained,
    read_rewards,
    trajectory,
    unit_rewards,
)
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.rollouts.trajectory import CallCredits, CreditRule, RolloutTrajectory, TokenCall, TokenSequence

TRUNCATED = "length"
OUTPUT_SHOWN_CHARS = 2000


class FeedGroups:
    """Decodes the groups of one stream of the feed, of which large ones come in parts."""

    def __init__(self) -> None:
        self._rollouts: list[FinishedRollout] = []

    def add(self, part: rollout_service_pb2.FinishedGroup) -> FinishedGroup | None:
        """Returns the group that a part ends; None if more of it follows."""
        self._rollouts += [_rollout(each) for each in part.rollouts]
        if not part.cursor:
            return None
        rollouts, self._rollouts = tuple(self._rollouts), []
        return FinishedGroup(group_id=part.group_id, rollouts=rollouts, cursor=part.cursor)


def _rollout(message: rollout_pb2.Rollout) -> FinishedRollout:
    attempt = next((a for a in reversed(message.attempts) if a.final), None)
    succeeded = message.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    rewards = {
        (reward.dimension, reward.step, reward.span_id): reward.value
        for reward in read_rewards(attempt.rewards if attempt and succeeded else ())
    }
    failure = "" if succeeded else failure_pb2.FailureKind.Name(message.failure_kind).removeprefix("FAILURE_KIND_")
    return FinishedRollout(
        name=message.name,
        attempt=attempt.name if attempt else "",
        succeeded=succeeded,
        reward=final_reward(rewards),
        rewards=rewards,
        failure=failure,
        output=attempt.output[:OUTPUT_SHOWN_CHARS].decode(errors="replace") if attempt else "",
        task=message.input,
    )


def rollout_trajectory(chunks: Iterable[SpanChunk]) -> RolloutTrajectory:
    """Converts the spans of one attempt to sequences; an unusable trajectory has its reason."""
    try:
        found = trajectory(chunks)
        prompt, answer = _texts(found)
        conversations = tuple((row.messages, row.tools) for row in found.rows)
    except ModelCallInvalid as error:
        return RolloutTrajectory(sequences=(), unusable=str(error))
    unusable = ""
    if found.drops.get(DropReason.UNUSABLE, 0):
        unusable = "a model call was not captured completely"
    elif not found.rows:
        unusable = "no model call of the policy was captured"
    return RolloutTrajectory(
        sequences=tuple(_sequence(row, units) for row, units in zip(found.rows, call_units(found), strict=True)),
        truncated=any(each.call.finish_reason == TRUNCATED for row in found.rows for each in row.calls),
        unusable=unusable,
        prompt_text=prompt,
        answer_text=answer,
        credit_of=StepCredit(found),
        conversations=conversations,
    )


def _sequence(row: Row, units: Sequence[int]) -> TokenSequence:
    before = len(row.prompt_ids)
    return TokenSequence(
        token_ids=(*row.prompt_ids, *row.response_ids),
        loss_mask=(False,) * before + row.loss_mask,
        logprobs=(0.0,) * before + row.logprobs,
        policy_versions=(0,) * before + row.version_per_token(masked=0),
        role=row.agent_name,
        policy=row.policy,
        model=row.calls[0].call.model,
        routed_experts=row.routed_experts,
        calls=tuple(
            TokenCall(
                start=before + each.start, end=before + each.end, unit=unit, constrained=is_constrained(each.call)
            )
            for each, unit in zip(row.calls, units, strict=True)
        ),
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


@dataclass(frozen=True, slots=True)
class StepCredit:
    """See `rollouts.trajectory.CreditOf`; it keeps the calls' records in memory until it is released."""

    trajectory: Trajectory

    def __call__(self, rewards: Mapping[RewardKey, float], rule: CreditRule) -> CallCredits:
        """Assigns credit; a reward without calls has no effect."""
        given = [
            AttemptReward(value=value, dimension=dimension, step=step, span_id=span_id)
            for (dimension, step, span_id), value in rewards.items()
        ]
        scored = attach(self.trajectory, given)
        settings = CreditSettings(option=CreditOption(rule.option), gamma=rule.gamma, weights=rule.weights)
        rows = assign_credit(scored, settings).rows
        return CallCredits(
            credits=tuple(tuple(credit or 0.0 for credit in row.credits) for row in rows),
            rewards=unit_rewards(scored, rule.weights).rewards,
        )
