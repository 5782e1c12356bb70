"""Groups of stored rollouts with scores of another grader, filtered to those that can be trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

from fulmen.errors import Violation
from fulmen.scores import RolloutScore, ScoresInvalid, read_scores
from fulmen_algorithm.rollouts.groups import FinishedRollout
from fulmen_algorithm.runs.creation.inputs import LINES_REPORTED

MIN_MEMBERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroups:
    """Groups that can be trained on, and the number of those that cannot.

    Attributes:
        groups: The scored members of each, in order of the groups' first members.
        too_few: Groups with fewer than two members that have a reward.
        no_variance: Groups whose rewards are all equal.
        singles: Every rollout that has a reward, whatever its group.
    """

    groups: tuple[tuple[FinishedRollout, ...], ...]
    too_few: int = 0
    no_variance: int = 0
    singles: tuple[FinishedRollout, ...] = ()


def read_scored_groups(content: bytes, *, field: str) -> tuple[ScoredGroups | None, list[Violation]]:
    """Reads scores and groups them; returns None and the violations of a file that cannot be read."""
    try:
        scores = read_scores(content)
    except ScoresInvalid as error:
        bad = [
            Violation(field=f"{field}:{number}" if number else field, description=text)
            for number, text in error.problems[:LINES_REPORTED]
        ]
        rest = len(error.problems) - len(bad)
        more = [Violation(field=field, description=f"{rest} more lines are malformed")] if rest else []
        return None, [*bad, *more]
    return scored_groups(scores.rollouts), []


def no_groups(found: ScoredGroups) -> str:
    """Returns the reason why an algorithm that compares rollouts cannot train on these; empty if it can."""
    if found.groups:
        return ""
    return (
        f"no group can be trained on: {found.too_few} have fewer than two scored rollouts, in {found.no_variance} "
        "all have the same score"
    )


def scored_groups(rollouts: Sequence[RolloutScore]) -> ScoredGroups:
    """Sorts rollouts by run and group; those without a reward are left out, those without a group are singles."""
    members: dict[tuple[str, str], list[FinishedRollout]] = {}
    singles: list[FinishedRollout] = []
    for each in rollouts:
        group = members.setdefault((each.training_run, each.group), []) if each.group else []
        if each.rewards:
            member = FinishedRollout(
                name=each.rollout, attempt=each.attempt, succeeded=True, reward=each.final, rewards=each.rewards
            )
            group.append(member)
            singles.append(member)
    many = [group for group in members.values() if len(group) >= MIN_MEMBERS]
    varied = [tuple(group) for group in many if any(member.rewards != group[0].rewards for member in group)]
    return ScoredGroups(
        groups=tuple(varied),
        too_few=len(members) - len(many),
        no_variance=len(many) - len(varied),
        singles=tuple(singles),
    )
