"""The trainers of loops outside of the service."""

from __future__ import annotations

from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.connections import ServiceConnections
from fulmen_algorithm.loops.processes import LoopProcesses
from fulmen_algorithm.loops.publication import Publisher
from fulmen_algorithm.loops.trainers import TrainerLimits, Trainers
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.first_weights import WeightSources
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.wiring.models import ModelParts

__all__ = ["trainers_of"]


def trainers_of(
    settings: AlgorithmServiceSettings,
    storage: RunStorage,
    local: LocalCluster,
    *,
    connections: ServiceConnections,
    models: ModelParts,
) -> Trainers:
    """Returns the trainers, whose processes are on this machine."""

    def sources(project: str) -> WeightSources:
        return WeightSources(
            resources=connections.resources_of(project),
            roots=models.roots,
            models=models.bases,
            notify=lambda severity, text: None,
        )

    options = GroupOptions(
        device=settings.device,
        torch_threads=settings.torch_threads,
        call_deadline_s=settings.trainer_deadline_s,
        cluster=local,
    )
    return Trainers(
        settings.state_dir.absolute() / "trainers",
        limits=TrainerLimits(
            max_trainers=settings.max_trainers,
            max_checkpoints=settings.max_trainer_checkpoints,
            max_bytes=settings.max_trainer_bytes,
            idle_s=settings.trainer_idle_s,
            keep_s=settings.trainer_keep_s,
        ),
        processes=LoopProcesses(options, max_processes=settings.max_trainer_processes),
        publisher=Publisher(storage=storage, resources=connections.resources_of, keep=settings.keep_models),
        sources=sources,
    )
