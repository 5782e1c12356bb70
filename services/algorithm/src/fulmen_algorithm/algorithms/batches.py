"""Makes the rows of a training step out of finished groups, and says what became of each group.

Groups come from a source: the feed of the run's own rollouts, or what is stored. Rules: a rollout that failed, was cut off, or was not captured whole is masked, which means that it is left out and never
scored; a group with fewer than two rollouts left, or without variance, is dropped and counted; rows whose policy lags
too far are dropped and counted.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fulmen_algorithm.domain.context import RunContext
from fulmen_algorithm.domain.failure import RunFailed
from fulmen_algorithm.domain.groups import FinishedGroup, FinishedRollout, rewards_of
from fulmen_algorithm.domain.progress import Consumed, Outcome
from fulmen_algorithm.domain.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.training.advantages import StdNormalisation, group_advantages
from fulmen_algorithm.training.rows import NO_VERSION, Row

_INFRASTRUCTURE = frozenset({"INFRA", "LEASE_LOST"})


class GroupSource(Protocol):
    """Where finished groups come from, each once."""

    async def take(self, *, limit: int) -> list[FinishedGroup]:
        """Waits for at least one group and returns up to `limit`; none if there are no more for this step.

        Raises:
            Interrupted: if the run was asked to stop.
        """

    async def trajectories(self, groups: Sequence[FinishedGroup]) -> dict[str, RolloutTrajectory]:
        """Reads what the policy did in the successful rollouts of groups, by rollout name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one training step works on.

    Attributes:
        rows: Rows with advantages.
        consumed: Every group that was dealt with, in the order of the source.
        figures: What was measured on the way.
    """

    rows: Sequence[Row]
    consumed: Sequence[Consumed]
    figures: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Counts of one step."""

    rollouts: int = 0
    masked: int = 0
    stale_rows: int = 0
    rewards: list[float] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    """Why rollouts of groups with too few usable ones were of no use."""


