"""vLLM as a child process.

Invariant: no process of vLLM outlives this service, in whatever way either ends: all are in one group under a guardian
(`engines.guardian`), which ends with this process. vLLM never sees this service's settings, which hold the signing key.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from fulmen_algorithm.clients.child import Child
from fulmen_algorithm.cluster.gpus.machine import shown_to
from fulmen_algorithm.engines import guardian, vllm_plugin
from fulmen_algorithm.engines.engine import (
    ENGINE_KEY_NAME,
    EngineAddress,
    EngineFailed,
    EngineKind,
    EngineOptions,
    SwapGate,
)
from fulmen_algorithm.engines.process import HIDDEN_PREFIX, connectable
from fulmen_algorithm.engines.vllm_api import VllmApi, adapters_by_name, read_whole
from fulmen_algorithm.policy.engine_settings import VllmEngine
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import DEFAULT_ADAPTER, WeightsKind

POLL_S = 0.5
NOTICE_INTERVAL_S = 30.0
STOP_GRACE_S = guardian.GRACE_S + 5.0
LOG_LINES = 12
MAX_LOG_BYTES = 50_000_000
TAIL_BYTES = 8000
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""


class VllmProcess:
    """One running vLLM."""

    def __init__(
        self, child: Child, port: int, options: EngineOptions, engine: VllmEngine, *, as_adapters: bool
    ) -> None:
        """Use `start`."""
        self._child = child
        self._port = port
        self._options = options
        self._engine = engine
        self._as_adapters = as_adapters
        self._api = VllmApi(f"http://{connectable(options.host)}:{port}", options.token, reload_method="fulmen_reload")

    @classmethod
    async def start(
        cls, options: EngineOptions, policy: PublishedPolicy, engine: VllmEngine, notify: Notify
    ) -> "VllmProcess":
        """Starts vLLM and waits until it serves; reports the wait at intervals.

        Raises:
            EngineFailed: if it ends before that or times out; the text has the end of its log.
        """
        as_adapters = policy.kind is WeightsKind.LORA and engine.enable_lora
        model = policy.base_model if as_adapters else await _folder_of(policy)
        if model is None:
            raise EngineFailed("The base model of the policy's adapters is missing.")
        port = options.port or free_port(options.host)
        log = await asyncio.to_thread(_open_log, options.log_folder, policy.policy + options.log_suffix)
        command = [*_guarded(log), *command_line(options, policy, engine, model, port, as_adapters=as_adapters)]
        try:
            child = Child.start(command, environment=_environment(options, engine), output=subprocess.DEVNULL)
        except OSError as error:
            raise EngineFailed("vLLM's guardian cannot be started.") from error
        started = cls(child, port, options, engine, as_adapters=as_adapters)
        try:
            await started._await_health(log, notify)
            if as_adapters:
                for name, folder in adapters_by_name(policy).items():
                    await started._api.load_adapter(folder, name)
            await started._api.name_version(policy.version)
        except BaseException:  # includes cancellation: no process may be left behind
            await child.end(grace_s=0)
            raise
        return started

    @property
    def pid(self) -> int:
        """Process id of the guardian."""
        return self._child.pid

    @property
    def address(self) -> EngineAddress:
        """Address for the proxy."""
        return EngineAddress(
            base_url=f"http://{self._options.advertise_host}:{self._port}/v1",
            kind=EngineKind.VLLM,
            key_name=ENGINE_KEY_NAME if self._options.token else "",
        )

    async def ended(self) -> int:
        """Waits for its end; returns its exit status."""
        return await self._child.wait()

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled since it started.

        Raises:
            EngineFailed: if it does not answer.
        """
        return await self._api.sampled_tokens()

    async def healthy(self) -> bool:
        """Returns whether it answers."""
        return await self._api.healthy()

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        """Replaces the weights in place; calls in flight continue and report which version sampled which token.

        Raises:
            EngineFailed: if the weights are damaged, or vLLM refuses or does not answer.
        """
        if (policy.kind is WeightsKind.LORA and self._engine.enable_lora) != self._as_adapters:
            raise EngineFailed("vLLM was started for a different kind of weights.")
        weights = await read_whole(policy, adapters=self._as_adapters)
        return await self._api.swap(
            weights,
            policy.version,
            gate,
            mode=self._engine.swap,
            drain_limit_s=self._engine.drain_limit_s,
            recompute_cache=self._engine.recompute_cache,
        )

    async def stop(self) -> None:
        """Ends it and every process of its group."""
        await self._child.end(grace_s=STOP_GRACE_S)

    async def _await_health(self, log: Path, notify: Notify) -> None:
        began = notified = time.monotonic()
        ended = asyncio.create_task(self._child.wait(), name="vllm-ended")
        notify("info", "vLLM is starting; it loads the model, which takes a minute or more.")
        try:
            while not await self._api.healthy():
                await asyncio.wait({ended}, timeout=POLL_S)
                waited_s = time.monotonic() - began
                if ended.done():
                    raise EngineFailed(f"vLLM ended with status {ended.result()}: {_tail(log)}")
                if waited_s > self._options.vllm_start_deadline_s:
                    raise EngineFailed(f"vLLM did not start within {waited_s:.0f} s: {_tail(log)}")
                if time.monotonic() - notified >= NOTICE_INTERVAL_S:
                    notified = time.monotonic()
                    notify("info", f"vLLM has been starting for {waited_s:.0f} s; its log is {log}.")
        finally:
            ended.cancel()
        notify("info", f"vLLM serves after {time.monotonic() - began:.0f} s.")


