"""Attaches the rewards of an attempt to its rows: by scored span, by step, or to all.

Invariants: a reward is attached to at least one call or row, or is in `unattached` with the reason; rewards of single
calls remain ranges of tokens, and are neither summed nor spread over the row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fulmen.agent import FINAL_DIMENSION
from fulmen.store.v1 import reward_pb2
from fulmen.trajectories.rows import Row
from fulmen.trajectories.trajectory import Trajectory


class UnattachedReason(StrEnum):
    """Why a reward scores no row.

    NO_ROWS: it scores the attempt, which has no row. UNKNOWN_SPAN: the attempt has no such span. NO_CALL: the span
    contains no call of the policy. UNKNOWN_STEP: the step has no call. DROPPED: all calls of the span or step are
    dropped.
    """

    NO_ROWS = "no_rows"
    UNKNOWN_SPAN = "unknown_span"
    NO_CALL = "no_call"
    UNKNOWN_STEP = "unknown_step"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReward:
    """A reward of an attempt.

    Attributes:
        value: Value, finite, unitless.
        dimension: Dimension.
        step: The scored agent step, from 0; None scores the whole attempt.
        span_id: Id of the scored span, eight bytes; empty for the step or the whole attempt. Takes precedence over
            `step`.
    """

    value: float
    dimension: str = FINAL_DIMENSION
    step: int | None = None
    span_id: bytes = b""

    @property
    def is_final(self) -> bool:
        """Whether it scores the whole attempt."""
        return self.step is None and not self.span_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRange:
    """A reward of one call of a row.

    Attributes:
        reward: The reward.
        call: Index of the call in the row's `calls`.
        start: Index of the call's first token in the row's `response_ids`.
        end: Index after its last token.
    """

    reward: AttemptReward
    call: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A row with its rewards.

    Attributes:
        row: The row.
        final: The attempt's final rewards by dimension; the same for every row.
        ranges: Rewards of single calls, in order of their tokens; a reward of several calls has a range for each.
    """

    row: Row
    final: Mapping[str, float]
    ranges: tuple[RewardRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattached:
    """A reward that scores no row, and the reason."""

    reward: AttemptReward
    reason: UnattachedReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory with its rewards.

    Attributes:
        trajectory: The scored trajectory.
        rewards: All rewards, each dimension, step and span once.
        rows: Scored rows, in the order of the trajectory's.
        unattached: Rewards that score no row.
    """

    trajectory: Trajectory
    rewards: tuple[AttemptReward, ...]
    rows: tuple[ScoredRow, ...]
    unattached: tuple[Unattached, ...]


def read_rewards(messages: Iterable[reward_pb2.Reward]) -> tuple[AttemptReward, ...]:
    """Reads the rewards of an attempt from the store's messages."""
    return tuple(
        AttemptReward(
            value=each.value,
            dimension=each.dimension or FINAL_DIMENSION,
            step=each.step if each.HasField("step") else None,
            span_id=each.span_id,
        )
        for each in messages
    )


def attach(trajectory: Trajectory, rewards: Iterable[AttemptReward]) -> ScoredTrajectory:
    """Attaches rewards to the rows of a trajectory.

    A reward with a span scores the model calls that are the span or within it, at any depth; one with a step scores the
    calls of that step; any other scores the attempt, and so every row. Of rewards with the same dimension, step and
    span the last one counts.
    """
    unique = tuple({(each.dimension, each.step, each.span_id): each for each in rewards}.values())
    final = {each.dimension: each.value for each in unique if each.is_final}
    places = _Places(trajectory, by_span=any(each.span_id for each in unique))
    ranges: dict[int, list[RewardRange]] = defaultdict(list)
    unattached: list[Unattached] = []
    for reward in unique:
        if reward.is_final:
            if not trajectory.rows:
                unattached.append(Unattached(reward=reward, reason=UnattachedReason.NO_ROWS))
            continue
        found = places.of(reward)
        if isinstance(found, UnattachedReason):
            unattached.append(Unattached(reward=reward, reason=found))
            continue
        for row, call in found:
            scored = trajectory.rows[row].calls[call]
            ranges[row].append(RewardRange(reward=reward, call=call, start=scored.start, end=scored.end))
    rows = tuple(
        ScoredRow(row=row, final=final, ranges=tuple(sorted(ranges[index], key=lambda each: each.start)))
        for index, row in enumerate(trajectory.rows)
    )
    return ScoredTrajectory(trajectory=trajectory, rewards=unique, rows=rows, unattached=tuple(unattached))


_Place = tuple[int, int]


class _Places:
    """Positions (row and index in it) of the calls of spans and steps; dropped calls have none."""

    def __init__(self, trajectory: Trajectory, *, by_span: bool) -> None:
        self._tree = trajectory.tree
        self._spans: dict[bytes, list[_Place | None]] = defaultdict(list)
        self._steps: dict[int, list[_Place | None]] = defaultdict(list)
        for index, row in enumerate(trajectory.rows):
            for place, each in enumerate(row.calls):
                self._put(each.call.span_id, each.step, (index, place), by_span=by_span)
        for dropped in trajectory.dropped:
            self._put(dropped.call.span_id, dropped.step, None, by_span=by_span)

    def of(self, reward: AttemptReward) -> Sequence[_Place] | UnattachedReason:
        """Returns the calls scored by a reward of a span or step, or why there are none."""
        if reward.span_id:
            places = self._spans.get(reward.span_id)
            if places is None:
                known = reward.span_id in self._tree
                return UnattachedReason.NO_CALL if known else UnattachedReason.UNKNOWN_SPAN
        else:
            places = self._steps.get(reward.step) if reward.step is not None else None
            if places is None:
                return UnattachedReason.UNKNOWN_STEP
        kept = [place for place in places if place is not None]
        return kept or UnattachedReason.DROPPED

    def _put(self, span_id: bytes, step: int | None, place: _Place | None, *, by_span: bool) -> None:
        if step is not None:
            self._steps[step].append(place)
        if by_span:
            for each in self._tree.upward(span_id):
                self._spans[each].append(place)
