"""Summary of a rescoring: means, changed orders within groups, failures; and finding published scores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fulmen.errors import ResourceNotFound
from fulmen.rpc.services import Services
from fulmen.scores import KIND
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.rollout.rescore.partial import Compared

__all__ = ["Summary", "found_scores", "summary_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Metrics over all results.

    Attributes:
        rollouts: How many there are.
        scored: Those with rewards.
        old_mean: Mean final reward before, of those that had one and are scored; None if there are none.
        new_mean: Mean final reward now, of the same.
        moved: Rollouts whose rank within their group is another now.
        groups_moved: Groups with such a rollout.
        groups: Groups with two or more rollouts that have both rewards.
        failures: How many have none, by kind.
    """

    rollouts: int
    scored: int
    old_mean: float | None
    new_mean: float | None
    moved: int
    groups_moved: int
    groups: int
    failures: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Returns the metrics as JSON-ready values."""
        return {
            "rollouts": self.rollouts,
            "scored": self.scored,
            "reward_mean": {"old": self.old_mean, "new": self.new_mean},
            "order_changed": {"rollouts": self.moved, "groups": self.groups_moved, "of_groups": self.groups},
            "failures": self.failures,
        }

    def lines(self) -> list[str]:
        """Returns the metrics as lines of text."""
        said = [f"{self.scored} of {self.rollouts} rollouts scored."]
        if self.old_mean is not None and self.new_mean is not None:
            said.append(f"mean reward {self.old_mean:.4g} -> {self.new_mean:.4g}")
        if self.groups:
            said.append(f"{self.moved} rollouts in {self.groups_moved} of {self.groups} groups changed their order.")
        if self.failures:
            said.append("failed: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.failures.items())))
        return said


def summary_of(results: Sequence[Compared]) -> Summary:
    """Computes the summary."""
    pairs: list[tuple[float, float]] = []
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for each in results:
        if each.old is None or each.score.final is None:
            continue
        pairs.append((each.old, each.score.final))
        if each.score.group:
            groups[each.score.training_run, each.score.group].append(pairs[-1])
    moved = [_moved(group) for group in groups.values() if len(group) > 1]
    problems = [each.score.problem for each in results]
    return Summary(
        rollouts=len(results),
        scored=sum(problem is None for problem in problems),
        old_mean=sum(old for old, _ in pairs) / len(pairs) if pairs else None,
        new_mean=sum(new for _, new in pairs) / len(pairs) if pairs else None,
        moved=sum(moved),
        groups_moved=sum(bool(count) for count in moved),
        groups=len(moved),
        failures=dict(Counter(problem.kind for problem in problems if problem is not None)),
    )


def _moved(group: Sequence[tuple[float, float]]) -> int:
    """Counts group members whose rank within the group changed."""

    def ranks(values: list[float]) -> list[int]:
        return [sum(other < value for other in values) for value in values]

    before, now = ranks([old for old, _ in group]), ranks([new for _, new in group])
    return sum(one != other for one, other in zip(before, now, strict=True))


async def found_scores(client: Services, given: str) -> resource_pb2.ResourceVersion:
    """Returns the published scores of a name such as `scores.better@3`, by default the latest; an alias may follow the `@`.

    Raises:
        CommandFailed: if there is none, or it is something else.
    """
    resource, _, version = given.removeprefix("resources/").partition("@")
    name = f"resources/{resource}"
    if version:
        name += f"/versions/{version}" if version.isdecimal() else f"/aliases/{version}"
    try:
        answer = await client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=[name]))
    except ResourceNotFound:
        text = f"The scores {given} do not exist: `fulmen rollout rescore --name {resource}` makes some."
        raise CommandFailed(text, exit_code=Exit.NOT_FOUND) from None
    found: resource_pb2.ResourceVersion = answer.resources[0]
    if found.kind != KIND:
        raise CommandFailed(f"{found.name} contains no scores: its kind is {found.kind!r}.", exit_code=Exit.USAGE)
    return found