async def _folder_of(policy: PublishedPolicy) -> Path | None:
    weights = await read_whole(policy, adapters=False)
    return weights.folder


def _guarded(log: Path) -> list[str]:
    return [sys.executable, "-I", str(Path(guardian.__file__)), str(log)]


def command_line(
    options: EngineOptions,
    policy: PublishedPolicy,
    engine: VllmEngine,
    model: Path,
    port: int,
    *,
    as_adapters: bool,
) -> list[str]:
    """Returns the command line of a vLLM that serves a version from a model folder, with its adapters or merged."""
    # The policy's name is its adapter's; without one for all roles the base model answers to it.
    base_name = f"{policy.policy}.base" if as_adapters and DEFAULT_ADAPTER in policy.adapters else policy.policy
    flags: dict[str, str | int | float | bool | None] = {
        "served-model-name": base_name,
        "host": options.host,
        "port": port,
        "dtype": engine.dtype,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_sequences,
        "tensor-parallel-size": engine.tensor_parallel,
        # Layers over machines, tensors inside each: what vLLM recommends where machines have slower lines than GPUs.
        "pipeline-parallel-size": engine.nodes if engine.nodes > 1 else None,
        "distributed-executor-backend": "ray" if engine.nodes > 1 else None,
        "gpu-memory-utilization": None if options.device == "cpu" else engine.gpu_memory_utilization,
        "enforce-eager": engine.enforce_eager or None,
        # On a CPU vLLM 0.32 ends when a call with a seed is prefilled in parts: "CPU Generator does not use offset".
        "enable-chunked-prefill": False if options.device == "cpu" else None,
        # Training needs the probabilities of the sampling distribution, after temperature.
        "logprobs-mode": "processed_logprobs",
        "middleware": "fulmen_vllm.FulmenMiddleware",
        "worker-extension-cls": "fulmen_vllm.FulmenWorker",
        "generation-config": "vllm",
        # Access logs have one line per call, and the log is rotated only at a start.
        "disable-uvicorn-access-log": True,
        "enable-auto-tool-choice": True if engine.tool_call_parser else None,
        "tool-call-parser": engine.tool_call_parser or None,
        "enable-return-routed-experts": engine.router_replay or None,
        "otlp-traces-endpoint": options.otlp_endpoint or None,
    }
    if as_adapters:
        flags |= {"enable-lora": True, "max-loras": len(policy.adapters), "max-lora-rank": _rank(policy)}
    return [options.vllm_command, "serve", str(model), *_rendered(flags | engine.args)]


def _rendered(flags: Mapping[str, str | int | float | bool | None]) -> list[str]:
    rendered: list[str] = []
    for name, value in flags.items():
        match value:
            case None:
                continue
            case True:
                rendered.append(f"--{name}")
            case False:
                rendered.append(f"--no-{name}")
            case _:
                rendered += [f"--{name}", str(value)]
    return rendered


def _rank(policy: PublishedPolicy) -> int:
    """Returns the lowest rank accepted by vLLM that fits every adapter."""
    try:
        wanted = max(json.loads((f / "adapter_config.json").read_bytes())["r"] for f in policy.adapters.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFailed("An adapter's adapter_config.json cannot be read.") from error
    ranks = [rank for rank in RANKS if rank >= wanted]
    if not ranks:
        raise EngineFailed(f"vLLM serves adapters up to rank {RANKS[-1]}, not {wanted}.")
    return ranks[0]


def _environment(options: EngineOptions, engine: VllmEngine) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN_PREFIX)}
    environment = inherited | {
        "PYTHONPATH": str(Path(vllm_plugin.__file__).parent),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": options.token,
        "HF_HUB_OFFLINE": "1",
        "OTEL_SERVICE_NAME": "vllm",
        **shown_to(options.gpus),
    }
    if os.sep in options.vllm_command:
        # Programs that vLLM starts, compilers above all, are where it is.
        folder = Path(options.vllm_command).absolute().parent
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
    if options.device == "cpu":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(engine.cpu_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(options.torch_threads),
        }
    return environment


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def _open_log(folder: Path, name: str) -> Path:
    """Rotates the log if it is large, and returns its path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"vllm-{name}.log"
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
        log.touch()
    except OSError as error:
        raise EngineFailed(f"vLLM's log in {folder} cannot be written.") from error
    return log


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:]) or f"its log {log} is empty."
