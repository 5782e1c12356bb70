"""The GPUs of this machine that runs hold. The GPUs for a run's trainer, models and engines are chosen together."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fulmen_algorithm.cluster.gpus.machine import Gpu, GpuProbe
from fulmen_algorithm.cluster.gpus.plan import Part, plan_text, planned, shared, sharing_text
from fulmen_algorithm.cluster.port import PlacementRefused
from fulmen_algorithm.policy.engine_settings import EngineSettings, ExternalEngine, VllmEngine, each_engine
from fulmen_algorithm.runs.algorithm import AlgorithmSettings, RunSettings
from fulmen_algorithm.runs.ports import GpuPlan
from fulmen_algorithm.training.compute import OWN, THIS_MACHINE

_HERE = ("", THIS_MACHINE)
_TRAINER = "the trainer"
NONE_NEEDED = "No GPUs of the service's machine are needed."
NONE_USED = "No GPUs are used (FULMEN_ALGORITHM_DEVICE)."
UNKNOWN = (
    "The GPUs of this machine are unknown (nvidia-smi does not answer), so trainer and engines all see all of them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlacement:
    """Where a run is on the GPUs of this machine.

    Attributes:
        settings: Settings of the run, with the GPUs of its trainer and its engines.
        text: The plan as a sentence; empty without GPUs.
        sharing: Which GPUs are shared, as a sentence; empty if none is.
        crowded: Policies of ended runs whose engines must end first.
    """

    settings: RunSettings
    text: str = ""
    sharing: str = ""
    crowded: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What this service serves besides: settings of engines, with their GPUs.

    Attributes:
        own: Those of the run's policy, from an earlier run or process; None if it has none.
        idle: Those of policies whose runs have ended, by policy.
    """

    own: EngineSettings | None = None
    idle: Mapping[str, EngineSettings] = field(default_factory=dict)


class RunGpus:
    """The GPUs that the active runs of this service hold."""

    def __init__(self, probe: GpuProbe, *, device: str) -> None:
        """Does not query the GPUs yet; `device` is the service's: `cpu`, `cuda` or `cuda:1`."""
        self._probe = probe
        self._has_gpus = device.startswith("cuda")
        self._held: dict[str, Sequence[Part]] = {}
        self._placing = asyncio.Lock()

    async def place(self, run: str, settings: RunSettings, *, trains: bool, served: Served) -> GpuPlacement:
        """Chooses the GPUs of a run, which it holds until `release`.

        Args:
            run: Name of the run.
            settings: Its settings.
            trains: Whether it trains weights.
            served: What this service serves besides.

        Raises:
            PlacementRefused: with every reason, if it does not fit.
        """
        async with self._placing:
            self._held.pop(run, None)
            parts = list(_parts(settings, trains=trains, own=served.own))
            gpus = await self._probe.gpus() if self._has_gpus and parts else {}
            if not gpus:
                return GpuPlacement(settings=settings, text=self._without_gpus(settings, parts))
            found, sharing, crowded = _beside(parts, gpus, self._held, served.idle)
            self._held[run] = found
            return GpuPlacement(
                settings=_settled(settings, found),
                text=plan_text(found, gpus),
                sharing=sharing_text(sharing) if sharing else "",
                crowded=crowded,
            )

    async def plan(self, settings: RunSettings, trains: bool) -> GpuPlan:
        """Plans a run as if no other run held any GPUs."""
        parts = list(_parts(settings, trains=trains, own=None))
        gpus = await self._probe.gpus() if self._has_gpus and parts else {}
        try:
            if not gpus:
                return GpuPlan(
                    text=self._without_gpus(settings, parts) or (NONE_NEEDED if self._has_gpus else NONE_USED)
                )
            found = planned(parts, gpus, {})
        except PlacementRefused as error:
            return GpuPlan(problems=error.reasons)
        sharing = shared(found, {})
        return GpuPlan(text=" ".join([plan_text(found, gpus), *([sharing_text(sharing)] if sharing else [])]))

    def release(self, run: str) -> None:
        """Marks a run as ended; what its engines hold from then on is in `Served.idle`."""
        self._held.pop(run, None)

    def _without_gpus(self, settings: RunSettings, parts: Sequence[Part]) -> str:
        why = "are unknown (nvidia-smi does not answer)" if self._has_gpus else "are not used (FULMEN_ALGORITHM_DEVICE)"
        named = [f"{part.name}: GPUs are named, but the GPUs of this machine {why}" for part in parts if part.gpus]
        if isinstance(settings, AlgorithmSettings) and not (self._has_gpus and settings.cluster not in _HERE):
            asked = [model for model, gpus in settings.parallel.beside.items() if gpus == OWN]
            named += [
                f"the {model}: GPUs of its own are requested, but the GPUs of this machine {why}" for model in asked
            ]
        if named:
            raise PlacementRefused(named)
        return UNKNOWN if self._has_gpus and parts else ""


