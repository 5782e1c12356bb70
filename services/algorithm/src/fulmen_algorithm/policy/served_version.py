"""A published policy version served by a run that evaluates or uses it without training it."""

import json
from collections.abc import Mapping
from dataclasses import replace

from fulmen.errors import ResourceNotFound
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.services import RunServices
from fulmen_algorithm.policy.stored_weights import stored_policy
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, Serving
from fulmen_algorithm.training.settings import WeightsKind

REMEMBERED = "served_version"


class ServedVersion:
    """The policy version named by a run that trains no weights."""

    def __init__(self, *, published: PublishedPolicy, serving: Serving, control: RunControl, notify: Notify) -> None:
        self.published = published
        self._serving = serving
        self._control = control
        self._notify = notify

    @property
    def name(self) -> str:
        """`resources/policy.{policy}/versions/{n}`."""
        return self.published.name

    async def serve(self, overrides: Mapping[str, Mapping[str, object]]) -> None:
        """Serves the version under the policy's name; `overrides` are request fields by rollout mode.

        Raises:
            RunFailed: if the engine cannot be started with these weights.
            Interrupted: if the run was asked to stop.
        """
        fields = {mode: json.dumps(values) for mode, values in overrides.items()}
        await self._control.unless_stopped(self._serving.serve(self.published, fields, self._notify))

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled from the served policy."""
        return await self._serving.sampled_tokens()


async def served_version(services: RunServices, roots: ModelRoots) -> ServedVersion | None:
    """Finds the version named by a run; `newest` is resolved when the run begins.

    Returns:
        None if the run names no policy.

    Raises:
        RunFailed: if the version or its weights are missing.
        Interrupted: if the run was asked to stop.
    """
    run, control, recorder = services.entry.run, services.control, services.recorder
    if not run.policy.name:
        return None
    name = recorder.progress.memory.get(REMEMBERED) or run.policy.source or f"resources/policy.{run.policy.name}"
    try:
        content = await control.unless_stopped(services.resources.get(name))
    except ResourceNotFound as error:
        raise RunFailed(f"{name} does not exist.") from error
    recorder.remember(**{REMEMBERED: content.name})
    published = await control.unless_stopped(
        stored_policy(content, resources=services.resources, files=services.entry.files, roots=roots)
    )
    if published.kind is WeightsKind.DELTA:
        whole = await control.unless_stopped(published.model_folder())
        published = replace(published, kind=WeightsKind.FULL, path=whole, rebuild=None)
    return ServedVersion(
        published=published, serving=services.serving, control=control, notify=services.entry.events.notify
    )
