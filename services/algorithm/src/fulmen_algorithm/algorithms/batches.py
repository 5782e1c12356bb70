"""Builds the rows of a training step from finished groups, and records the outcome of each group.

Groups are read from the feed of the run's own rollouts, or from storage. Rules: a rollout that failed or was not captured
completely is masked: left out and not scored; with `mask_truncated`, so is a truncated one. A group with too few
rollouts left, or whose advantages are all 0, is dropped and counted. Rows whose policy is too old are dropped and counted.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pstdev
from typing import Protocol

from fulmen_algorithm.algorithms.monitors import ConstraintMonitor, LengthLimits, LengthMonitor
from fulmen_algorithm.algorithms.options.model_rewards import ModelRewards
from fulmen_algorithm.algorithms.options.teacher import Teacher
from fulmen_algorithm.algorithms.reference_penalty import ReferencePenalty
from fulmen_algorithm.algorithms.sampling import sequence_row
from fulmen_algorithm.algorithms.scoring import ScoredRollout, Scorer, TokenNumbers
from fulmen_algorithm.losses.advantage_settings import ScoringSettings
from fulmen_algorithm.rollouts.admission import groups_settled
from fulmen_algorithm.rollouts.groups import INFRASTRUCTURE, FinishedGroup, FinishedRollout, failed_one
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.collapse import GROUPS, REWARD, SPREAD
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.progress import Consumed, Outcome
from fulmen_algorithm.training.rows import NO_VERSION, Row

LOST_TO_WARN = 16
"""Warn after this many groups in a row that were lost to infrastructure failures."""
LOST_STEPS = 10
"""The run fails after this many steps' worth of groups in a row were lost to infrastructure failures."""


