"""The interface of an engine: an OpenAI-compatible server that takes new weights in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats

ENGINE_KEY_NAME = "engine"
"""Entry of the proxy's `backend_keys` with the key of the engines that the service starts itself."""


class EngineFailed(Exception):
    """The engine did not start, ended, refused weights or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Start options of engines.

    Attributes:
        host: Address that the engine binds to.
        advertise_host: Host under which the proxy reaches it.
        port: Port; 0 selects a free one at each start.
        token: Bearer token required by the engine; empty for none, which requires a loopback host.
        torch_threads: Threads of one torch operation.
        device: `cpu` or `cuda`.
        gpus: GPUs of this machine that the engine sees; empty for all.
        max_batch_size: Requests that are generated together by the embedded engine.
        router_replay: Whether answers of the embedded engine include the experts that computed each token.
        log_folder: Folder for the output of engines in other programs.
        log_suffix: Ends the names of these files, where several engines serve a policy.
        vllm_command: The vLLM program.
        vllm_start_deadline_s: Timeout of a vLLM's start, in seconds.
        otlp_endpoint: Where vLLM sends its traces by OTLP/gRPC, without TLS; empty for nowhere.
        external_keys: Key of each external engine that runs may name, by its address; empty for none.
    """

    host: str
    advertise_host: str
    port: int
    token: str
    torch_threads: int
    device: str
    max_batch_size: int
    gpus: Sequence[int] = ()
    router_replay: bool = False
    log_folder: Path = Path(".fulmen/algorithm/engines")
    log_suffix: str = ""
    vllm_command: str = "vllm"
    vllm_start_deadline_s: float = 600.0
    otlp_endpoint: str = ""
    external_keys: Mapping[str, str] = field(default_factory=dict, repr=False)


class EngineKind(StrEnum):
    """Engine types known to the proxy."""

    FULMEN = "fulmen"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Address and type of an engine, for the proxy.

    Attributes:
        base_url: Where its OpenAI API begins.
        kind: Type of the engine.
        key_name: Entry of the proxy's `backend_keys` with its key; empty for none.
        model: The name under which it serves the policy; empty for the policy's own.
    """

    base_url: str
    kind: EngineKind = EngineKind.FULMEN
    key_name: str = ""
    model: str = ""


class SwapGate(Protocol):
    """The proxy's part of a swap; every call waits while the proxy is unavailable."""

    async def hold(self, ttl_s: float) -> None:
        """Holds new calls in the proxy, for at most `ttl_s`."""

    async def idle(self, limit_s: float) -> bool:
        """Waits until the proxy has no call at the engine; False on timeout."""

    async def promote(self) -> None:
        """Starts attributing tokens to the new version."""

    async def release(self) -> None:
        """Releases held calls to the engine."""


class Engine(Protocol):
    """One running engine. Every method but `pid`, `address`, `ended`, `healthy` and `stop` raises `EngineFailed`."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def address(self) -> EngineAddress:
        """Address for the proxy."""

    async def ended(self) -> int:
        """Waits for its end; returns its exit status."""

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled since it started."""

    async def healthy(self) -> bool:
        """Returns whether it answers; never raises."""

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        """Replaces the weights in place and has them promoted; calls in flight continue, none fails."""

    async def stop(self) -> None:
        """Ends it."""


class Starter(Protocol):
    """Starts engines, or has them."""

    async def start(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        gate: SwapGate,
    ) -> Engine:
        """Starts an engine and returns when it serves a policy version.

        Args:
            options: How engines are started.
            policy: The version.
            engine: Kind and settings of the engine.
            notify: Receives notices about waits.
            gate: The proxy's part, for an engine that was running before and may have calls in flight.

        Raises:
            EngineFailed: if it does not start.
        """
