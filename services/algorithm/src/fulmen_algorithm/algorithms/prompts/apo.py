"""Automatic prompt optimisation: textual gradients and beam search over prompt templates, without training weights.

Source: Pryzant et al. 2023 (arXiv:2305.03495). Differences from the paper: the reward is any number from the agent's
grader instead of the share of correct labels; candidates that lose placeholders are rejected; paraphrases are off by
default, because each costs a call and its rollouts.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fulmen_algorithm.algorithms.prompts.apo_settings import ApoSettings, Halving, Ucb
from fulmen_algorithm.algorithms.prompts.candidates import Candidate, halve, upper_confidence
from fulmen_algorithm.algorithms.prompts.searching import MEMORY, PromptSearch, mean_of
from fulmen_algorithm.algorithms.prompts.texts import (
    Example,
    critic_messages,
    edited_prompt,
    editor_messages,
    paraphrase_messages,
    task_text,
)
from fulmen_algorithm.rollouts.groups import Mode
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext

PARAPHRASED = "Paraphrase."


class Apo:
    """Improves the prompt of an agent: a critic criticises it, an editor rewrites it, and the best prompts are kept."""

    def __init__(self, settings: ApoSettings) -> None:
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
            await search.take_round()
        await search.finish(search.state.beam)


class _Search(PromptSearch[ApoSettings]):
    """One search; see `PromptSearch`."""

    algorithm = "apo"
    models = "critic and editor"

    async def take_round(self) -> None:
        """Edits the prompts of the beam and chooses the next one."""
        state, number = self.state, self._ctx.progress.step + 1
        candidates, rejected = dict(state.candidates), list(state.rejected)
        rewards: dict[str, list[float]] = {name: list(c.rewards) for name, c in candidates.items()}
        self._made, self._rollouts, self._over = candidates, 0, ""
        with self._ctx.recorder.spending("generation_wait"):
            examples = await self._examples(number, rewards)
        branches = [
            (p, b) for p, shown in examples.items() for b in range(self._settings.branch_factor if shown else 0)
        ]
        with self._ctx.recorder.spending("train"):
            await self._ask_all(number, branches, examples)
        for parent, branch in branches:
            await self._edit(number, candidates[parent], branch, candidates, rejected)
        pool = [*state.beam, *(name for name in candidates if name not in state.candidates)]
        with self._ctx.recorder.spending("validate"):
            found = await self._select(number, pool)
        for name, more in found.items():
            rewards.setdefault(name, []).extend(more)
        head = state.beam[0]
        state.beam = list(found)[: self._settings.beam_width]
        state.same_head = state.same_head + 1 if state.beam[0] == head else 0
        state.candidates = {name: replace(c, rewards=tuple(rewards.get(name, ()))) for name, c in candidates.items()}
        state.rejected, state.journal = rejected, {}
        state.rollouts += self._rollouts
        await self._end_round(found[state.beam[0]])

    async def _end_round(self, head: Sequence[float]) -> None:
        state, settings, ctx = self.state, self._settings, self._ctx
        reward = mean_of(head)
        if settings.target_reward is not None and head and reward >= settings.target_reward:
            state.over = f"the mean reward reached {settings.target_reward:g}"
        elif settings.patience and state.same_head >= settings.patience:
            state.over = f"the same prompt stayed the best for {state.same_head} rounds"
        else:
            state.over = self._over
        ctx.recorder.remember(**{MEMORY: state.as_memory()})
        ctx.recorder.commit()
        ctx.recorder.result(reward_mean=reward)
        self._show(best="")
        await ctx.recorder.end_step(self._metrics(reward))

    async def _examples(self, number: int, rewards: dict[str, list[float]]) -> dict[str, list[Example]]:
        """Runs the prompts of the beam on new tasks; returns the bad results by candidate."""
        settings, tasks = self._settings, self._ctx.inputs.train_tasks
        chosen = self._minibatch(f"{number}/gradient", settings.gradient_tasks)
        groups = await self._measured(self.state.beam, f"{number}.g", [tasks[i] for i in chosen], Mode.TRAIN)
        found: dict[str, list[Example]] = {}
        for name, members in groups.items():
            found[name] = []
            for task, group in zip(chosen, members, strict=True):
                reward = self._reward(group)
                if reward is None:
                    continue
                rewards[name].append(reward)
                if reward < settings.good_reward:
                    rollout = group.rollouts[0]
                    output = rollout.output or f"(failed: {rollout.failure})"
                    found[name].append(Example(task=task_text(tasks[task]), output=output, reward=reward))
        return found

    async def _ask_all(
        self, number: int, branches: Sequence[tuple[str, int]], examples: Mapping[str, Sequence[Example]]
    ) -> None:
        """Requests the edits of a round, `concurrency` at a time; the answers are in the journal."""
        settings, state = self._settings, self.state
        left = settings.budget.calls - (state.calls - len(state.journal))
        # A criticism without its edit is useless.
        affordable = branches[: max(0, math.ceil(left / (2 + settings.paraphrases)))]
        waiting, failed = iter(affordable), asyncio.Event()

        async def ask_in_turn() -> None:
            for parent, branch in waiting:
                if failed.is_set():
                    return
                await self._ask_edit(number, state.candidates[parent], branch, examples[parent])

        askers = [asyncio.create_task(ask_in_turn()) for _ in range(min(settings.concurrency, len(affordable)))]
        for asker in askers:
            asker.add_done_callback(lambda ended: failed.set() if ended.cancelled() or ended.exception() else None)
        # Let all of them end and save the paid answers before raising an error.
        outcomes = await asyncio.gather(*askers, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if len(affordable) < len(branches):
            self._over = self._over or self._spent

    async def _ask_edit(self, number: int, parent: Candidate, branch: int, shown: Sequence[Example]) -> None:
        """Asks the critic, then the editor, then for paraphrases; ends early without budget or with an unusable edit."""
        settings, key = self._settings, f"{parent.id}/{branch}"
        chance = random.Random(f"{settings.seed}/{number}/{key}")
        some = chance.sample(list(shown), min(settings.gradient_examples, len(shown)))
        gradient = await self._ask(f"critic/{key}", settings.critic, critic_messages(parent.text, some))
        if gradient is None:
            return
        editor = settings.editor or settings.critic
        answer = await self._ask(f"editor/{key}", editor, editor_messages(parent.text, gradient))
        if answer is None or self._flaw(text := edited_prompt(answer), {}):
            return
        for variant in range(settings.paraphrases):
            await self._ask(f"paraphrase/{key}/{variant}", editor, paraphrase_messages(text))

    async def _edit(
        self,
        number: int,
        parent: Candidate,
        branch: int,
        candidates: dict[str, Candidate],
        rejected: list[dict[str, str]],
    ) -> None:
        """Builds candidates from the valid answers about a parent."""
        journal, key = self.state.journal, f"{parent.id}/{branch}"
        gradient = journal.get(f"critic/{key}", "")
        keys = [f"editor/{key}", *(f"paraphrase/{key}/{n}" for n in range(self._settings.paraphrases))]
        for question in keys:
            if question not in journal:
                return
            text = edited_prompt(journal[question])
            if reason := self._flaw(text, candidates):
                rejected.append({"round": str(number), "parent": parent.id, "reason": reason, "text": text})
                continue
            made = Candidate(
                id=f"c{len(candidates)}", text=text, version="", parent=parent.id, gradient=gradient, round=number
            )
            candidates[made.id] = replace(made, version=await self._published(made, parent))
            if question == keys[0]:
                parent, gradient = candidates[made.id], PARAPHRASED

    async def _select(self, number: int, pool: Sequence[str]) -> dict[str, list[float]]:
        """Measures the candidates; returns their rewards, the best first."""
        selection, tasks = self._settings.selection, self._ctx.inputs.train_tasks

        async def measure(names: Sequence[str], minibatch: int) -> dict[str, list[float]]:
            chosen = self._minibatch(f"{number}/{minibatch}", selection.tasks)
            key = f"{number}.{minibatch}"
            groups = await self._measured(names, key, [tasks[i] for i in chosen], Mode.TRAIN)
            return {name: self._rewards(members) for name, members in groups.items()}

        match selection:
            case Halving():
                return await halve(pool, width=self._settings.beam_width, measure=measure)
            case Ucb():
                return await upper_confidence(
                    pool, pulls=selection.pulls, exploration=selection.exploration, measure=measure
                )


ENTRIES = (
    AlgorithmEntry(
        name="apo",
        settings=ApoSettings,
        make=Apo,
        needs=("agent", "prompt", "train_tasks"),
        takes=("validation_tasks",),
        trains=False,
    ),
)
