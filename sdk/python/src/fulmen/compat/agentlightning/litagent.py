"""Agents of Agent Lightning: `LitAgent`, and functions that `@rollout` makes agents of.

Invariant: an agent is callable as Fulmen's runner calls it, `agent(task, context)`; called with anything else, a decorated function
behaves as it was written.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

from fulmen.agent import Context, NotInAttempt, current
from fulmen.compat.agentlightning.emitter import emit_reward, find_final_reward
from fulmen.compat.agentlightning.records import (
    LLM,
    Attempt,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    Rollout,
    RolloutMode,
    RolloutRawResult,
)

__all__ = ["FunctionalLitAgent", "LitAgent", "llm_rollout", "prompt_rollout", "rollout"]

T = TypeVar("T")

MODEL_VARIABLE = "FULMEN_AGENT_MODEL"
"""Variable of the agent with the model that it calls: the policy's name. `Trainer.fit` sets it."""

ENGINE_VARIABLE = "FULMEN_PROMPT_ENGINE"
"""Variable of the agent with the engine of its prompt; `f-string` by default."""

PROMPT_VARIABLE = "FULMEN_FIRST_PROMPT"
"""Variable of the agent with its prompt where the rollout gives none."""

WRAPPED_TASK = "agentlightning_task"
"""Key of a task that is not a JSON object; tasks of Fulmen are."""

_MODES: Mapping[str, RolloutMode] = {"train": "train", "validation": "val", "test": "test"}


