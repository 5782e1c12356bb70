"""Selects the program that serves a run; the only place that distinguishes kinds of engines."""

import shutil
from collections.abc import Awaitable, Callable
from typing import assert_never

from fulmen_algorithm.engines.engine import Engine, EngineOptions
from fulmen_algorithm.engines.external import ExternalVllm
from fulmen_algorithm.engines.process import EngineProcess
from fulmen_algorithm.engines.vllm import VllmProcess
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, EngineSettings, ExternalEngine, VllmEngine
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy

StartEmbedded = Callable[[EngineOptions, PublishedPolicy], Awaitable[Engine]]


def unavailable(options: EngineOptions, engine: EngineSettings) -> str:
    """Returns the reason why an engine is unavailable, with the remedy; empty if it is available."""
    if isinstance(engine, VllmEngine) and shutil.which(options.vllm_command) is None:
        return (
            f"there is no program {options.vllm_command!r}: install vLLM, or name it by the service's setting "
            "FULMEN_ALGORITHM_VLLM_COMMAND (docs/engines.md)"
        )
    if isinstance(engine, ExternalEngine) and engine.base_url not in options.external_keys:
        return f"{engine.base_url} is not in the service's setting FULMEN_ALGORITHM_EXTERNAL_ENGINES (docs/engines.md)"
    return ""


class EngineStarter:
    """Starts the engine requested by a run; see `engines.engine.StartEngine`."""

    def __init__(self, embedded: StartEmbedded = EngineProcess.start) -> None:
        """`embedded` starts the embedded engine: as a child process, or in this process."""
        self._embedded = embedded

    async def __call__(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        promote: Callable[[], Awaitable[None]],
    ) -> Engine:
        """Returns an engine that serves a policy version; see `StartEngine`.

        Raises:
            EngineFailed: if it does not start.
        """
        match engine:
            case EmbeddedEngine():
                notify("info", "The engine starts.")
                return await self._embedded(options, policy)
            case VllmEngine():
                return await VllmProcess.start(options, policy, engine, notify)
            case ExternalEngine():
                return await ExternalVllm.attach(options, policy, engine, notify, promote)
            case _:
                assert_never(engine)
