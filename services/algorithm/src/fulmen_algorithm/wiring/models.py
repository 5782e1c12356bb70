"""Stored models: where they are, how they come in, and who needs them."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen_algorithm.clients.hub import HubLimits, HubModels
from fulmen_algorithm.loops.trainers import Trainers
from fulmen_algorithm.models.bases import BaseModels, used_by
from fulmen_algorithm.models.model_store import ModelStore
from fulmen_algorithm.models.uploads import UploadLimits, Uploads
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.transport.weights import UsedBy

__all__ = ["ModelParts", "models_of", "users_of_models"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The models that runs begin with.

    Attributes:
        store: Those that are stored.
        uploads: Those that are being uploaded.
        roots: The folders in which a run may name a model.
        bases: Finds a model by its name, in the store or at the hub.
    """

    store: ModelStore
    uploads: Uploads
    roots: ModelRoots
    bases: BaseModels


def models_of(settings: AlgorithmServiceSettings, storage: RunStorage) -> ModelParts:
    """Returns the models, whose folder is beside the runs' folder."""
    store = ModelStore(storage.folder.with_name("models"))
    limits = UploadLimits(
        max_bytes=settings.upload_max_bytes,
        quota_bytes=settings.upload_quota_bytes,
        idle_s=settings.upload_idle_s,
        keep_s=settings.upload_keep_s,
    )
    hub = HubModels(
        settings.hub_models,
        HubLimits(max_bytes=settings.hub_max_bytes, deadline_s=settings.hub_deadline_s),
        variables={"HF_HOME": settings.hub_cache, "HF_TOKEN": settings.hub_token.get_secret_value()},
    )
    return ModelParts(
        store=store,
        uploads=Uploads(store, limits),
        roots=ModelRoots.of(settings.model_roots, runs=storage.folder, models=store.folder),
        bases=BaseModels(store, hub),
    )


def users_of_models(models: ModelStore, runs: RunRegistry, trainers: Trainers) -> UsedBy:
    """Returns what finds the run or the trainer that needs a model."""
    of_runs = used_by(runs)
    return lambda model: of_runs(model) or trainers.using(models.place(model.name.project) / model.name.id)