class LitAgent(Generic[T]):
    """Base of agents: override `rollout` or `rollout_async`, or a mode's methods."""

    def __init__(self, *, trained_agents: str | None = None) -> None:
        """Keeps the pattern of trained agents, which Fulmen sets as `roles` of the algorithm."""
        self.trained_agents = trained_agents

    def is_async(self) -> bool:
        """Returns whether an asynchronous method is overridden."""
        names = ("training_rollout_async", "validation_rollout_async", "rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs one task; returns None, the reward, or a list of spans."""
        raise NotImplementedError("Agents must implement the `rollout` method.")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs one task; as `rollout`."""
        raise NotImplementedError("Agents must implement the `rollout_async` method for async operations.")

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs a training task."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs a validation task."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs a training task."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Runs a validation task."""
        return await self.rollout_async(task, resources, rollout)

    def __call__(self, task: Any, context: Context | None = None) -> Any:
        """Runs one attempt of Fulmen; returns the reward, or a coroutine that does.

        Raises:
            NotInAttempt: Outside an attempt.
        """
        context = context if context is not None else current()
        if context is None:
            raise NotInAttempt(
                "No attempt is running here: call `rollout`, or run the agent with `fulmen agent check`."
            )
        given = task[WRAPPED_TASK] if isinstance(task, Mapping) and task.keys() == {WRAPPED_TASK} else task
        record = _rollout_of(given, context)
        kind = "validation" if record.mode == "val" else "training"
        resources = resources_of(context)
        if self.is_async():
            return self._finish(getattr(self, f"{kind}_rollout_async")(given, resources, record))
        return outcome_of(getattr(self, f"{kind}_rollout")(given, resources, record))

    async def _finish(self, running: Any) -> object:
        return outcome_of(await running)


class FunctionalLitAgent(LitAgent[T]):
    """A function as an agent; it gets the resources that its parameters name."""

    def __init__(self, rollout_func: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        """Wraps the function. `strip_proxy` makes no difference here: every model is behind the proxy."""
        super().__init__()
        self._function = rollout_func
        self._strip_proxy = strip_proxy
        self._parameters = frozenset(inspect.signature(rollout_func).parameters)
        functools.update_wrapper(self, rollout_func)

    def is_async(self) -> bool:
        """Returns whether the function is asynchronous."""
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, or, with a task and at most a context, runs an attempt."""
        if not kwargs and (len(args) == 1 or (len(args) == 2 and isinstance(args[1], Context))):
            return super().__call__(*args)
        return self._function(*args, **kwargs)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Calls the function.

        Raises:
            RuntimeError: If it is asynchronous.
        """
        if self.is_async():
            raise RuntimeError(f"{self._function} is asynchronous. Use rollout_async instead.")
        return self._function(task, **self._arguments(resources, rollout))

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Calls the function.

        Raises:
            RuntimeError: If it is synchronous.
        """
        if not self.is_async():
            raise RuntimeError(f"{self._function} is synchronous. Use rollout instead.")
        return await self._function(task, **self._arguments(resources, rollout))

    def _arguments(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        found: dict[str, Any] = {"rollout": rollout} if "rollout" in self._parameters else {}
        for name, kind in (("llm", LLM), ("prompt_template", PromptTemplate)):
            if name in self._parameters:
                found[name] = _first(resources, kind)
        return found


def _first(resources: NamedResources, kind: type) -> Any:
    for resource in resources.values():
        if isinstance(resource, kind):
            return resource
    missing = {
        LLM: f"no model: set {MODEL_VARIABLE} in the agent's environment, or train it with Trainer.fit",
        PromptTemplate: 'no prompt: give the run one (`prompt = "prompt.md"`), or initial_resources to the Trainer',
    }
    raise ValueError(f"The rollout has {missing[kind]}.")


def resources_of(context: Context) -> NamedResources:
    """Returns the resources of an attempt: its model, and its prompts by name."""
    found: NamedResources = {}
    model = context.environment.get(MODEL_VARIABLE) or os.environ.get(MODEL_VARIABLE)
    if model:
        found["main_llm"] = LLM(endpoint=context.openai_base_url, model=model, api_key=context.api_key)
    engine = context.environment.get(ENGINE_VARIABLE) or os.environ.get(ENGINE_VARIABLE) or "f-string"
    first = context.environment.get(PROMPT_VARIABLE) or os.environ.get(PROMPT_VARIABLE)
    for name, text in (context.prompts or ({"prompt": first} if first else {})).items():
        found[name] = PromptTemplate(template=text, engine=engine)
    return found


def outcome_of(raw: RolloutRawResult) -> object:
    """Returns the outcome of an attempt: the reward that a rollout returned, as a float, or what else it returned.

    The last reward of spans that it returned is emitted.
    """
    if isinstance(raw, list):
        final = find_final_reward(raw)
        if final is not None:
            emit_reward(final)
        return final
    return float(raw) if isinstance(raw, bool | int | float) else raw


def _rollout_of(task: Any, context: Context) -> AttemptedRollout:
    rollout, started = context.rollout.rpartition("/")[2], time.time()
    attempt = Attempt(
        rollout_id=rollout,
        attempt_id=context.attempt,
        sequence_id=context.attempt_number,
        start_time=started,
        status="running",
    )
    return AttemptedRollout(
        rollout_id=rollout,
        input=task,
        start_time=started,
        mode=_MODES.get(context.mode),
        status="running",
        attempt=attempt,
    )


@overload
def llm_rollout(func: Callable[..., Any]) -> FunctionalLitAgent[Any]: ...


@overload
def llm_rollout(*, strip_proxy: bool = ...) -> Callable[[Callable[..., Any]], FunctionalLitAgent[Any]]: ...


def llm_rollout(func: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """Makes an agent of `(task, llm[, rollout])`, async or not.

    Raises:
        ValueError: If the function has other parameters.
    """
    made = functools.partial(_agent_with, "llm", strip_proxy=strip_proxy)
    return made if func is None else made(func)


@overload
def prompt_rollout(func: Callable[..., Any]) -> FunctionalLitAgent[Any]: ...


@overload
def prompt_rollout() -> Callable[[Callable[..., Any]], FunctionalLitAgent[Any]]: ...


def prompt_rollout(func: Callable[..., Any] | None = None) -> Any:
    """Makes an agent of `(task, prompt_template[, rollout])`, async or not.

    Raises:
        ValueError: If the function has other parameters.
    """
    made = functools.partial(_agent_with, "prompt_template")
    return made if func is None else made(func)


def rollout(func: Callable[..., Any]) -> FunctionalLitAgent[Any]:
    """Makes an agent of `(task, llm[, rollout])` or `(task, prompt_template[, rollout])`, async or not.

    Raises:
        NotImplementedError: If the function has other parameters.
    """
    for name in ("llm", "prompt_template"):
        if not _parameter_problem(func, name):
            return FunctionalLitAgent(func)
    raise NotImplementedError(
        f"The parameters {inspect.signature(func)} are not (task, llm[, rollout]) or (task, prompt_template[, rollout])."
    )


def _agent_with(name: str, func: Callable[..., Any], *, strip_proxy: bool = True) -> FunctionalLitAgent[Any]:
    if problem := _parameter_problem(func, name):
        raise ValueError(problem)
    return FunctionalLitAgent(func, strip_proxy=strip_proxy)


def _parameter_problem(func: Callable[..., Any], name: str) -> str:
    parameters = list(inspect.signature(func).parameters)
    if len(parameters) < 2:
        return f"Function {func} must have at least 2 parameters."
    if parameters[0] != "task":
        return f"The first parameter of {func} must be called 'task'."
    return "" if name in parameters else f"Function {func} must have a parameter called {name!r}."