class GroupSource(Protocol):
    """A source of finished groups, each delivered once."""

    async def poll(self, *, limit: int) -> list[FinishedGroup]:
        """Waits for at least one group and returns up to `limit`; returns none at the end of the step's groups.

        Raises:
            Interrupted: if the run was asked to stop.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of one training step.

    Attributes:
        rows: Rows with advantages.
        consumed: All groups consumed, in source order.
        metrics: Metrics of its collection.
    """

    rows: Sequence[Row]
    consumed: Sequence[Consumed]
    metrics: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Counts of one step."""

    rollouts: int = 0
    masked: int = 0
    stale_rows: int = 0
    rewards: list[float] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    """Why rollouts of groups with too few usable ones were of no use."""
    kept: int = 0
    counted: int = 0
    """Groups that count against the refill limit: those that the infrastructure failed do not."""
    lost_in_a_row: int = 0
    lost_to: Counter[str] = field(default_factory=Counter)
    """Failures of rollouts in the groups that were lost in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of a batch.

    Attributes:
        groups: Number of groups per training step.
        max_groups: Maximum number of groups that a step examines.
        max_staleness: Maximum staleness of a row, in training steps; None for no limit.
        lengths: Limits of lengths, beyond which rollouts are cut off or left out.
    """

    groups: int
    max_groups: int
    max_staleness: int | None
    lengths: LengthLimits


class BatchBuilder:
    """Collects the groups of one step after another."""

    def __init__(
        self,
        ctx: RunContext,
        *,
        source: GroupSource,
        limits: BatchLimits,
        scoring: ScoringSettings,
        policy: str = "",
        penalty: ReferencePenalty | None = None,
        teacher: Teacher | None = None,
        model_rewards: ModelRewards | None = None,
    ) -> None:
        """Initializes the builder.

        Args:
            ctx: The run.
            source: Source of the groups.
            limits: Limits of a batch.
            scoring: How rewards become advantages.
            policy: Policy whose sequences train; empty for all policies.
            penalty: KL penalty against the reference policy, subtracted from rewards; None for none.
            teacher: Adds to the advantages; None for none.
            model_rewards: Reward model that adds to the rewards; None for none.
        """
        self._ctx = ctx
        self._source = source
        self._limits = limits
        self._scorer = Scorer(scoring, policy=policy, guided=teacher is not None)
        self._penalty = penalty
        self._lengths = LengthMonitor(limits.lengths, ctx.notify)
        self._constraints = ConstraintMonitor(ctx.notify)
        self._teacher = teacher
        self._model_rewards = model_rewards
        self._consumed: list[Consumed] = []
        self._tally = _Tally()

    @property
    def seen(self) -> int:
        """Groups consumed in the present step."""
        return len(self._consumed)

    @property
    def kept(self) -> int:
        """Groups of the present step that will be trained on."""
        return self._tally.kept

    @property
    def settled(self) -> int:
        """Groups of the present step that need no refill; see `groups_settled`."""
        seen = self._tally.counted
        return groups_settled(
            kept=self.kept, seen=seen, groups_per_step=self._limits.groups, max_groups=self._limits.max_groups
        )

    async def collect(self, *, refill: Callable[[], Awaitable[None]] | None = None) -> Batch:
        """Collects groups from the source until enough of them can be trained on, or the step has no more.

        Args:
            refill: Called after groups were dropped to submit replacements; None if there are no further groups.

        Raises:
            Interrupted: if the run was asked to stop; nothing is consumed then.
            RunFailed: if all agents fail, or the infrastructure fails all rollouts.
        """
        started = time.monotonic()
        tally = self._tally = _Tally()
        kept: dict[str, list[ScoredRollout]] = {}
        self._consumed = []
        while len(kept) < self._limits.groups and not self._enough(tally):
            room = min(self._limits.groups - len(kept), self._limits.max_groups - tally.counted)
            groups = await self._source.poll(limit=room)
            if not groups:
                break
            found = await self._ctx.rollouts.trajectories(
                # A reward model may distinguish rollouts with equal rewards.
                [g for g in groups if self._model_rewards is not None or self._scorer.may_train(g.rollouts)]
            )
            if self._model_rewards is not None:
                groups = await self._model_rewards.added(groups, found)
            for group in groups:
                if usable := self._judge(group, found, tally):
                    kept[group.group_id] = usable
                self._count(group, tally, kept=bool(usable))
            if refill is not None and self.kept < self.seen:
                await refill()
        scored = [rollout for members in kept.values() for rollout in members]
        divergence: Mapping[str, float] = {}
        if self._penalty is not None and scored:
            scored, divergence = await self._penalty.penalised(scored)
        numbers = self._scorer.numbers(scored) if scored else []
        taught: Mapping[str, float] = {}
        if self._teacher is not None and numbers:
            numbers, taught = await self._teacher.guided(numbers)
        made = [self._row(each) for each in numbers]
        # All of an answer may be forced.
        rows = [row for row in made if row.trained_tokens]
        seconds = time.monotonic() - started
        return Batch(
            rows=rows,
            consumed=self._consumed,
            metrics={
                **self._metrics(tally, rows, seconds),
                **self._lengths.end_step(self._ctx.progress.step),
                **self._constraints.end_step(made),
                **_merging(scored),
                **_lengths(scored),
                **self._scorer.metrics(scored),
                **divergence,
                **taught,
                **(self._model_rewards.end_step() if self._model_rewards is not None else {}),
            },
        )

    def _enough(self, tally: _Tally) -> bool:
        """Returns whether the refill limit is reached; groups lost to infrastructure failures do not count.

        Raises:
            RunFailed: if it is reached and all agents failed.
        """
        if tally.counted < self._limits.max_groups:
            return False
        counted = [c for c in self._consumed if not _infrastructure_failed(c.group)]
        if all(c.outcome is Outcome.TOO_FEW_USABLE for c in counted):
            causes = ", ".join(f"{cause}: {count}" for cause, count in tally.causes.most_common(3))
            raise RunFailed(
                f"No rollout of {len(counted)} groups could be used ({causes}).{failed_one(c.group for c in counted)}"
            )
        return True

    def _count(self, group: FinishedGroup, tally: _Tally, *, kept: bool) -> None:
        """Counts a group that was dealt with.

        Raises:
            RunFailed: if too many groups in a row were lost to infrastructure failures.
        """
        tally.kept += kept
        if not _infrastructure_failed(group):
            tally.counted += 1
            tally.lost_in_a_row = 0
            tally.lost_to.clear()
            return
        tally.lost_in_a_row += 1
        tally.lost_to.update(r.failure for r in group.rollouts)
        lost = ", ".join(f"{cause}: {count}" for cause, count in tally.lost_to.most_common())
        what = f"The infrastructure failed {tally.lost_in_a_row} groups in a row ({lost})"
        where = f"Check the runners: `fulmen runners`.{failed_one([group])}"
        if tally.lost_in_a_row >= max(LOST_STEPS * self._limits.groups, 2 * LOST_TO_WARN):
            raise RunFailed(f"{what}, and no group between them succeeded. {where}")
        if tally.lost_in_a_row == LOST_TO_WARN:
            self._ctx.notify("warning", f"{what}; others are submitted in their place. {where}")

    def _judge(
        self, group: FinishedGroup, found: Mapping[str, RolloutTrajectory], tally: _Tally
    ) -> list[ScoredRollout]:
        """Returns the usable rollouts of a group; none if it is dropped."""
        rewards = {r.name: total for r in group.rollouts if (total := self._scorer.total(r)) is not None}
        minimum, outcome = self._scorer.min_rollouts, Outcome.NO_VARIANCE
        usable: list[ScoredRollout] = []
        tally.rollouts += len(group.rollouts)
        # A rollout without a reward may train by its teacher, but counts in no mean.
        tally.rewards += [rewards[r.name] for r in group.rollouts if r.name in rewards and r.all_rewards]
        if len(rewards) < minimum:
            outcome = Outcome.TOO_FEW_USABLE
        elif self._scorer.may_train(group.rollouts):
            for trajectory in (found[name] for name in rewards if name in found):
                self._constraints.count(trajectory.sequences)
                self._lengths.count(truncated=trajectory.truncated, longest_row=self._longest(trajectory))
            whole = [
                self._scorer.score(group.group_id, r, found[r.name])
                for r in group.rollouts
                if r.name in rewards and r.name in found and not self._cut(found[r.name])
            ]
            self._check_models(whole)
            usable = [fresh for scored in whole if (fresh := self._fresh(scored, tally)).sequences]
            tally.masked += len(group.rollouts) - len(usable)
            if len(usable) < minimum:
                outcome = Outcome.TOO_STALE if len(whole) >= minimum else Outcome.TOO_FEW_USABLE
            elif self._scorer.has_signal(usable):
                outcome = Outcome.TRAINED
        if outcome is Outcome.TOO_FEW_USABLE and not _infrastructure_failed(group):
            names = {scored.name for scored in usable}
            tally.causes.update(self._useless(r, found) for r in group.rollouts if r.name not in names)
        trained = tuple(sorted(scored.name for scored in usable)) if outcome is Outcome.TRAINED else ()
        self._consumed.append(Consumed(group=group, outcome=outcome, trained=trained))
        return usable if outcome is Outcome.TRAINED else []

    def _check_models(self, scored: Sequence[ScoredRollout]) -> None:
        if self._limits.max_staleness is not None:  # rollouts of other policies called models of their own
            for sequence in (s for rollout in scored for s in rollout.sequences):
                self._ctx.policy.check_model(sequence.role, sequence.model)

    def _cut(self, trajectory: RolloutTrajectory) -> str:
        """Returns the reason why a trajectory is left out; empty if it is used."""
        if trajectory.unusable:
            return trajectory.unusable
        lengths = self._limits.lengths
        if self._longest(trajectory) > lengths.token_budget:
            return f"longer than {lengths.token_budget} tokens (token_budget)"
        if lengths.mask_truncated and trajectory.truncated:
            return "an answer ended at its token limit (mask_truncated; max_tokens)"
        return self._scorer.problem(trajectory)

    def _longest(self, trajectory: RolloutTrajectory) -> int:
        return max((len(s.token_ids) for s in trajectory.sequences if self._scorer.trains(s)), default=0)

    def _useless(self, rollout: FinishedRollout, found: Mapping[str, RolloutTrajectory]) -> str:
        """Returns the reason why a rollout could not be used."""
        if missing := self._scorer.missing(rollout):
            return missing
        trajectory = found.get(rollout.name)
        if trajectory is None:
            return "the only one with a reward in its group"
        return self._cut(trajectory) or "too old"

    def _fresh(self, scored: ScoredRollout, tally: _Tally) -> ScoredRollout:
        """Leaves out the sequences with a token that is too old, or of a policy version that this run does not know."""
        limit = self._limits.max_staleness
        if limit is None:
            return scored
        step = self._ctx.progress.step
        fresh = scored.only(lambda s: all(then is not None and step - then <= limit for then in self._steps(s)))
        tally.stale_rows += len(scored.sequences) - len(fresh.sequences)
        return fresh

    def _steps(self, sequence: TokenSequence) -> list[int | None]:
        """Returns the training step of each sampled token's policy version; None for versions that are not this run's."""
        steps = {v: self._ctx.policy.step_of(v) for v in set(sequence.policy_versions)}
        pairs = zip(sequence.loss_mask, sequence.policy_versions, strict=True)
        return [steps[v] for sampled, v in pairs if sampled]

    def _row(self, numbers: TokenNumbers) -> Row:
        sequence, present = numbers.sequence, self._ctx.progress.step
        # Of versions that are not this run's there are rows only where none is too old: rollouts of other policies.
        steps = iter(present if step is None else step for step in self._steps(sequence))
        return sequence_row(
            numbers.rollout.name,
            sequence,
            advantages=numbers.advantages,
            # Counted in steps of this run: versions also count those of other runs and those discarded by a crash.
            versions=tuple(next(steps) if sampled else NO_VERSION for sampled in sequence.loss_mask),
            group=numbers.rollout.group,
            rewards=numbers.rewards,
            steps=numbers.steps,
            # A critic reads the rewards at the last tokens, forced or not.
            forced=() if numbers.rewards else sequence.forced,
        )

    def _metrics(self, tally: _Tally, rows: Sequence[Row], seconds: float) -> dict[str, float]:
        outcomes = [c.outcome for c in self._consumed]
        return {
            REWARD: sum(tally.rewards) / len(tally.rewards) if tally.rewards else 0.0,
            SPREAD: pstdev(tally.rewards) if tally.rewards else 0.0,
            GROUPS: float(self.seen),
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


def _merging(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """Counts the trained model calls, and the mean number of calls per row."""
    sequences = [sequence for rollout in scored for sequence in rollout.sequences]
    calls = sum(len(sequence.calls) for sequence in sequences)
    return {"model_calls": float(calls), "calls_per_row": calls / len(sequences)} if calls else {}


def _lengths(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """Counts the sampled tokens of the trained rollouts."""
    lengths = [sum(sum(sequence.loss_mask) for sequence in rollout.sequences) for rollout in scored]
    if not lengths:
        return {}
    return {"rollout_tokens_mean": sum(lengths) / len(lengths), "rollout_tokens_max": float(max(lengths))}


def _infrastructure_failed(group: FinishedGroup) -> bool:
    return not any(r.scored for r in group.rollouts) and all(r.failure in INFRASTRUCTURE for r in group.rollouts)
