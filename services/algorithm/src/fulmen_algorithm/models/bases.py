"""Models as the first weights of runs: uploaded ones, `model:{digest or alias}`, and the hub's, `hf:org/name@revision`."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fulmen.errors import ModelNotFound
from fulmen.models.base_names import HUB_PREFIX, MODEL_PREFIX, base_problem
from fulmen_algorithm.models.model_store import ModelStore, StoredModel
from fulmen_algorithm.models.names import ModelName
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicyOrigin


class Hub(Protocol):
    """Models of the hub; see `clients.hub.HubModels`."""

    async def problem(self, source: str) -> str:
        """Returns why no run can begin with a model; empty if one may."""

    async def fetched(self, source: str, notify: Notify) -> Path:
        """Returns the folder of a model, downloaded if need be and named after its commit."""


class BaseModels:
    """Finds models for runs; see `runs.ports.BaseModels`."""

    def __init__(self, models: ModelStore, hub: Hub) -> None:
        """`models` were uploaded, `hub` has the hub's models that the operator allows."""
        self._models = models
        self._hub = hub

    async def problem(self, source: str, *, project: str) -> str:
        """Returns why no run of a project can begin with a base; empty if one may."""
        if problem := base_problem(source):
            return problem
        if source.startswith(HUB_PREFIX):
            return await self._hub.problem(source)
        try:
            await asyncio.to_thread(self._models.find, _name(project, source))
        except ModelNotFound:
            id_ = source.removeprefix(MODEL_PREFIX)
            return f"there is no model {id_!r} in {project}: upload it with `fulmen model upload FOLDER --name NAME`"
        return ""

    async def folder(self, source: str, *, project: str, notify: Notify) -> Path:
        """Returns the folder of a base, named after its digest or, on the hub, its commit; downloads it if need be.

        Raises:
            RunFailed: if there is none, or it may not be read.
        """
        if source.startswith(HUB_PREFIX):
            return await self._hub.fetched(source, notify)
        try:
            return (await asyncio.to_thread(self._models.use, _name(project, source)))[1]
        except ModelNotFound as error:
            raise RunFailed(f"There is no model {source} in {project} any more.") from error


def used_by(runs: RunRegistry) -> Callable[[StoredModel], str]:
    """Returns what finds the run that has not ended and begins with a model; empty if there is none."""

    def find(model: StoredModel) -> str:
        ids = (model.name.id, *model.aliases)
        for entry in runs.entries():
            run, policy = entry.run, entry.run.policy
            is_base = policy.origin is PolicyOrigin.BASE and policy.source.removeprefix(MODEL_PREFIX) in ids
            if is_base and run.project == model.name.project and not run.state.final:
                return run.name
        return ""

    return find


def _name(project: str, source: str) -> ModelName:
    return ModelName.parse(f"{project}/models/{source.removeprefix(MODEL_PREFIX)}")