def _beside(
    parts: Sequence[Part],
    gpus: Mapping[int, Gpu],
    held: Mapping[str, Sequence[Part]],
    idle: Mapping[str, EngineSettings],
) -> tuple[list[Part], dict[int, list[str]], list[str]]:
    """Plans beside the engines of ended runs; without those that are in the way.

    Returns:
        The parts with their GPUs, those that are shared, and the policies whose engines are in the way.

    Raises:
        PlacementRefused: with every reason, if it does not fit.
    """
    serving = {f"policy {policy}": list(_engine_parts(engine)) for policy, engine in idle.items()}
    beside = None
    try:
        found = planned(parts, gpus, {**held, **serving})
        beside = found, shared(found, {**held, **serving}), list[str]()
        if not (idle and beside[1]):
            return beside
    except PlacementRefused:
        if not idle:
            raise
    found = planned(parts, gpus, held)
    sharing = shared(found, held)
    if beside is not None and len(beside[1]) <= len(sharing):
        return beside
    mine = {gpu for part in found for gpu in part.gpus}
    return found, sharing, [policy for policy, engine in idle.items() if mine & {*_gpus_of(engine)}]


def _parts(settings: RunSettings, *, trains: bool, own: EngineSettings | None) -> Iterator[Part]:
    if trains and isinstance(settings, AlgorithmSettings) and settings.cluster in _HERE:
        yield from _trainer_parts(settings).values()
    yield from _engine_parts(settings.engine, own)


def _trainer_parts(settings: AlgorithmSettings) -> Mapping[str, Part]:
    """Returns the parts of a trainer, by the setting of `parallel` that names their GPUs."""
    parallel = settings.parallel
    models = {"reference": settings.uses_reference, "critic": settings.critic_plan is not None}
    shared = [model for model, there in models.items() if there and model not in parallel.beside]
    ranks = _TRAINER if parallel.ranks == 1 else f"{_TRAINER}'s {parallel.ranks} ranks"
    name = ranks + (f" with {' and '.join(shared)}" if shared else "")
    found = {"gpus": Part(name=name, count=parallel.ranks, gpus=parallel.gpus or (), processes=_TRAINER)}
    for model, gpus in parallel.beside.items():
        name = f"the {model}" if parallel.ranks == 1 else f"the {parallel.ranks} copies of the {model}"
        named = gpus if isinstance(gpus, list) else ()
        found[f"{model}_gpus"] = Part(name=name, count=parallel.ranks, gpus=named, processes=_TRAINER)
    return found


def _engine_parts(engine: EngineSettings, own: EngineSettings | None = None) -> Iterator[Part]:
    if isinstance(engine, ExternalEngine) or engine.cluster != THIS_MACHINE or engine.gpus == 0:
        return
    had = [_gpus_of(each) for each in each_engine(own)] if own is not None else []
    for index, each in enumerate(each_engine(engine)):
        yield Part(
            name="the engine" if engine.replicas == 1 else f"engine {index}",
            count=engine.gpus_of_each,
            share=engine.gpu_memory_utilization if isinstance(engine, VllmEngine) else 0.0,
            gpus=_gpus_of(each),
            had=had[index] if index < len(had) else (),
        )


def _gpus_of(engine: EngineSettings) -> Sequence[int]:
    return engine.gpus if not isinstance(engine, ExternalEngine) and isinstance(engine.gpus, list) else ()


def _settled(settings: RunSettings, found: Sequence[Part]) -> RunSettings:
    """Returns settings of a run that name the GPUs of its parts."""
    changed: dict[str, object] = {}
    trainer = [part for part in found if part.processes == _TRAINER]
    if engines := found[len(trainer) :]:
        gpus = [gpu for part in engines for gpu in part.gpus]
        changed["engine"] = settings.engine.model_copy(update={"gpus": gpus})
    if trainer and isinstance(settings, AlgorithmSettings):
        named = {name: list(part.gpus) for name, part in zip(_trainer_parts(settings), trainer, strict=True)}
        changed["parallel"] = settings.parallel.model_copy(update=named)
    return settings.model_copy(update=changed)
