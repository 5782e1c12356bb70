"""Computes a number for each trained token from the rewards of finished rollouts.

Statistics are over rollouts (or over one role's part in them) and not over rows, so that the number of rows of a
rollout has no effect. A rollout without a relevant reward is left out; it does not count as 0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fulmen.agent import FINAL_DIMENSION, RewardKey
from fulmen_algorithm.losses.advantage_settings import (
    OVERLONG,
    UNWEIGHTED,
    GaeAdvantage,
    NoAdvantage,
    RolloutCredit,
    ScoringSettings,
    StepGroupsCredit,
    StepReturnCredit,
)
from fulmen_algorithm.losses.advantages import (
    MIN_COMPARED,
    Sample,
    Step,
    compares_groups,
    has_signal,
    token_advantages,
)
from fulmen_algorithm.rollouts.groups import FinishedRollout
from fulmen_algorithm.rollouts.trajectory import CreditRule, RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.failure import RunFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """A rollout that can be trained on, with its rewards.

    Attributes:
        name: `projects/{project}/rollouts/{uuid}`.
        group: Its group.
        rewards: Final rewards by dimension.
        role_rewards: Final rewards of roles that have their own.
        sequences: Sequences that train.
        overlong: Penalty for length, 0 or less.
        credits: Credit of each call of each sequence; empty if credit is by rollout.
        unit_rewards: Reward of each step of the rollout; empty if credit is by rollout.
        penalties: Penalty subtracted from the reward of each token of each sequence; may be empty.
        task: The task, JSON; empty if it is not known.
    """

    name: str
    group: str
    rewards: Mapping[str, float]
    role_rewards: Mapping[str, float]
    sequences: tuple[TokenSequence, ...]
    overlong: float = 0.0
    credits: tuple[tuple[float, ...], ...] = ()
    unit_rewards: tuple[float, ...] = ()
    penalties: tuple[tuple[float, ...], ...] = ()
    task: bytes = b""

    def only(self, keep: Callable[[TokenSequence], bool]) -> "ScoredRollout":
        """Leaves sequences out."""
        kept = [index for index, sequence in enumerate(self.sequences) if keep(sequence)]
        return replace(
            self,
            sequences=tuple(self.sequences[i] for i in kept),
            credits=tuple(self.credits[i] for i in kept) if self.credits else (),
            penalties=tuple(self.penalties[i] for i in kept) if self.penalties else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """Per-token values of a row; `rewards` and `steps` are empty without a critic."""

    rollout: ScoredRollout
    sequence: TokenSequence
    advantages: tuple[float, ...]
    rewards: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Tokens of one call, or of a sequence with unknown calls."""

    sequence: int
    positions: Sequence[int]
    unit: int = 0
    credit: float = 0.0
    anchor: tuple[str, tuple[int, ...]] = field(default=("", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The sample of one advantage, and the positions of its tokens."""

    rollout: int
    sample: Sample
    segments: tuple[_Segment, ...]


class Scorer:
    """Scores the rollouts of a run by its settings."""

    def __init__(self, settings: ScoringSettings, *, policy: str = "", guided: bool = False) -> None:
        """Initializes the scorer.

        Args:
            settings: How rewards become advantages.
            policy: Only sequences sampled by it train; empty for all policies.
            guided: Whether a teacher adds to the advantages, so that every rollout trains.
        """
        self._settings = settings
        self._guided = guided
        self._policy = policy
        self._by_step = not isinstance(settings.credit, RolloutCredit)

    @property
    def min_rollouts(self) -> int:
        """Minimum number of usable rollouts in a group."""
        return MIN_COMPARED if compares_groups(self._settings) else 1

    def total(self, rollout: FinishedRollout) -> float | None:
        """Computes the weighted sum of the final rewards; None if the rollout is not scored."""
        finals = self._finals(rollout)
        weights = self._settings.rewards.weights
        if finals is None:
            return None
        return sum(value * (1.0 if weights is None else weights[name]) for name, value in finals.items())

    def missing(self, rollout: FinishedRollout) -> str:
        """Returns the reason why a rollout is not scored; empty if it is."""
        if not rollout.succeeded:
            return rollout.failure or "no reward"
        if self._finals(rollout) is not None:
            return ""
        weights = self._settings.rewards.weights or {}
        lacks = sorted(set(weights) - set(_final_rewards(rollout.all_rewards)))
        return f"no reward in {', '.join(lacks)}" if lacks else "no reward"

    def may_train(self, rollouts: Sequence[FinishedRollout]) -> bool:
        """Returns whether rollouts of a group may have different advantages, judged by their rewards alone."""
        scored = [(finals, self._role_rewards(r)) for r in rollouts if (finals := self._finals(r)) is not None]
        if len(scored) < self.min_rollouts:
            return False
        later = self._by_step or self._settings.overlong is not None or not compares_groups(self._settings)
        return later or self._guided or any(one != scored[0] for one in scored)

    def problem(self, trajectory: RolloutTrajectory) -> str:
        """Returns the reason why a trajectory cannot be scored; empty if it can."""
        if not any(self._of_policy(s) for s in trajectory.sequences):
            return f"no call of the policy {self._policy}"
        if not any(self.trains(s) for s in trajectory.sequences):
            return "no call of a role that trains"
        if self._by_step and (trajectory.credit_of is None or not all(s.calls for s in trajectory.sequences)):
            return "its steps are not known"
        return ""

    def trains(self, sequence: TokenSequence) -> bool:
        """Returns whether a sequence is of the policy and of a role that trains."""
        roles = self._settings.roles.train
        return self._of_policy(sequence) and (not roles or sequence.role in roles)

    def parts(self, rollout: FinishedRollout) -> dict[str, float]:
        """Returns the parts of a rollout's reward: those of roles, and the weighted dimensions."""
        if not rollout.succeeded:
            return {}
        weighed = (self._finals(rollout) or {}) if self._settings.rewards.weights is not None else {}
        by_role = {f"role_{role}_reward": value for role, value in self._role_rewards(rollout).items()}
        return by_role | {f"reward_{name}": value for name, value in weighed.items()}

    def score(self, group: str, rollout: FinishedRollout, trajectory: RolloutTrajectory) -> ScoredRollout:
        """Scores a rollout without `missing` whose trajectory has no `problem`; the records of its calls are freed."""
        found = ScoredRollout(
            name=rollout.name,
            group=group,
            rewards=self._finals(rollout) or {},
            role_rewards=self._role_rewards(rollout),
            sequences=trajectory.sequences,
            task=rollout.task,
        )
        overlong, penalty = self._settings.overlong, 0.0
        if overlong is not None:
            penalty = overlong.reward(sum(sum(s.loss_mask) for s in trajectory.sequences if self.trains(s)))
            found = replace(found, overlong=penalty)
        if self._by_step and trajectory.credit_of is not None:
            given, rule = self._credit_rule(rollout.all_rewards, penalty)
            credit = trajectory.credit_of(given, rule)
            found = replace(found, credits=credit.credits, unit_rewards=credit.rewards)
        return found.only(self.trains)

    def has_signal(self, rollouts: Sequence[ScoredRollout]) -> bool:
        """Returns whether the rollouts of one group have any non-zero advantage."""
        samples = [part.sample for part in self._parts(rollouts)]
        try:
            return bool(samples) and (has_signal(samples, self._settings) or self._guided)
        except ValueError as error:
            raise RunFailed(f"The rewards of group {rollouts[0].group} have no advantage: {error}") from error

    def numbers(self, rollouts: Sequence[ScoredRollout]) -> list[TokenNumbers]:
        """Computes the values of every row of a batch, in the order of the rollouts and their sequences."""
        parts = self._parts(rollouts)
        values = token_advantages([part.sample for part in parts], self._settings)
        by_role = self._settings.roles.baseline == "role"
        moving = {part.sample.group for part, value in zip(parts, values, strict=True) if value.any()}
        filled: dict[tuple[int, int], list[float]] = {}
        for part, value in zip(parts, values, strict=True):
            if by_role and not self._guided and part.sample.group not in moving:
                # A role whose part in the group carries no signal is left out, as a whole group would be.
                continue
            numbers = iter(value.tolist())
            for segment in part.segments:
                sequence = rollouts[part.rollout].sequences[segment.sequence]
                own = filled.setdefault((part.rollout, segment.sequence), [0.0] * len(sequence.token_ids))
                for position in segment.positions:
                    own[position] = next(numbers)
        return [self._numbers(rollouts[r], s, tuple(filled[r, s])) for r, s in sorted(filled)]

    def metrics(self, rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
        """Returns metrics of the batch: by dimension if rewards have weights, by role if there are several."""
        found: dict[str, float] = {}
        for name in sorted(self._settings.rewards.weights or ()):
            found |= _mean(f"reward_{name}", (r.rewards[name] for r in rollouts if name in r.rewards))
        if self._settings.overlong is not None:
            found |= _mean(f"reward_{OVERLONG}", (r.overlong for r in rollouts))
        roles = sorted({s.role for r in rollouts for s in r.sequences})
        for role in roles if len(roles) > 1 or any(roles) else ():
            rows = [s for r in rollouts for s in r.sequences if s.role == role]
            label = f"role_{role or 'none'}"
            found[f"{label}_rows"] = float(len(rows))
            found[f"{label}_tokens"] = float(sum(sum(s.loss_mask) for s in rows))
            found |= _mean(f"{label}_reward", (r.role_rewards[role] for r in rollouts if role in r.role_rewards))
        return found

    def _numbers(self, rollout: ScoredRollout, index: int, values: tuple[float, ...]) -> TokenNumbers:
        sequence = rollout.sequences[index]
        if not isinstance(self._settings.advantage, GaeAdvantage):
            return TokenNumbers(rollout=rollout, sequence=sequence, advantages=values)
        steps = [0] * len(values)
        for call in sequence.calls:
            steps[call.start : call.end] = [call.unit] * (call.end - call.start)
        nothing = (0.0,) * len(values)
        return TokenNumbers(rollout=rollout, sequence=sequence, advantages=nothing, rewards=values, steps=tuple(steps))

    def _parts(self, rollouts: Sequence[ScoredRollout]) -> list[_Part]:
        parts = []
        for index, rollout in enumerate(rollouts):
            if self._settings.roles.baseline == "group":
                parts.append(self._part(index, rollout, rollout.sequences, rollout.group, rollout.rewards))
                continue
            for role in dict.fromkeys(s.role for s in rollout.sequences):
                rewards: Mapping[str, float] = rollout.rewards
                if role in self._settings.roles.rewards:
                    if role not in rollout.role_rewards:
                        continue
                    rewards = {UNWEIGHTED: rollout.role_rewards[role]}
                own = [s for s in rollout.sequences if s.role == role]
                parts.append(self._part(index, rollout, own, (rollout.group, role), rewards))
        return parts

    def _part(
        self,
        index: int,
        rollout: ScoredRollout,
        sequences: Sequence[TokenSequence],
        group: str | tuple[str, str],
        rewards: Mapping[str, float],
    ) -> _Part:
        chosen = {id(s) for s in sequences}
        segments = sorted(
            (
                segment
                for place, sequence in enumerate(rollout.sequences)
                if id(sequence) in chosen
                for segment in _segments(place, sequence, rollout.credits[place] if rollout.credits else ())
            ),
            key=lambda each: (each.unit, each.sequence, each.positions[0]),
        )
        return _Part(
            rollout=index,
            segments=tuple(segments),
            sample=Sample(
                key=f"{rollout.name} {group}",
                group=group,
                rewards=rewards,
                overlong=rollout.overlong,
                tokens=sum(len(s.positions) for s in segments),
                steps=_steps(segments, rollout.unit_rewards) if self._by_step else (),
                penalties=tuple(rollout.penalties[s.sequence][at] for s in segments for at in s.positions)
                if rollout.penalties
                else (),
            ),
        )

    def _finals(self, rollout: FinishedRollout) -> dict[str, float] | None:
        """Returns the relevant final rewards by dimension; None if the rollout is not scored."""
        if not rollout.succeeded:
            return None
        weights = self._settings.rewards.weights
        # Where steps have credit, rewards of steps alone are enough.
        enough = self._by_step and any(step is not None or span for _, step, span in rollout.all_rewards)
        enough = enough or isinstance(self._settings.advantage, NoAdvantage)
        if weights is None:
            return {FINAL_DIMENSION: rollout.reward} if rollout.reward is not None else {} if enough else None
        found = {name: value for name, value in _final_rewards(rollout.all_rewards).items() if name in weights}
        return found if enough or len(found) == len(weights) else None

    def _role_rewards(self, rollout: FinishedRollout) -> dict[str, float]:
        finals = _final_rewards(rollout.all_rewards)
        return {role: finals[name] for role, name in self._settings.roles.rewards.items() if name in finals}

    def _of_policy(self, sequence: TokenSequence) -> bool:
        return not self._policy or sequence.policy in ("", self._policy)

    def _credit_rule(
        self, rewards: Mapping[RewardKey, float], penalty: float
    ) -> tuple[Mapping[RewardKey, float], CreditRule]:
        """Returns the rule of credit; the length penalty is a part of the final reward."""
        weights = self._settings.rewards.weights
        if self._settings.overlong is not None and weights is None:
            finals = _final_rewards(rewards)
            name = next(iter(finals)) if len(finals) == 1 else FINAL_DIMENSION
            rewards = {**rewards, (name, None, b""): finals.get(name, 0.0) + penalty}
        elif self._settings.overlong is not None and weights is not None:
            rewards, weights = {**rewards, (OVERLONG, None, b""): penalty}, {**weights, OVERLONG: 1.0}
        match self._settings.credit:
            case StepReturnCredit(option=option, gamma=gamma):
                return rewards, CreditRule(
                    option=option, gamma=gamma if option == "discounted" else None, weights=weights
                )
            case StepGroupsCredit(gamma=gamma):
                return rewards, CreditRule(option="discounted", gamma=gamma, weights=weights)
            case RolloutCredit():
                raise AssertionError("credit is not by step")


def _segments(place: int, sequence: TokenSequence, earned: Sequence[float]) -> list[_Segment]:
    """Splits a sequence into its calls; a sequence with unknown calls is one segment."""
    if not sequence.calls:
        positions = [position for position, sampled in enumerate(sequence.loss_mask) if sampled]
        return [_Segment(sequence=place, positions=positions)] if positions else []
    read_from, found = 0, []
    for index, call in enumerate(sequence.calls):
        anchor = sequence.role, sequence.token_ids[read_from : call.start]
        read_from = call.end
        if call.start < call.end:
            credit = earned[index] if earned else 0.0
            found.append(
                _Segment(
                    sequence=place,
                    positions=range(call.start, call.end),
                    unit=call.unit,
                    credit=credit,
                    anchor=anchor,
                )
            )
    return found


def _steps(segments: Sequence[_Segment], unit_rewards: Sequence[float]) -> tuple[Step, ...]:
    """Builds a step from each segment; the reward of a missing unit (stale, of another role) is added to the previous
    one.

    The first remaining unit also gets the rewards of the units before it.
    """
    rewards = [0.0] * len(segments)
    for unit, reward in enumerate(unit_rewards):
        there = [index for index, segment in enumerate(segments) if segment.unit <= unit]
        if segments:
            rewards[there[-1] if there else 0] += reward
    return tuple(
        Step(unit=s.unit, tokens=len(s.positions), reward=reward, credit=s.credit, anchor=s.anchor)
        for s, reward in zip(segments, rewards, strict=True)
    )


def _final_rewards(rewards: Mapping[RewardKey, float]) -> dict[str, float]:
    return {name: value for (name, step, span), value in rewards.items() if step is None and not span}


def _mean(name: str, values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {f"{name}_mean": sum(found) / len(found)} if found else {}
