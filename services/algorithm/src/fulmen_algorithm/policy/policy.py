"""The policy of a run: trained here, published as versions, served by the engine.

Steps of a publication: save the weights, complete or as a delta; publish the resource version, whose number is the
policy version; swap the engine's weights, which it reads and checks before it pauses; promote the version at the proxy.
A crash before the resource leaves a folder that is pruned later; a crash after it leaves a version that is never
served, and the run resumes from its checkpoint with the next number. A proxy without the new version mislabels nothing:
the engine itself reports which version sampled each token.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fulmen_algorithm.policy.policy_resource import PolicyResource
from fulmen_algorithm.policy.services import RunServices
from fulmen_algorithm.policy.trainer import Trainer, WritesBehind
from fulmen_algorithm.policy.versions import BestVersion, Versions
from fulmen_algorithm.runs.behind import Behind
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import PublishedPolicy, SavedModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import (
    BatchSettings,
    FullWeights,
    LoraSettings,
    StepResult,
    StepSettings,
    WeightsKind,
    WeightsSettings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAST_SUFFIX = "-past"
"""Ends the model name under which a past version of a policy is served."""
BEST = "best"
"""Alias of the version with the best validation result."""
FULL_WEIGHTS = FullWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """Settings of a policy's versions.

    Attributes:
        keep_models: Number of newest versions whose weights are kept.
        weights: Format of published versions.
        lora: Adapters that are trained instead of all weights.
        base_model: Model folder that the adapters of `lora` are trained on.
        optimizer_steps_per_step: Maximum number of optimiser steps in a step of the run.
        purpose: What the versions are for, if not to sample answers; see `stored_weights.REWARD_MODEL`.
    """

    keep_models: int
    weights: WeightsSettings = FULL_WEIGHTS
    lora: LoraSettings | None = None
    base_model: Path | None = None
    optimizer_steps_per_step: int = 1
    purpose: str = ""


class Policy:
    """The interface of the policy for algorithms.

    Attributes:
        publish_metrics: Cost of the last publication that is over: `publish_seconds`, `publish_bytes` read by the engine,
            `publish_bytes_full` of the complete weights, `publish_pause_ms` without sampling, and, for a delta,
            `delta_changed_share` of the weights.
        behind: The publication that runs behind the training.
    """

    def __init__(self, services: RunServices, trainer: Trainer, settings: PublishSettings) -> None:
        """`trainer` holds the weights."""
        self._entry = services.entry
        self._trainer = trainer
        self._recorder = services.recorder
        self._control = services.control
        self._serving = services.serving
        self._beside = services.beside
        self._held: tuple[int, ...] = ()
        self._past_served = False
        self._notify = services.entry.events.notify
        self._keep_models = settings.keep_models
        self._per_step = settings.optimizer_steps_per_step
        self._supervised = (0, 0)
        self._served = False
        self._present = 0
        """Version that this object published or found last; 0 for none."""
        self.behind = Behind()
        self._model = Path()
        self.publish_metrics: dict[str, float] = {}
        self._versions = Versions(
            files=services.entry.files,
            trainer=trainer,
            weights=settings.weights,
            lora=settings.lora,
            base_model=settings.base_model,
            purpose=settings.purpose,
        )
        self._resource = PolicyResource(services=services, versions=self._versions)
        self._roles = frozenset(settings.lora.roles if settings.lora is not None else ())
        noted = services.entry.files.notes().get(BEST)
        self._best = BestVersion.read(noted) if noted else None

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._trainer.tokenizer

    @property
    def version(self) -> int:
        """The policy version of the present weights; 0 if they are not published."""
        return self._recorder.progress.policy_version

    def step_of(self, version: int) -> int | None:
        """Returns the last step whose weights a version of this run has; None for a version of another run."""
        record = self._versions.records.get(version)
        return None if record is None else record.last_step

    def has_weights_of(self, step: int) -> bool:
        """Returns whether the present version has the weights of a step."""
        record = self._versions.records.get(self.version)
        return record is not None and record.step <= step <= record.last_step

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step; not interruptible.

        Raises:
            RunFailed: if a row's role has no adapter.
        """
        self._check_roles(rows)
        results = await self._trainer.train(
            rows, settings=self._placed(settings), batch=batch, seed=seed, current_version=current_version
        )
        await self.behind.settle()
        self._report_exchanges(results)
        return results

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes each trained token's log-probability under the reference policy; 0.0 for other tokens."""
        return await self._trainer.reference_logprobs(rows, settings=settings)

    async def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes each trained token's log-probability under the reward model; 0.0 for other tokens."""
        return await self._trainer.reward_logprobs(rows, settings=settings)

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes each trained token's log-probability under the present weights; 0.0 for other tokens."""
        return await self._trainer.logprobs(rows, settings=settings)

    async def supervised_loss(self, rows: Sequence[Row], *, settings: StepSettings) -> float:
        """Computes the mean cross-entropy of the trained tokens under the present weights, without training."""
        found = await self.logprobs(rows, settings=settings)
        pairs = zip((t for row in rows for t in row.loss_mask), (p for row in found for p in row), strict=True)
        chosen = [logprob for trains, logprob in pairs if trains]
        return -sum(chosen) / max(len(chosen), 1)

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step.

        Raises:
            RunFailed: if a row's role has no adapter.
        """
        self._check_roles(rows)
        step, calls = self._recorder.progress.step, self._supervised[1]
        number = calls if self._supervised[0] == step else 0
        self._supervised = (step, number + 1)
        later = min(number, self._per_step - 1)
        result = await self._trainer.train_supervised(rows, settings=self._placed(settings).later(later))
        await self.behind.settle()
        self._report_exchanges([result])
        return result

    def _report_exchanges(self, results: Sequence[StepResult]) -> None:
        """Records the time of exchanges separately from training, and emits their events as notices."""
        seconds = sum(result.exchange_s for result in results)
        if seconds:
            self._recorder.spend("exchange", seconds)
            self._recorder.spend("train", -seconds)
        for text in (text for result in results for text in result.events):
            self._notify("info", f"exchange: {text}")

    def _placed(self, settings: StepSettings) -> StepSettings:
        """Adds the step's position in the run, which determines the learning rate even after skipped steps."""
        progress, steps, per_step = self._recorder.progress, self._recorder.steps, self._per_step
        metric = progress.rewards[-1] if progress.rewards else None
        return replace(settings, planned_steps=progress.step * per_step, total_steps=steps * per_step, metric=metric)

    async def publish(self, *, behind: bool = False) -> int:
        """Publishes the present weights if they are others than the newest version's, and swaps them in if it is served.

        With `behind`, and a trainer that can, it returns once the weights are copied. They are then published while the
        caller trains on, until the next `train` returns; what fails is raised by the next `publish`.

        Returns:
            The policy version; 0 if it is still being published.

        Raises:
            Interrupted: if the run was asked to stop; the next `publish` starts over.
        """
        self.publish_metrics = {}
        await self.behind.done()
        started, step = time.monotonic(), self._recorder.progress.step
        last = step >= self._recorder.steps
        if self.version and (self._published_at(step) or self._versions.can_remain(self.version, last=last)):
            self._remains(self.version, step)
            return self.version
        if behind and isinstance(self._trainer, WritesBehind) and not last:
            save = await self._versions.copied(self._trainer, step)
            self.behind.start(self._publish_saved(save, step, started), name=f"publish step {step}")
            return 0
        saved = await self._versions.write(step, whole=last)
        if not await self._is_present(saved, step):
            published = await self._announced(saved, step)
            with self._versions.publishing(published.version):
                await self._put_in(published, started)
        return self.version

    async def _publish_saved(self, save: Callable[[], Awaitable[SavedModel]], step: int, started: float) -> None:
        saved = await save()
        if not await self._is_present(saved, step):
            # If its chain no longer exists, the trainer cannot write this version again: its weights have changed.
            await self._put_in(await self._announced(saved, step), started)

    async def _is_present(self, saved: SavedModel, step: int) -> bool:
        """Keeps the present version if it has the weights that were saved.

        Optimiser steps may be so small that they are lost in the number format of the weights.
        """
        last = step >= self._recorder.steps
        if not self._equals_present(saved) or not self._versions.can_remain(self._present, last=last):
            return False
        self._remains(self._present, step)
        await self._prune(Path(self._entry.run.model_path))
        return True

    async def _announced(self, saved: SavedModel, step: int) -> PublishedPolicy:
        published, saved = await self._control.unless_stopped(self._resource.publish(saved, step))
        self.publish_metrics = {"publish_bytes": float(saved.size_bytes), "publish_bytes_full": float(saved.full_bytes)}
        if saved.kind is WeightsKind.DELTA:
            self.publish_metrics["delta_changed_share"] = saved.changed_share
        self._model = saved.merged or saved.path
        return published

    async def _put_in(self, published: PublishedPolicy, started: float) -> None:
        if self._served:
            await self._swap(published)
        self._recorder.published(published.version)
        self._present = published.version
        self._versions.served(published.version)
        self._entry.update(policy_version=published.name, model_path=str(self._model))
        await self._prune(self._model)
        self.publish_metrics["publish_seconds"] = time.monotonic() - started

    def _published_at(self, step: int) -> bool:
        return self._versions.records[self.version].step == step

    def _equals_present(self, saved: SavedModel) -> bool:
        record = self._versions.records.get(self._present)
        return record is not None and bool(saved.sha256) and record.sha256 == saved.sha256

    def _remains(self, version: int, step: int) -> None:
        """Records that a version has the weights of the present step too."""
        self._versions.unchanged(version, step)
        self._recorder.published(version)
        self._present = version

    async def serve(self, overrides: Mapping[str, Mapping[str, object]]) -> None:
        """Serves the present weights; `overrides` are request fields by rollout mode."""
        version = await self.publish()
        record = self._versions.records[version]
        published = self._versions.published(version)
        if record.kind is WeightsKind.DELTA or not record.path.exists():
            # An engine starts with complete weights; write them again if their folder is a delta or was pruned.
            saved = await self._versions.write(record.step, whole=True)
            published = replace(
                published, kind=saved.kind, path=saved.path, sha256=saved.sha256, base_version=0, base_sha256=""
            )
            self._versions.served(version)
        fields = {mode: json.dumps(values) for mode, values in overrides.items()}
        await self._control.unless_stopped(self._serving.serve(published, fields, self._notify))
        self._served = True

    def has(self, version: int) -> bool:
        """Returns whether the complete weights of a version of this run are still on the disk."""
        record = self._versions.records.get(version)
        return record is not None and record.kind is WeightsKind.FULL and record.path.exists()

    def hold(self, versions: Sequence[int]) -> None:
        """Protects versions from pruning, in place of those that were protected so before."""
        self._held = tuple(versions)

    async def serve_past(self, version: int, overrides: Mapping[str, Mapping[str, object]]) -> None:
        """Serves a version as the model `<policy>-past`, beside the present weights.

        To the proxy it is another policy, so what it samples is not taken for this one's.

        Raises:
            RunFailed: if there is no room for its engine.
            Interrupted: if the run was asked to stop.
        """
        name = f"{self._resource.name}{PAST_SUFFIX}/versions/{version}"
        past = replace(self._versions.published(version), name=name)
        if self._past_served:
            await self._control.unless_stopped(self._beside.swap(past))
            return
        fields = {mode: json.dumps(values) for mode, values in overrides.items()}
        await self._control.unless_stopped(self._beside.serve(past, fields, self._notify))
        self._past_served = True

    async def rollback(self, version: int) -> PublishedPolicy:
        """Republishes the weights of an older version as a new version that names the older one, and swaps them in.

        The trained weights do not change: the next step publishes them again.

        Raises:
            RunFailed: if the weights of the version are missing.
            Interrupted: if the run was asked to stop.
        """
        await self.behind.done()
        saved = await self._versions.again(version)
        published, saved = await self._control.unless_stopped(
            self._resource.publish(saved, self._versions.records[version].step, equals=version)
        )
        if self._served:
            await self._swap(published)
        self._versions.served(published.version)
        self._entry.update(policy_version=published.name, model_path=str(saved.merged or saved.path))
        self._notify("info", f"Version {published.version} has the weights of version {version}.")
        return published

    async def serve_best(self) -> BestVersion | None:
        """Serves the version that `mark_best` marked, and returns it; None if it is the present one.

        Raises:
            RunFailed: if its weights are missing.
            Interrupted: if the run was asked to stop.
        """
        if self._best is None or self._best.version == self.version:
            return None
        await self.rollback(self._best.version)
        return self._best

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled from the served policy."""
        return await self._serving.sampled_tokens()

    async def mark_best(self, validation: float) -> None:
        """Protects the present version from pruning and moves the alias `best` to it.

        Args:
            validation: Its validation result.
        """
        self._best = BestVersion(
            version=self.version,
            step=self._recorder.progress.step,
            path=str(self._versions.records[self.version].path),
            validation=validation,
        )
        self._entry.files.save_note(BEST, asdict(self._best))
        await self._control.unless_stopped(self._resource.point(BEST, self._best.version))

    def check_model(self, role: str, model: str) -> None:
        """Checks that a role called the model that its rows train.

        Raises:
            RunFailed: if it called another role's model or the one without adapters; its rows would train an adapter
                that did not sample them.
        """
        name = self._entry.run.policy.name
        own, others = f"{name}.{role}", {name, *(f"{name}.{each}" for each in self._roles)}
        if role in self._roles and model != own and model in others:
            raise RunFailed(f"The role {role!r} called the model {model}; with lora.roles it must call {own}.")

    def _check_roles(self, rows: Sequence[Row]) -> None:
        if self._roles and (unknown := {row.role for row in rows} - self._roles):
            known = ", ".join(sorted(self._roles))
            raise RunFailed(f"There is no adapter for the role {min(unknown)!r}: lora.roles has {known}.")

    async def _swap(self, published: PublishedPolicy) -> None:
        swapped = await self._control.unless_stopped(self._serving.swap(published))
        self.publish_metrics["publish_pause_ms"] = 1000 * swapped.pause_s
        if swapped.size_bytes:
            self.publish_metrics["publish_bytes"] = float(swapped.size_bytes)

    async def _prune(self, model: Path) -> None:
        newest = sorted(self._versions.records)[-self._keep_models :]
        best = () if self._best is None else (self._best,)
        await self._versions.prune(
            (*newest, self.version, *self._held, *(each.version for each in best)),
            also=(model, *(Path(each.path) for each in best)),
        )
