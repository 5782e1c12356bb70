"""The folder of the weights that a policy begins with, unless tenants' code builds them."""

from dataclasses import dataclass
from pathlib import Path

from fulmen.errors import ResourceNotFound
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.stored_weights import WeightFolders, stored_policy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import BaseModels, Notify, ResourceStore
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSources:
    """Where weights are found.

    Attributes:
        resources: Resources of the project.
        roots: Folders below which weights may be.
        models: Bases; None if the service has none.
        notify: Receives the progress of downloads.
    """

    resources: ResourceStore
    roots: ModelRoots
    models: BaseModels | None
    notify: Notify


async def first_weights(policy: PolicySpec, *, files: WeightFolders, sources: WeightSources) -> Path:
    """Returns a complete model folder, downloaded or rebuilt if need be.

    Raises:
        RunFailed: if there is none, or it may not be opened.
    """
    match policy.origin:
        case PolicyOrigin.PATH:
            return sources.roots.checked(policy.source, project=files.project)
        case PolicyOrigin.BASE:
            if sources.models is None:
                raise RunFailed(f"This service has no models such as {policy.source}.")
            return await sources.models.folder(policy.source, project=files.project, notify=sources.notify)
        case PolicyOrigin.VERSION | PolicyOrigin.NEWEST:
            name = policy.source or f"resources/policy.{policy.name}"
            try:
                content = await sources.resources.get(name)
            except ResourceNotFound as error:
                raise RunFailed(f"{name} does not exist.") from error
            stored = await stored_policy(content, resources=sources.resources, files=files, roots=sources.roots)
            return await stored.model_folder()
        case PolicyOrigin.BUILD:
            raise RunFailed("These weights are built by a bundle.")
