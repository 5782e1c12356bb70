"""The policy of a run: trained here, published as versions, served by the engine.

Publishing goes: save the weights; publish the resource version, whose number is the policy version; swap the engine's
weights; promote the version at the proxy. A crash before the resource leaves a folder that is pruned later; a crash
after it leaves a version that nobody serves, and the run goes on from its checkpoint with the next number. A proxy
that was not told yet mislabels nothing: the engine itself says which version sampled which token.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulmen_algorithm.domain.control import RunControl
from fulmen_algorithm.domain.ports import Notify, PublishedPolicy, ResourceShelf, RunStorage, SavedModel, Serving
from fulmen_algorithm.domain.recorder import Recorder, RunUpdate
from fulmen_algorithm.domain.run import TrainingRun
from fulmen_algorithm.domain.torch_thread import TorchThread
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.step import (
    BatchSettings,
    StepResult,
    StepSettings,
    TrainingState,
    sft_step,
    train_batch,
)


class Policy:
    """What an algorithm may do with the policy."""

    def __init__(
        self,
        *,
        run: TrainingRun,
        state: TrainingState,
        recorder: Recorder,
        control: RunControl,
        torch_thread: TorchThread,
        resources: ResourceShelf,
        storage: RunStorage,
        serving: Serving,
        notify: Notify,
        update_run: RunUpdate,
        keep_models: int,
    ) -> None:
        self._run = run
        self._state = state
        self._recorder = recorder
        self._control = control
        self._torch = torch_thread
        self._resources = resources
        self._storage = storage
        self._serving = serving
        self._notify = notify
        self._update_run = update_run
        self._keep_models = keep_models
        self._served = False
        self._published = {int(str(v["version"])): v for v in storage.versions()}
        self._best = str(storage.notes().get("best", {}).get("path", ""))

    @property
    def model(self) -> PolicyModel:
        """The model and its tokenizer."""
        return self._state.policy

    @property
    def version(self) -> int:
        """The policy version of the present weights; 0 if they are not published."""
        return self._recorder.progress.policy_version

    def step_of(self, version: int) -> int | None:
        """Tells after which step of this run a version was published; None if it was not by this run."""
        record = self._published.get(version)
        return None if record is None else int(str(record["step"]))

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step; never stopped in the middle."""
        return await self._torch.run(
            train_batch,
            self._state,
            rows,
            settings=settings,
            batch=batch,
            seed=seed,
            current_version=current_version,
        )

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        return await self._torch.run(sft_step, self._state, rows, settings=settings)

    async def publish(self) -> int:
        """Publishes the present weights, unless they are published, and swaps them in if the policy is served.

        Returns:
            The policy version.

        Raises:
            Interrupted: if the run was asked to stop; the next `publish` begins anew.
        """
        if not self.version:
            saved = await self._torch.run(self._storage.save_model, self.model, self._recorder.progress.step)
            published = await self._control.unless_stopped(self._announce(saved))
            if self._served:
                await self._control.unless_stopped(self._serving.swap(published))
            self._recorder.published(published.version)
            self._update_run({"policy_version": published.name, "model_path": str(saved.path)})
            self._prune()
        return self.version

    async def serve(self, overrides: Mapping[str, Mapping[str, object]]) -> None:
        """Makes the present weights answer; `overrides` are request fields by rollout mode."""
        version = await self.publish()
        record = self._published[version]
        path = Path(str(record["path"]))
        if not path.exists():
            # Pruned or lost since: the checkpoint's weights are the same ones.
            path = (await self._torch.run(self._storage.save_model, self.model, int(str(record["step"])))).path
        published = PublishedPolicy(name=str(record["name"]), version=version, path=path)
        fields = {mode: json.dumps(values) for mode, values in overrides.items()}
        await self._control.unless_stopped(self._serving.serve(published, fields, self._notify))
        self._served = True

    async def sampled_tokens(self) -> int:
        """Returns how many tokens the served policy has sampled so far."""
        return await self._serving.sampled_tokens()

    def mark_best(self) -> None:
        """Keeps the folder of the present version from being pruned."""
        self._best = str(self._published[self.version]["path"])
        self._storage.save_note("best", {"path": self._best, "step": self._recorder.progress.step})

    async def _announce(self, saved: SavedModel) -> PublishedPolicy:
        step = self._recorder.progress.step
        newest = max(self._published, default=0)
        parent = str(self._published[newest]["name"]) if newest else ""
        description = {
            "path": str(saved.path),
            "sha256": saved.sha256,
            "size_bytes": saved.size_bytes,
            "run": self._run.name,
            "step": step,
            "parent": parent,
        }
        content = await self._resources.publish(
            resource=f"resources/policy.{self._run.policy.name}",
            kind="policy",
            content=json.dumps(description).encode(),
            content_type="application/json",
            parent=parent,
            # The same weights after a crash are the same version; other weights never are.
            request_id=f"{self._run.run_id}/{step}/{saved.sha256[:32]}",
        )
        record = {"version": content.version, "name": content.name, "step": step, "path": str(saved.path)}
        self._storage.append_version(record)
        self._published[content.version] = record
        return PublishedPolicy(name=content.name, version=content.version, path=saved.path)

    def _prune(self) -> None:
        newest = sorted(self._published)[-self._keep_models :]
        keep = [str(self._published[v]["path"]) for v in (*newest, self.version)]
        self._storage.prune_models([Path(path) for path in (*keep, self._best) if path])
