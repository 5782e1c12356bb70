"""Answers to learn from: of a data set of preferences, of published scores, or of another run's stored rollouts."""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fulmen_algorithm.algorithms.offline.stored_rows import imitable_rows
from fulmen_algorithm.algorithms.sampling import within
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.creation.inputs import Preference
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.rows import Row, sft_row

SOURCES = ("preferences", "scores", "rollouts")
"""Inputs with answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, or all turns of a rollout.

    Attributes:
        name: The rollout, or the line of the data set and which answer of it.
        group: What it answers, by which answers are held out together.
        rows: One or more, in which exactly the sampled tokens train.
        reward: Its reward; 1 of a chosen answer, 0 of a rejected one.
    """

    name: str
    group: str
    rows: tuple[Row, ...]
    reward: float

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(row.trained_tokens for row in self.rows)


Pair = tuple[Answer, Answer]
"""A chosen answer and a rejected one to the same prompt."""
Example = TypeVar("Example")


async def preferred_pairs(ctx: RunContext, *, token_budget: int) -> list[Pair]:
    """Tokenises the run's data set of preferences.

    Raises:
        RunFailed: if a line has more tokens than the budget, or the chat template does not distinguish its answers.
    """
    # In a thread: a row takes milliseconds, and there may be thousands.
    return await asyncio.to_thread(_preferred, ctx, token_budget)


def _preferred(ctx: RunContext, token_budget: int) -> list[Pair]:
    pairs = []
    for number, each in enumerate(ctx.inputs.preferences, start=1):
        chosen, rejected = (
            _told(ctx, number, each, which, reward, token_budget)
            for which, reward in (("chosen", 1.0), ("rejected", 0.0))
        )
        pairs.append((chosen, rejected))
    return pairs


def _told(ctx: RunContext, number: int, each: Preference, which: str, reward: float, token_budget: int) -> Answer:
    messages = [*each.prompt, *(each.chosen if which == "chosen" else each.rejected)]
    name = f"{number}/{which}"
    try:
        row = sft_row(
            ctx.policy.tokenizer, messages, row_id=name, tools=each.tools or None, first_trained=len(each.prompt)
        )
    except ValueError as error:
        raise RunFailed(f"Preference {number}, {which}: {error}") from error
    if len(row.token_ids) > token_budget:
        raise RunFailed(f"Preference {number}, {which}: has {len(row.token_ids)} tokens, more than token_budget.")
    return Answer(name=name, group=f"preferences/{number}", rows=(row,), reward=reward)


async def stored_groups(ctx: RunContext) -> list[FinishedGroup]:
    """Returns the scored rollouts of the run's inputs by group; a rollout without a group is one by itself."""
    groups = []
    if name := ctx.run.inputs.get("rollouts"):
        groups += [
            replace(group, rollouts=tuple(r for r in group.rollouts if r.scored))
            for group in await ctx.rollouts.of_run(name)
        ]
    if ctx.inputs.scored is not None:
        grouped = {r.name for members in ctx.inputs.scored.groups for r in members}
        alone = [(r,) for r in ctx.inputs.scored.singles if r.name not in grouped]
        groups += [
            FinishedGroup(group_id=f"scores/{number}", rollouts=tuple(r for r in members if r.scored), cursor="")
            for number, members in enumerate([*ctx.inputs.scored.groups, *alone])
        ]
    return [group for group in groups if group.rollouts]


async def answers_of(ctx: RunContext, groups: Sequence[FinishedGroup], *, token_budget: int) -> dict[str, Answer]:
    """Reads the usable rollouts of groups, by name.

    A rollout is left out, and counted in a notice, if its tokens are not known, its answer was truncated, or a part of
    it is longer than the budget: half an answer is not a good example.
    """
    found = await ctx.rollouts.trajectories(groups)
    by_name = {rollout.name: (group.group_id, rollout) for group in groups for rollout in group.rollouts}

    def made() -> tuple[dict[str, Answer], int]:
        answers, again = dict[str, Answer](), 0
        for name, (group_id, rollout) in by_name.items():
            trajectory = found.get(name)
            if trajectory is None or trajectory.unusable or trajectory.truncated:
                continue
            rows, retold = imitable_rows(ctx.policy.tokenizer, name, trajectory)
            again += retold
            if rows and len(within(rows, token_budget)) == len(rows):
                answers[name] = _answer(name, group_id, rows, rollout)
        return answers, again

    answers, again = await asyncio.to_thread(made)
    if not ctx.progress.step and by_name:
        how = f" {again} of them were tokenised again, because the policy has a different tokenizer." if again else ""
        ctx.notify("info", f"{len(answers)} of {len(by_name)} stored rollouts can be trained on.{how}")
    return answers


def _answer(name: str, group: str, rows: Sequence[Row], rollout: FinishedRollout) -> Answer:
    return Answer(name=name, group=group, rows=tuple(rows), reward=rollout.reward or 0.0)


def best_against_worst(answers: Mapping[str, Answer], *, pairs_per_group: int, min_gap: float) -> list[Pair]:
    """Pairs the best answer of each group with the worst, the second best with the second worst, and so on.

    Args:
        answers: By name.
        pairs_per_group: Maximum number of pairs of a group.
        min_gap: Minimum difference of the rewards; equal ones are never a pair.
    """
    groups: dict[str, list[Answer]] = {}
    for answer in answers.values():
        groups.setdefault(answer.group, []).append(answer)
    pairs: list[Pair] = []
    for members in groups.values():
        order = sorted(members, key=lambda each: (-each.reward, each.name))
        matched = list(zip(order, reversed(order), strict=True))[: min(pairs_per_group, len(order) // 2)]
        pairs += [(best, worst) for best, worst in matched if best.reward - worst.reward >= min_gap > 0]
    return pairs


async def pairs_of(ctx: RunContext, *, token_budget: int, pairs_per_group: int, min_gap: float) -> list[Pair]:
    """Returns the pairs of all inputs; see `best_against_worst` for those of stored groups.

    Raises:
        RunFailed: if there are none.
    """
    groups = await stored_groups(ctx)
    answers = await answers_of(ctx, groups, token_budget=token_budget)
    stored = best_against_worst(answers, pairs_per_group=pairs_per_group, min_gap=min_gap)
    pairs = [*await preferred_pairs(ctx, token_budget=token_budget), *stored]
    if not pairs:
        raise RunFailed(
            f"There is no pair to train on: in none of {len(groups)} stored groups do the rewards of two usable "
            f"rollouts differ by min_gap ({min_gap:g})."
        )
    if groups and not ctx.progress.step:
        ctx.notify("info", f"{len(groups)} stored groups give {len(stored)} pairs.")
    return pairs


def split(
    examples: Sequence[Example], groups: Iterable[str], *, share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Holds out a share of the groups; returns the examples to train on and those held out, in order.

    Fewer than one whole group is none, and one group at least is trained on.
    """
    of_each = list(groups)
    names = sorted(set(of_each))
    count = min(int(share * len(names)), len(names) - 1)
    held = set(random.Random(f"{seed}/held-out").sample(names, max(count, 0)))
    train = [example for example, group in zip(examples, of_each, strict=True) if group not in held]
    return train, [example for example, group in zip(examples, of_each, strict=True) if group in held]
