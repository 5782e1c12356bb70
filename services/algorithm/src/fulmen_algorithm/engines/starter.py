"""Selects the program that serves a run; the only place that distinguishes kinds of engines."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.engines.engine import Engine, EngineOptions, SwapGate
from fulmen_algorithm.engines.external import ExternalVllm
from fulmen_algorithm.engines.process import EngineProcess
from fulmen_algorithm.engines.vllm import VllmProcess
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, EngineSettings, ExternalEngine, VllmEngine
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy


class EngineStarter:
    """Starts the engine that a run asks for."""

    def __init__(self, modules: ModuleStarter, *, in_process: bool = False) -> None:
        """Initializes the starter.

        Args:
            modules: Starts the embedded engine's process.
            in_process: Whether the embedded engine runs in this process instead.
        """
        self._modules = modules
        self._in_process = in_process

    async def start(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        gate: SwapGate,
    ) -> Engine:
        """Starts an engine; see `engines.engine.Starter`."""
        if not isinstance(engine, ExternalEngine) and engine.gpus is not None:
            options = self._on_gpus(options, engine.gpus)
        match engine:
            case EmbeddedEngine():
                notify("info", "The engine is starting.")
                options = replace(options, router_replay=engine.router_replay)
                if self._in_process:
                    from fulmen_algorithm.engines.in_process import start_engine_inside  # it loads torch

                    return await start_engine_inside(options, policy)
                return await EngineProcess.start(options, policy, self._modules)
            case VllmEngine():
                return await VllmProcess.start(options, policy, engine, notify)
            case ExternalEngine():
                return await ExternalVllm.attach(options, policy, engine, notify, gate)
            case _:
                assert_never(engine)

    def _on_gpus(self, options: EngineOptions, gpus: int | Sequence[int]) -> EngineOptions:
        """Returns the options of an engine that is on some GPUs; on none for 0."""
        if isinstance(gpus, int):
            return options if gpus else replace(options, device="cpu")
        if self._in_process:
            return replace(options, device=f"cuda:{gpus[0]}")
        return replace(options, gpus=gpus, device="cuda")
