"""Reflective prompt evolution: prompts that are each best at some task are mutated by reflection on traces, and merged.

Source: Agrawal et al. 2025 (arXiv:2507.19457), algorithms 1 and 2. Differences from the paper: an agent has one prompt,
so there is no choice of a module, and a merge is a prompt that the reflector writes of two, instead of modules of both;
minibatches are drawn from all training tasks, those of the Pareto set too, because a small rest may lack the kind of
task that the prompt fails at. What a search is worth is said by the validation tasks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fulmen_algorithm.algorithms.prompts import pareto
from fulmen_algorithm.algorithms.prompts.candidates import Candidate
from fulmen_algorithm.algorithms.prompts.gepa_settings import GepaSettings
from fulmen_algorithm.algorithms.prompts.searching import FIRST, MEMORY, PromptSearch
from fulmen_algorithm.algorithms.prompts.texts import (
    Example,
    edited_prompt,
    merge_messages,
    reflection_messages,
    task_text,
    trace_text,
)
from fulmen_algorithm.rollouts.groups import FinishedGroup, Mode
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext

REFLECTED = "From reflection on its traces."
MERGED = "Merged with {other}."


class Gepa:
    """Improves the prompt of an agent by reflection on traces; keeps each prompt that is the best for some task
    (GEPA)."""

    def __init__(self, settings: GepaSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Searches to the end and publishes the best prompt; see `Algorithm`."""
        settings = self._settings
        if ctx.served is not None:
            with ctx.recorder.spending("start"):
                await ctx.served.serve(settings.overrides)
        search = _Search(ctx, settings)
        await search.save()
        while ctx.progress.step < settings.steps and not search.state.over:
            await search.take_step()
        await search.finish(search.state.beam[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """A prompt that may become a candidate.

    Attributes:
        parent: Candidate that it is made of.
        text: The prompt.
        why: What was done, for the tree of candidates.
        tasks: Tasks on which it must be better, by their number.
        before: Rewards of the parent on them.
        merged: Whether an equal mean is enough.
    """

    parent: Candidate
    text: str
    why: str
    tasks: Sequence[int]
    before: Sequence[float | None]
    merged: bool = False


class _Search(PromptSearch[GepaSettings]):
    """One search; see `PromptSearch`."""

    algorithm = "gepa"
    models = "the reflector"

    async def take_step(self) -> None:
        """Makes one proposal, measures it, and accepts or rejects it."""
        state, ctx, number = self.state, self._ctx, self._ctx.progress.step + 1
        candidates, rejected = dict(state.candidates), list(state.rejected)
        scores = dict(state.scores)
        self._made, self._rollouts, self._over = dict(candidates), 0, ""
        with ctx.recorder.spending("validate"):
            if FIRST not in scores:
                scores[FIRST] = await self._scored(FIRST, f"{number}.p", self._pareto_tasks)
        weights = pareto.front(scores)
        proposal = await self._proposal(number, candidates, scores, weights)
        if proposal is not None:
            made = Candidate(
                id=f"c{number}",
                text=proposal.text,
                version="",
                parent=proposal.parent.id,
                gradient=proposal.why,
                round=number,
            )
            reason = self._flaw(made.text, candidates)
            if not reason:
                made = replace(made, version=await self._published(made, proposal.parent))
                self._made[made.id] = made
                reason = await self._worse(number, made.id, proposal)
            if reason:
                rejected.append({"round": str(number), "parent": made.parent, "reason": reason, "text": made.text})
            else:
                with ctx.recorder.spending("validate"):
                    scores[made.id] = await self._scored(made.id, f"{number}.p", self._pareto_tasks)
                candidates[made.id] = made
        state.candidates = {
            name: replace(each, rewards=tuple(score for score in scores[name] if score is not None))
            for name, each in candidates.items()
        }
        state.rejected, state.journal, state.scores = rejected, {}, scores
        state.beam = list(pareto.front(scores))
        state.rollouts += self._rollouts
        await self._end_step(pareto.mean(scores[state.beam[0]]))

    async def _proposal(
        self,
        number: int,
        candidates: dict[str, Candidate],
        scores: dict[str, list[float | None]],
        weights: dict[str, int],
    ) -> _Proposal | None:
        """Has a prompt of the front mutated, or two of them merged; None if there is nothing to improve, or no budget."""
        settings, chance = self._settings, random.Random(f"{self._settings.seed}/{number}/gepa")
        parent = candidates[pareto.chosen(weights, chance)]
        if settings.merge_every and number % settings.merge_every == 0 and len(weights) > 1:
            other = candidates[pareto.chosen({n: w for n, w in weights.items() if n != parent.id}, chance)]
            with self._ctx.recorder.spending("train"):
                answer = await self._ask("merge", settings.reflector, merge_messages(parent.text, other.text))
            best = max(parent, other, key=lambda each: pareto.mean(scores[each.id]))
            # Both are measured on the Pareto set, so that only the merged prompt costs rollouts.
            places = chance.sample(
                range(len(self._pareto_tasks)), min(settings.minibatch_tasks, len(self._pareto_tasks))
            )
            return (
                None
                if answer is None
                else _Proposal(
                    parent=parent,
                    text=edited_prompt(answer),
                    why=MERGED.format(other=other.id),
                    tasks=[self._pareto_tasks[place] for place in places],
                    before=[scores[best.id][place] for place in places],
                    merged=True,
                )
            )
        tasks = self._minibatch(f"{number}/gepa", settings.minibatch_tasks)
        with self._ctx.recorder.spending("generation_wait"):
            groups = await self._run(parent.id, f"{number}.m", tasks)
            examples = await self._examples(tasks, groups)
        before = [self._reward(group) for group in groups]
        if all(reward is None or reward >= settings.good_reward for reward in before):
            return None
        with self._ctx.recorder.spending("train"):
            answer = await self._ask("reflect", settings.reflector, reflection_messages(parent.text, examples))
        if answer is None:
            return None
        return _Proposal(parent=parent, text=edited_prompt(answer), why=REFLECTED, tasks=tasks, before=before)

    async def _worse(self, number: int, name: str, proposal: _Proposal) -> str:
        """Measures a proposal on its minibatch; returns why it is rejected, empty if it is accepted."""
        with self._ctx.recorder.spending("generation_wait"):
            after = await self._scored(name, f"{number}.m", proposal.tasks)
        pairs = [(a, b) for a, b in zip(after, proposal.before, strict=True) if a is not None and b is not None]
        new, old = (pareto.mean([pair[side] for pair in pairs]) for side in (0, 1))
        if pairs and (new > old or (proposal.merged and new == old)):
            return ""
        return f"its mean reward on {len(pairs)} tasks is {new:g}, of the previous prompt {old:g}"

    async def _examples(self, tasks: Sequence[int], groups: Sequence[FinishedGroup]) -> list[Example]:
        found = await self._ctx.rollouts.trajectories(groups)
        examples = []
        for task, group in zip(tasks, groups, strict=True):
            rollout, reward = group.rollouts[0], self._reward(group)
            if reward is None:
                continue
            trajectory = found.get(rollout.name)
            examples.append(
                Example(
                    task=task_text(self._ctx.inputs.train_tasks[task]),
                    output=rollout.output or (f"(failed: {rollout.failure})" if rollout.failure else ""),
                    reward=reward,
                    trace="" if trajectory is None else trace_text(trajectory.conversations),
                )
            )
        return examples

    async def _run(self, name: str, key: str, tasks: Sequence[int]) -> list[FinishedGroup]:
        inputs = self._ctx.inputs.train_tasks
        return (await self._measured([name], key, [inputs[task] for task in tasks], Mode.TRAIN))[name]

    async def _scored(self, name: str, key: str, tasks: Sequence[int]) -> list[float | None]:
        return [self._reward(group) for group in await self._run(name, key, tasks)]

    @property
    def _pareto_tasks(self) -> list[int]:
        return self._minibatch("pareto", self._settings.pareto_tasks)

    async def _end_step(self, reward: float) -> None:
        state, settings, ctx = self.state, self._settings, self._ctx
        reached = settings.target_reward is not None and reward >= settings.target_reward
        state.over = f"the mean reward reached {settings.target_reward:g}" if reached else self._over
        ctx.recorder.remember(**{MEMORY: state.as_memory()})
        ctx.recorder.commit()
        ctx.recorder.result(reward_mean=reward)
        self._show(best="")
        await ctx.recorder.end_step({**self._metrics(reward), "front": float(len(state.beam))})


ENTRIES = (
    AlgorithmEntry(
        name="gepa",
        settings=GepaSettings,
        make=Gepa,
        needs=("agent", "prompt", "train_tasks"),
        takes=("validation_tasks",),
        trains=False,
    ),
)