class BatchBuilder:
    """Collects the groups of one step after another."""

    def __init__(
        self,
        ctx: RunContext,
        *,
        source: GroupSource,
        groups: int,
        most: int,
        max_staleness: int | None,
        mask_truncated: bool,
        token_budget: int,
        std: StdNormalisation,
    ) -> None:
        """Makes it.

        Args:
            ctx: The run.
            source: Where groups come from.
            groups: How many a step trains on.
            most: How many a step looks at, at most.
            max_staleness: Steps that a row's policy may lag behind; None for any number.
            mask_truncated: Whether rollouts that were cut off are left out.
            token_budget: Longer rows are left out.
            std: What centred rewards are divided by.
        """
        self._ctx = ctx
        self._source = source
        self._groups = groups
        self._most = most
        self._max_staleness = max_staleness
        self._mask_truncated = mask_truncated
        self._token_budget = token_budget
        self._std = std
        self._consumed: list[Consumed] = []

    @property
    def seen(self) -> int:
        """Groups that were dealt with in the step that is collected now."""
        return len(self._consumed)

    @property
    def kept(self) -> int:
        """Those of them that will be trained on."""
        return sum(not c.outcome.dropped for c in self._consumed)

    async def collect(self, *, refill: Callable[[], Awaitable[None]] | None = None) -> Batch:
        """Takes groups from the source until enough of them can be trained on, or it has no more for this step.

        Args:
            refill: Called after groups were dropped: it submits others in their place. None: there are no others.

        Raises:
            Interrupted: if the run was asked to stop; nothing is consumed then.
        """
        started = time.monotonic()
        tally = _Tally()
        kept: dict[str, dict[str, tuple[float, RolloutTrajectory]]] = {}
        self._consumed = []
        while len(kept) < self._groups and not self._enough(tally):
            groups = await self._source.take(limit=self._groups - len(kept))
            if not groups:
                break
            found = await self._source.trajectories([g for g in groups if _may_train(g)])
            for group in groups:
                if usable := self._judge(group, found, tally):
                    kept[group.group_id] = usable
            if refill is not None and self.kept < self.seen:
                await refill()
        rows = self._rows(kept) if kept else []
        seconds = time.monotonic() - started
        return Batch(rows=rows, consumed=self._consumed, figures=self._figures(tally, rows, seconds))

    def _enough(self, tally: _Tally) -> bool:
        """Tells whether the refill limit is reached; groups that the infrastructure failed do not count.

        Raises:
            RunFailed: if it is reached, and all that the agents did was to fail.
        """
        counted = [c for c in self._consumed if not _infrastructure_failed(c.group)]
        if len(counted) < self._most:
            return False
        if all(c.outcome is Outcome.TOO_FEW_USABLE for c in counted):
            causes = ", ".join(f"{cause}: {count}" for cause, count in tally.causes.most_common(3))
            raise RunFailed(f"No rollout of {len(counted)} groups could be used ({causes}).")
        return True

    def _judge(
        self, group: FinishedGroup, found: Mapping[str, RolloutTrajectory], tally: _Tally
    ) -> dict[str, tuple[float, RolloutTrajectory]]:
        """Decides about one group; returns its usable rollouts, or nothing if it is dropped."""
        rewards = rewards_of(group)
        tally.rollouts += len(group.rollouts)
        tally.rewards += rewards.values()
        outcome, usable = Outcome.NO_VARIANCE, {}
        if len(rewards) < 2:
            outcome = Outcome.TOO_FEW_USABLE
        elif len(set(rewards.values())) > 1:
            whole = {name: found[name] for name in rewards if name in found and self._whole(found[name])}
            fresh = {name: self._fresh(trajectory, tally) for name, trajectory in whole.items()}
            usable = {name: (rewards[name], t) for name, t in fresh.items() if t.sequences}
            tally.masked += len(group.rollouts) - len(usable)
            if len(usable) < 2:
                outcome = Outcome.TOO_STALE if len(whole) >= 2 else Outcome.TOO_FEW_USABLE
            elif len({reward for reward, _ in usable.values()}) > 1:
                outcome = Outcome.TRAINED
        if outcome is Outcome.TOO_FEW_USABLE and not _infrastructure_failed(group):
            tally.causes.update(self._useless(r, found) for r in group.rollouts if r.name not in usable)
        trained = tuple(sorted(usable)) if outcome is Outcome.TRAINED else ()
        self._consumed.append(Consumed(group=group, outcome=outcome, trained=trained))
        return usable if outcome is Outcome.TRAINED else {}

    def _whole(self, trajectory: RolloutTrajectory) -> bool:
        return not self._cut(trajectory)

    def _cut(self, trajectory: RolloutTrajectory) -> str:
        """Says why a trajectory is left out; empty if it is not."""
        if trajectory.unusable:
            return trajectory.unusable
        if any(len(s.token_ids) > self._token_budget for s in trajectory.sequences):
            return f"longer than {self._token_budget} tokens"
        if self._mask_truncated and trajectory.truncated:
            return "an answer ended at its token limit (mask_truncated; max_tokens)"
        return ""

    def _useless(self, rollout: FinishedRollout, found: Mapping[str, RolloutTrajectory]) -> str:
        """Says why a rollout could not be used."""
        if not rollout.scored:
            return rollout.failure or "no reward"
        trajectory = found.get(rollout.name)
        if trajectory is None:
            return "the only one with a reward in its group"
        return self._cut(trajectory) or "too old"

    def _fresh(self, trajectory: RolloutTrajectory, tally: _Tally) -> RolloutTrajectory:
        """Leaves out the sequences of which a token is too old."""
        if self._max_staleness is None:
            return trajectory
        step = self._ctx.progress.step
        fresh = tuple(s for s in trajectory.sequences if step - min(self._steps(s)) <= self._max_staleness)
        tally.stale_rows += len(trajectory.sequences) - len(fresh)
        return replace(trajectory, sequences=fresh)

    def _steps(self, sequence: TokenSequence) -> list[int]:
        """Returns after which training step each sampled token's policy was published; unknown counts as present."""
        present = self._ctx.progress.step
        steps = {v: self._ctx.policy.step_of(v) for v in set(sequence.policy_versions)}
        pairs = zip(sequence.loss_mask, sequence.policy_versions, strict=True)
        return [present if steps[v] is None else int(steps[v] or 0) for sampled, v in pairs if sampled]

    def _rows(self, kept: Mapping[str, Mapping[str, tuple[float, RolloutTrajectory]]]) -> list[Row]:
        rewards = {group: {name: reward for name, (reward, _) in members.items()} for group, members in kept.items()}
        advantages = group_advantages(rewards, std=self._std).advantages
        return [
            self._row(name, sequence, advantages[name])
            for members in kept.values()
            for name, (_, trajectory) in members.items()
            for sequence in trajectory.sequences
        ]

    def _row(self, name: str, sequence: TokenSequence, advantage: float) -> Row:
        steps = iter(self._steps(sequence))
        return Row(
            rollout_id=name,
            token_ids=sequence.token_ids,
            loss_mask=sequence.loss_mask,
            old_logprobs=sequence.logprobs,
            advantage=advantage,
            # Counted in steps of this run: versions also count what others published, and what a crash took back.
            policy_versions=tuple(next(steps) if sampled else NO_VERSION for sampled in sequence.loss_mask),
        )

    def _figures(self, tally: _Tally, rows: Sequence[Row], seconds: float) -> dict[str, float]:
        outcomes = [c.outcome for c in self._consumed]
        return {
            "reward_mean": sum(tally.rewards) / len(tally.rewards) if tally.rewards else 0.0,
            "rollouts": float(tally.rollouts),
            "rollouts_masked": float(tally.masked),
            "rows": float(len(rows)),
            "rows_stale": float(tally.stale_rows),
            "groups_trained": float(outcomes.count(Outcome.TRAINED)),
            "groups_no_variance": float(outcomes.count(Outcome.NO_VARIANCE)),
            "groups_too_few_usable": float(outcomes.count(Outcome.TOO_FEW_USABLE)),
            "groups_too_stale": float(outcomes.count(Outcome.TOO_STALE)),
            "groups_dropped": float(self.seen - self.kept),
            "collect_seconds": seconds,
        }


def _infrastructure_failed(group: FinishedGroup) -> bool:
    return not any(r.scored for r in group.rollouts) and all(r.failure in _INFRASTRUCTURE for r in group.rollouts)


def _may_train(group: FinishedGroup) -> bool:
    """Tells whether it is worth reading the group's spans."""
    rewards = rewards_of(group)
    return len(rewards) >= 2 and len(set(rewards.values())) > 1
