"""Credit assignment: converts the rewards of an attempt to one number per model call.

Definitions. F is the weighted sum of the final rewards; r(c) is the weighted sum of the rewards attached to call c.
The calls of one step are a unit, and so is each call without a step; units are in order of the start of their first
call, u = 0 to U.

| option | credit of a call of unit u | source |
|---|---|---|
| `final` | F | outcome supervision, arXiv:2402.03300 section 4.1.2; arXiv:2508.03680 |
| `last_step` | F if u = U, else 0 | Agent Lightning 1.0, which gives the last triplet the reward |
| `per_step` | r(c), plus F if u = U | the plain reward of a Markov decision process |
| `discounted` | G(u) = R(u) + gamma G(u + 1) | return, Sutton and Barto (2018), equation 3.8 |
| `split` | F divided by the number of rows | |

R(u) includes each reward once: a reward that scores several units counts in the last of them, and F in unit U.

Advantages are not computed here, but once per rollout, over its group, from F; see docs/trajectories.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from fulmen.agent import FINAL_DIMENSION
from fulmen.trajectories.rewards import ScoredRow, ScoredTrajectory
from fulmen.trajectories.rows import RowCall
from fulmen.trajectories.trajectory import Trajectory


class CreditOption(StrEnum):
    """Formula of the credit; see the module."""

    FINAL = "final"
    LAST_STEP = "last_step"
    PER_STEP = "per_step"
    DISCOUNTED = "discounted"
    SPLIT = "split"


class CreditSettingsInvalid(ValueError):
    """The settings are invalid; the text names every problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """Settings of the credit assignment.

    Attributes:
        option: Formula.
        gamma: Discount per unit, above 0 and at most 1; required by `discounted`, not allowed otherwise.
        weights: Weight by dimension, finite; other dimensions do not count. None: the dimension `reward` with weight
            1, or, without it, the only dimension.
    """

    option: CreditOption = CreditOption.FINAL
    gamma: float | None = None
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            CreditSettingsInvalid: If they are contradictory or out of range.
        """
        problems = []
        if self.option not in set(CreditOption):
            problems.append(f"option is {self.option!r}, not one of {', '.join(CreditOption)}")
        if self.option == CreditOption.DISCOUNTED:
            if not _is_number(self.gamma) or not 0 < float(self.gamma or 0) <= 1:
                problems.append(f"gamma is {self.gamma!r}, not a number greater than 0 and at most 1")
        elif self.gamma is not None:
            problems.append("gamma is only for the option discounted")
        if self.weights is not None:
            if not self.weights:
                problems.append("weights has no dimensions")
            wrong = [name for name, weight in self.weights.items() if not _is_number(weight)]
            problems += [f"the weight of {name} is {self.weights[name]!r}, not a finite number" for name in wrong]
        if problems:
            raise CreditSettingsInvalid("Credit: " + "; ".join(problems) + ".")

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> CreditSettings:
        """Reads the settings from a table of a configuration file.

        Raises:
            CreditSettingsInvalid: If a key is unknown or a value is invalid.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(table) - known):
            raise CreditSettingsInvalid(f"Credit: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}.")
        option = table.get("option", CreditOption.FINAL)
        weights = table.get("weights")
        if weights is not None and not isinstance(weights, Mapping):
            raise CreditSettingsInvalid(f"Credit: weights is {weights!r}, not a table from dimension to weight.")
        given = CreditOption(option) if option in set(CreditOption) else option
        return cls(option=given, gamma=table.get("gamma"), weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedRow:
    """A row with the credit of each of its calls.

    Attributes:
        scored: The row with its rewards.
        credits: Credit of each call of the row, unitless; None for calls without a counted reward.
    """

    scored: ScoredRow
    credits: tuple[float | None, ...]

    @property
    def reward(self) -> float | None:
        """The credit of the row if all its calls have the same one; otherwise None."""
        return self.credits[0] if len(set(self.credits)) == 1 else None

    def per_token(self, *, masked: float = 0.0) -> tuple[float, ...]:
        """Returns the credit of each response token; `masked` for unsampled tokens and calls without credit."""
        result = [masked] * len(self.scored.row.response_ids)
        for call, credit in zip(self.scored.row.calls, self.credits, strict=True):
            if credit is not None:
                result[call.start : call.end] = [credit] * (call.end - call.start)
        return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """The credit of all rows of an attempt.

    Attributes:
        rows: Credited rows, in the order of the trajectory's.
        missing: Weighted dimensions without a reward in this attempt; counted as 0.
        ignored: Dimensions of the attempt's rewards that did not count.
    """

    rows: tuple[CreditedRow, ...]
    missing: tuple[str, ...]
    ignored: tuple[str, ...]


def assign_credit(scored: ScoredTrajectory, settings: CreditSettings) -> Credits:
    """Assigns credit to every call of a trajectory."""
    final_weights, call_weights = _weights(scored, settings, final=True), _weights(scored, settings, final=False)
    by_call = [_call_sums(row, call_weights) for row in scored.rows]
    final = _weighted_final(scored, final_weights)
    match settings.option:
        case CreditOption.FINAL:
            earned = [[final] * len(sums) for sums in by_call]
        case CreditOption.SPLIT:
            share = None if final is None else final / max(1, len(scored.rows))
            earned = [[share] * len(sums) for sums in by_call]
        case CreditOption.LAST_STEP:
            units = call_units(scored.trajectory)
            last = max((unit for row in units for unit in row), default=0)
            earned = [[None if final is None else final * (unit == last) for unit in row] for row in units]
        case CreditOption.PER_STEP:
            earned = _per_step(scored, by_call, final)
        case CreditOption.DISCOUNTED:
            earned = _discounted(scored, call_weights, final, gamma=float(settings.gamma or 0))
    given = {each.dimension for each in scored.rewards}
    used = set(final_weights) | (set(call_weights) if settings.option in _OF_CALLS else set())
    return Credits(
        rows=tuple(CreditedRow(scored=row, credits=tuple(each)) for row, each in zip(scored.rows, earned, strict=True)),
        missing=tuple(sorted(set(settings.weights or ()) - given)),
        ignored=tuple(sorted(given - used)),
    )


_OF_CALLS = frozenset({CreditOption.PER_STEP, CreditOption.DISCOUNTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRewards:
    """The rewards of the units of a trajectory; see the module.

    Attributes:
        units: Unit of each call, by row.
        rewards: R(u) of each unit.
    """

    units: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


def unit_rewards(scored: ScoredTrajectory, weights: Mapping[str, float] | None = None) -> UnitRewards:
    """Returns the rewards of every unit; `weights` as in `CreditSettings`."""
    settings = CreditSettings(weights=weights)
    units = call_units(scored.trajectory)
    earned = _unit_sums(scored, units, _weights(scored, settings, final=False)) or {}
    count = 1 + max((unit for row in units for unit in row), default=-1)
    rewards = [earned.get(unit, 0.0) for unit in range(count)]
    if count:
        rewards[-1] += _weighted_final(scored, _weights(scored, settings, final=True)) or 0.0
    return UnitRewards(units=units, rewards=tuple(rewards))


def call_units(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    """Returns the unit of each call of each row, from 0, in order of the start of their first calls."""
    calls = sorted((each for row in trajectory.rows for each in row.calls), key=_start)
    places: dict[int | bytes, int] = {}
    for each in calls:
        places.setdefault(_unit_key(each), len(places))
    return tuple(tuple(places[_unit_key(each)] for each in row.calls) for row in trajectory.rows)


def _weights(scored: ScoredTrajectory, settings: CreditSettings, *, final: bool) -> Mapping[str, float]:
    """Returns the weights of the counted dimensions, of final rewards or of rewards of calls."""
    given = {each.dimension for each in scored.rewards if each.is_final == final}
    if settings.weights is not None:
        return {name: weight for name, weight in settings.weights.items() if name in given}
    if FINAL_DIMENSION in given:
        return {FINAL_DIMENSION: 1.0}
    return dict.fromkeys(given, 1.0) if len(given) == 1 else {}


def _weighted_final(scored: ScoredTrajectory, weights: Mapping[str, float]) -> float | None:
    counted = [
        weights[each.dimension] * each.value for each in scored.rewards if each.is_final and each.dimension in weights
    ]
    return math.fsum(counted) if counted else None


def _call_sums(row: ScoredRow, weights: Mapping[str, float]) -> list[float | None]:
    """Returns r(c) of each call of a row; None for calls without a counted reward."""
    sums: list[float | None] = [None] * len(row.row.calls)
    for each in row.ranges:
        if each.reward.dimension in weights:
            sums[each.call] = (sums[each.call] or 0.0) + weights[each.reward.dimension] * each.reward.value
    return sums


def _per_step(
    scored: ScoredTrajectory, by_call: list[list[float | None]], final: float | None
) -> list[list[float | None]]:
    if final is None and all(each is None for sums in by_call for each in sums):
        return by_call
    units = call_units(scored.trajectory)
    last = max((unit for row in units for unit in row), default=0)
    return [
        [(own or 0.0) + (final or 0.0) * (unit == last) for own, unit in zip(sums, row, strict=True)]
        for sums, row in zip(by_call, units, strict=True)
    ]


def _discounted(
    scored: ScoredTrajectory, weights: Mapping[str, float], final: float | None, *, gamma: float
) -> list[list[float | None]]:
    units = call_units(scored.trajectory)
    earned = _unit_sums(scored, units, weights)
    if final is None and earned is None:
        return [[None] * len(row) for row in units]
    count = 1 + max((unit for row in units for unit in row), default=-1)
    returns = [0.0] * (count + 1)
    for unit, value in (earned or {}).items():
        returns[unit] += value
    if count:
        returns[count - 1] += final or 0.0
    for unit in range(count - 1, -1, -1):
        returns[unit] += gamma * returns[unit + 1]
    return [[returns[unit] for unit in row] for row in units]


def _unit_sums(
    scored: ScoredTrajectory, units: Sequence[Sequence[int]], weights: Mapping[str, float]
) -> dict[int, float] | None:
    """Sums the rewards of calls by the last unit that each scores; None for units without a counted reward."""
    ends: dict[tuple[str, int | None, bytes], tuple[int, float]] = {}
    for row, places in zip(scored.rows, units, strict=True):
        for each in row.ranges:
            reward = each.reward
            if reward.dimension in weights:
                key = reward.dimension, reward.step, reward.span_id
                unit = max(places[each.call], ends[key][0] if key in ends else 0)
                ends[key] = unit, weights[reward.dimension] * reward.value
    if not ends:
        return None
    sums: dict[int, float] = {}
    for unit, value in ends.values():
        sums[unit] = sums.get(unit, 0.0) + value
    return sums


def _start(each: RowCall) -> tuple[int, int, bytes]:
    return each.call.start_time_ns, each.call.choice, each.call.span_id


def _unit_key(each: RowCall) -> int | bytes:
    return each.call.span_id if each.step is None else each.step


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
