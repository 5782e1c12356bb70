"""What is stored of runs, which of them are this service's, and what executes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.algorithms.registry import AlgorithmsInvalid, load_registry
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.connections import ServiceConnections
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.algorithm import Registry
from fulmen_algorithm.runs.execution import RunExecutor
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.sinks.sink import OpenSink, load_sink
from fulmen_algorithm.wiring.models import ModelParts
from fulmen_service_kit.errors import StartupError

__all__ = ["RunParts", "now", "open_runs", "sinks_of", "worker_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The runs of this service.

    Attributes:
        algorithms: Those that a run can name.
        storage: Their files.
        registry: Their states, including runs of earlier processes.
        ownership: Their leases, which other services on the same storage respect.
    """

    algorithms: Registry
    storage: RunStorage
    registry: RunRegistry
    ownership: RunOwnership


def open_runs(
    settings: AlgorithmServiceSettings, stack: AsyncExitStack, store: FulmenChannel, *, address: Callable[[], str]
) -> RunParts:
    """Opens the storage of runs and restores those in it.

    Args:
        settings: The service's.
        stack: Closes the storage.
        store: Keeps the leases.
        address: Returns the address at which other services reach this one.

    Raises:
        StartupError: if an algorithm cannot be loaded, or another process works on the state folder.
    """
    algorithms = _algorithms(settings)
    storage = stack.enter_context(RunStorage(settings.state_dir, url=settings.run_storage))
    registry = RunRegistry(
        storage, clock=now, max_concurrent=settings.max_concurrent_runs, max_of_project=settings.project_max_runs
    )
    for run, files in storage.runs():
        registry.restore_readable(run, files)
    leases = StoreRunLeases(
        store, owner=storage.owner, storage=storage.storage_id, address=address, ttl_s=settings.run_lease_s
    )
    ownership = RunOwnership(
        registry, leases, storage, lease_s=settings.run_lease_s, outage_limit_s=settings.outage_limit_s
    )
    return RunParts(algorithms=algorithms, storage=storage, registry=registry, ownership=ownership)


def worker_of(
    settings: AlgorithmServiceSettings, runs: RunParts, connections: ServiceConnections, models: ModelParts
) -> RunWorker:
    """Returns what executes the runs."""
    executor = RunExecutor(
        registry=runs.algorithms,
        connections=connections,
        keep_checkpoints=settings.keep_checkpoints,
        keep_models=settings.keep_models,
        machine={"device": settings.device, "torch_threads": str(settings.torch_threads)},
        check_owned=runs.ownership.check,
        model_roots=models.roots,
        models=models.bases,
        on_no_signal=settings.on_no_signal,
    )
    return RunWorker(runs.registry, executor, runs.ownership)


def sinks_of(settings: AlgorithmServiceSettings) -> dict[str, OpenSink]:
    """Returns the metric sinks, by name.

    Raises:
        StartupError: if one needs a package that is not installed.
    """
    sinks: dict[str, OpenSink] = {}
    for name in filter(None, (part.strip() for part in settings.metric_sinks.split(","))):
        try:
            sinks[name] = load_sink(name)
        except ImportError:
            raise StartupError(f"The metric sink {name!r} needs `pip install 'fulmen-algorithm[{name}]'`.") from None
    return sinks


def now() -> datetime:
    """Returns the time at which runs are created and change."""
    return datetime.now(UTC)


def _algorithms(settings: AlgorithmServiceSettings) -> Registry:
    files = [Path(file).expanduser() for file in settings.modules.split(os.pathsep) if file]
    try:
        return load_registry(files)
    except AlgorithmsInvalid as error:
        raise StartupError(f"{error}.") from error
