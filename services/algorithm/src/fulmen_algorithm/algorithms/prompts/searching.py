"""What prompt searches share: the state in checkpoints, paid answers, rollouts of candidates, and the best prompt.

Invariant: every paid answer of a model is in a checkpoint before anything depends on it. A round is a function of the
seed, of the state at its start and of these answers. So a killed process repeats the round from the checkpoint with the
same candidates, and repeats at most the `concurrency` calls that were in flight.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from fulmen_algorithm.algorithms.prompts.candidates import Candidate, flaw, ranked
from fulmen_algorithm.algorithms.prompts.search_settings import Model, SearchSettings, SearchState
from fulmen_algorithm.algorithms.prompts.texts import difference, tree
from fulmen_algorithm.rollouts.groups import INFRASTRUCTURE, FinishedGroup, GroupSpec, Mode, in_branch
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChatRequest

MEMORY = "apo"
"""Key of the state in `progress.memory`, of every algorithm that searches for a prompt."""
ALIAS = "best"
PROMPT = "prompt"
FIRST = "c0"

Settings = TypeVar("Settings", bound=SearchSettings)


class PromptSearch(Generic[Settings]):
    """One search; every method may be interrupted anywhere and repeated from the checkpoint.

    Attributes:
        algorithm: Name in ids of groups and in purposes of calls.
        models: Models that it asks, for the report.
        state: What is in checkpoints.
    """

    algorithm: ClassVar[str]
    models: ClassVar[str]

    def __init__(self, ctx: RunContext, settings: Settings) -> None:
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
        request = ChatRequest(
            messages=messages, purpose=f"{self.algorithm}.{key.partition('/')[0]}", **model.model_dump()
        )
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

    async def _measured(
        self, names: Sequence[str], key: str, tasks: Sequence[bytes], mode: Mode
    ) -> dict[str, list[FinishedGroup]]:
        """Runs candidates on tasks, all concurrently; ids are derived from candidate and task, so that a repeated call
        resumes."""
        groups = [
            GroupSpec(
                group_id=f"{self.algorithm}/{name}/{key}/{index}",
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

    async def finish(self, finalists: Sequence[str]) -> None:
        """Validates the finalists, the best first, and the first prompt, and publishes the best."""
        state, ctx = self.state, self._ctx
        names = [*finalists, *([FIRST] if FIRST not in finalists else [])]
        if tasks := ctx.inputs.validation_tasks:
            with ctx.recorder.spending("validate"):
                groups = await self._measured(names, "final", tasks, Mode.VALIDATION)
            means = {name: mean_of(self._rewards(members)) for name, members in groups.items()}
            state.candidates |= {name: replace(state.candidates[name], validation=means[name]) for name in names}
            best = ranked(names, {name: [mean] for name, mean in means.items()})[0]
            ctx.recorder.result(validation_accuracy_before=means[FIRST], validation_accuracy_after=means[best])
        else:
            best = finalists[0]
        version = await self._keep(state.candidates[best])
        ctx.recorder.remember(**{MEMORY: state.as_memory()})
        self._show(best=best)
        changed = (
            "No better prompt was found; the first one is kept." if best == FIRST else f"The best prompt is {version}."
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
            f"{state.calls} calls of {self.models}, {state.tokens} tokens; {state.rollouts} rollouts on training "
            f"tasks.{f' The search ended because {state.over}.' if state.over else ''}",
            "### What changed, from the first prompt to the best",
            difference(state.candidates[FIRST].text, state.candidates[shown].text),
            *(["### Edits that could not be used", "\n".join(refused)] if refused else []),
        ]
        self._ctx.recorder.section("prompts", title="Prompts", markdown="\n\n".join(parts))

    def _metrics(self, reward: float) -> dict[str, float]:
        state = self.state
        return {
            "reward_mean": reward,
            "candidates": float(len(state.candidates)),
            "candidates_rejected": float(len(state.rejected)),
            "calls": float(state.calls),
            "tokens_spent": float(state.tokens),
            "rollouts": float(state.rollouts),
        }

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


def mean_of(rewards: Sequence[float]) -> float:
    """Returns the mean; 0 of none."""
    return sum(rewards) / len(rewards) if rewards else 0.0
