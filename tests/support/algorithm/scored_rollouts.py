"""Settings of scoring, and rollouts of a team of two roles."""

from fulmen.agent import RewardKey
from fulmen_algorithm.losses.advantage_settings import ScoringSettings
from fulmen_algorithm.rollouts.groups import FinishedRollout
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenCall, TokenSequence

FINAL: RewardKey = ("reward", None, b"")


def rollout(name: str, reward: float | None = None, **more: float) -> FinishedRollout:
    """A rollout that ended well, with final rewards."""
    rewards: dict[RewardKey, float] = {(dimension, None, b""): value for dimension, value in more.items()}
    if reward is not None:
        rewards[FINAL] = reward
    return FinishedRollout(name=name, attempt=f"{name}/attempts/1", succeeded=True, reward=reward, rewards=rewards)


def settings_of(**values: object) -> ScoringSettings:
    return ScoringSettings.model_validate(values)


def sequence(role: str, *calls: tuple[int, int]) -> TokenSequence:
    """A row of a role: (unit, tokens) of each call, each after one token that is read."""
    mask: list[bool] = []
    made = []
    for unit, tokens in calls:
        mask += [False] + [True] * tokens
        made.append(TokenCall(start=len(mask) - tokens, end=len(mask), unit=unit))
    count = len(mask)
    return TokenSequence(
        token_ids=tuple(range(count)),
        loss_mask=tuple(mask),
        logprobs=(0.0,) * count,
        policy_versions=(0,) * count,
        role=role,
        calls=tuple(made),
    )


def team(name: str, reward: float, plan: float | None, workers: int) -> tuple[FinishedRollout, RolloutTrajectory]:
    """A planner and some workers; the planner may have a reward of its own."""
    made = rollout(name, reward, **({} if plan is None else {"plan": plan}))
    rows = [sequence("planner", (0, 2)), *(sequence("worker", (1 + n, 1)) for n in range(workers))]
    return made, RolloutTrajectory(sequences=tuple(rows))
