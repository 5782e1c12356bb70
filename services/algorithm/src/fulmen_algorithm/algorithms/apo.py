"""Automatic prompt optimisation: textual gradients and beam search over prompt templates, without training weights.

Source: Pryzant et al. 2023 (arXiv:2305.03495). Differences from the paper: the reward is any number from the agent's
grader instead of the share of correct labels; candidates that lose placeholders are rejected; paraphrases are off by
default, because each costs a call and its rollouts.

Invariant: every paid answer of a model is in a checkpoint before anything depends on it. A round is a function of the
seed, of the state at its start and of these answers. So a killed process repeats the round from the checkpoint with the
same candidates, and repeats at most the `concurrency` calls that were in flight.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fulmen_algorithm.algorithms.apo_settings import ApoSettings, Halving, Model, SearchState, Ucb
from fulmen_algorithm.algorithms.prompt_search import Candidate, flaw, halve, ranked, upper_confidence
from fulmen_algorithm.algorithms.prompt_texts import (
    Example,
    critic_messages,
    difference,
    edited_prompt,
    editor_messages,
    paraphrase_messages,
    task_text,
    tree,
)
from fulmen_algorithm.rollouts.groups import INFRASTRUCTURE, FinishedGroup, GroupSpec, Mode, in_branch
from fulmen_algorithm.runs.algorithm import AlgorithmEntry
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChatRequest

MEMORY = "apo"
ALIAS = "best"
PROMPT = "prompt"
FIRST = "c0"
PARAPHRASED = "The same in other words."


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
        await search.finish()


class _Search:
    """One search; every method may be interrupted anywhere and repeated from the checkpoint."""

    def __init__(self, ctx: RunContext, settings: ApoSettings) -> None:
        self._ctx = ctx
        self._settings = settings
        # Of the current round. They become part of the state when it ends, so that a repeated round starts from the
        # same state.
        self._made: dict[str, Candidate] = {}
        self._rollouts = 0
        self._over = ""
        self._asking = 0
        self._saving = asyncio.Lock()
        if memory := ctx.progress.memory.get(MEMORY):
            self.state = SearchState.of_memory(memory)
            return
        if ctx.inputs.prompt is None:
            raise RunFailed("The run names no prompt.")
        first = Candidate(id=FIRST, text=ctx.inputs.prompt.data.decode(), version=ctx.inputs.prompt.name)
        self.state = SearchState(candidates={FIRST: first}, beam=[FIRST])

    async def save(self) -> None:
        """Checkpoints the state of the search."""
        async with self._saving:
            self._ctx.recorder.remember(**{MEMORY: self.state.as_memory()})
            await self._ctx.recorder.checkpoint()

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
        reward = _mean(head)
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
        await ctx.recorder.end_step(
            {
                "reward_mean": reward,
                "candidates": float(len(state.candidates)),
                "candidates_rejected": float(len(state.rejected)),
                "calls": float(state.calls),
                "tokens_spent": float(state.tokens),
                "rollouts": float(state.rollouts),
            }
        )

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

    def _flaw(self, text: str, candidates: Mapping[str, Candidate]) -> str:
        first, known = self.state.candidates[FIRST].text, {name: c.text for name, c in candidates.items()}
        return flaw(text, first=first, others=known, max_chars=self._settings.max_prompt_chars)

    async def _ask(self, key: str, model: Model, messages: Sequence[Mapping[str, str]]) -> str | None:
        """Asks a model once in the life of the run; None if the budget is used up."""
        state, budget = self.state, self._settings.budget
        if key in state.journal:
            return state.journal[key]
        if state.calls + self._asking >= budget.calls or state.tokens >= budget.tokens:
            self._over = self._spent
            return None
        request = ChatRequest(messages=messages, purpose=f"apo.{key.partition('/')[0]}", **model.model_dump())
        self._asking += 1
        try:
            answer = await self._ctx.control.unless_stopped(self._ctx.chat.ask(request))
            state.journal[key] = answer.text
            state.calls += 1
            state.tokens += answer.tokens
        finally:
            self._asking -= 1
        await self.save()
        return answer.text

    @property
    def _spent(self) -> str:
        return f"the budget is used up: {self.state.calls + self._asking} calls, {self.state.tokens} tokens"

    async def _published(self, candidate: Candidate, parent: Candidate) -> str:
        """Publishes a candidate for its rollouts, as a separate resource; only the best becomes a version of the prompt."""
        resource, known = f"{self._resource}.candidates", parent.version if parent.parent else ""
        return await self._publish(resource, candidate, parent=known, request=candidate.id)

    async def _publish(self, resource: str, candidate: Candidate, *, parent: str, request: str) -> str:
        ctx = self._ctx
        content = await ctx.control.unless_stopped(
            ctx.resources.publish(
                resource=resource,
                kind=PROMPT,
                content=candidate.text.encode(),
                content_type="text/plain; charset=utf-8",
                parent=parent,
                # After a rollback the search makes other prompts; the same request id would return the earlier ones.
                request_id=in_branch(f"{ctx.run.run_id}/{request}", ctx.progress.branch),
            )
        )
        return content.name

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

    async def _measured(
        self, names: Sequence[str], key: str, tasks: Sequence[bytes], mode: Mode
    ) -> dict[str, list[FinishedGroup]]:
        """Runs candidates on tasks, all at once; ids are derived from candidate and task, so that a repeated call resumes."""
        groups = [
            GroupSpec(
                group_id=f"apo/{name}/{key}/{index}",
                task=task,
                size=1,
                mode=mode,
                resource_versions={PROMPT: self._version(name)},
            )
            for name in names
            for index, task in enumerate(tasks)
        ]
        if mode is Mode.TRAIN:
            self._rollouts += len(groups)
            if (spent := self.state.rollouts + self._rollouts) >= self._settings.budget.rollouts:
                self._over = f"the budget is used up: {spent} rollouts"
        finished = iter(await self._ctx.rollouts.run_groups(groups))
        return {name: [next(finished) for _ in tasks] for name in names}

    async def finish(self) -> None:
        """Validates the beam and the first prompt, and publishes the best."""
        state, ctx = self.state, self._ctx
        names = [*state.beam, *([FIRST] if FIRST not in state.beam else [])]
        if tasks := ctx.inputs.validation_tasks:
            with ctx.recorder.spending("validate"):
                groups = await self._measured(names, "final", tasks, Mode.VALIDATION)
            means = {name: _mean(self._rewards(members)) for name, members in groups.items()}
            state.candidates |= {name: replace(state.candidates[name], validation=means[name]) for name in names}
            best = ranked(names, {name: [mean] for name, mean in means.items()})[0]
            ctx.recorder.result(validation_accuracy_before=means[FIRST], validation_accuracy_after=means[best])
        else:
            best = state.beam[0]
        version = await self._keep(state.candidates[best])
        ctx.recorder.remember(**{MEMORY: state.as_memory()})
        self._show(best=best)
        changed = (
            "No better prompt was found; the first one stays." if best == FIRST else f"The best prompt is {version}."
        )
        ctx.notify("info", f"{changed} {f'The search ended because {state.over}.' if state.over else ''}".strip())

    async def _keep(self, best: Candidate) -> str:
        """Publishes the best prompt as a version of the prompt that the run names, and moves the alias to it."""
        ctx, version = self._ctx, best.version
        if best.id != FIRST:
            first = self.state.candidates[FIRST].version
            version = await self._publish(self._resource, best, parent=first, request="best")
        number = int(version.rpartition("/")[2])
        await ctx.control.unless_stopped(ctx.resources.point(self._resource, ALIAS, number))
        ctx.recorder.found_prompt(version)
        return version

    def _show(self, *, best: str) -> None:
        state = self.state
        shown = best or state.beam[0]
        refused = [f"- round {r['round']}, of `{r['parent']}`: {r['reason']}" for r in state.rejected]
        parts = [
            tree(state.candidates, beam=state.beam, best=best),
            f"{state.calls} calls of critic and editor, {state.tokens} tokens; {state.rollouts} rollouts on training "
            f"tasks.{f' The search ended because {state.over}.' if state.over else ''}",
            "### What changed, from the first prompt to the best",
            difference(state.candidates[FIRST].text, state.candidates[shown].text),
            *(["### Edits that could not be used", "\n".join(refused)] if refused else []),
        ]
        self._ctx.recorder.section("prompts", title="Prompts", markdown="\n\n".join(parts))

    @property
    def _resource(self) -> str:
        return self.state.candidates[FIRST].version.partition("/versions/")[0]

    def _version(self, name: str) -> str:
        return (self._made.get(name) or self.state.candidates[name]).version

    def _minibatch(self, key: str, size: int) -> list[int]:
        """Draws training tasks; a function of the key."""
        count = len(self._ctx.inputs.train_tasks)
        return random.Random(f"{self._settings.seed}/{key}").sample(range(count), min(size, count))

    def _rewards(self, groups: Sequence[FinishedGroup]) -> list[float]:
        return [reward for group in groups if (reward := self._reward(group)) is not None]

    def _reward(self, group: FinishedGroup) -> float | None:
        """Returns the reward of a rollout; None if it was lost to the infrastructure."""
        rollout = group.rollouts[0]
        if rollout.scored:
            return rollout.reward
        return None if rollout.failure in INFRASTRUCTURE else self._settings.failure_reward


def _mean(rewards: Sequence[float]) -> float:
    return sum(rewards) / len(rewards) if rewards else 0.0


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
