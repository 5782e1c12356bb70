"""A vLLM server's administration over HTTP, and the sequence in which it gets new weights.

Sources: vLLM 0.32, `vllm/entrypoints/rl/online/api_router.py` (pause, resume, weight version), `serve/dev/rpc`
(`reload_weights`), `serve/dev/cache`, `serve/lora`; all but the last need `VLLM_SERVER_DEV_MODE=1`.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from fulmen_algorithm.engines.engine import EngineFailed, SwapGate
from fulmen_algorithm.policy.engine_settings import SwapMode
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import DEFAULT_ADAPTER, WeightsKind

CALL_DEADLINE_S = 30.0
HEALTH_DEADLINE_S = 10.0
LOAD_DEADLINE_S = 600.0
HOLD_MARGIN_S = 60.0
LONGEST_HOLD_S = 600.0
CANCELLED_WAIT_S = 30.0
READ_CHUNK_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024
MAX_ANSWER_CHARACTERS = 300
TOKENS_METRIC = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Verified weights.

    Attributes:
        folder: A complete model folder; None if only adapters are replaced.
        adapters: Folder by the model name under which it is served.
        size_bytes: Bytes that vLLM has to read.
    """

    folder: Path | None
    adapters: Mapping[str, Path]
    size_bytes: int


class VllmApi:
    """One server."""

    def __init__(self, root: str, key: str, *, reload_method: str = "reload_weights") -> None:
        """Initializes the client.

        Args:
            root: The server's address without `/v1`.
            key: API key; empty for none.
            reload_method: Method with which its workers reload; Fulmen's own is `fulmen_reload` (`vllm_plugin`).
        """
        self._root = root
        self._reload_method = reload_method
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def healthy(self) -> bool:
        """Returns whether it answers."""
        try:
            await self._ask("GET", "/health", deadline_s=HEALTH_DEADLINE_S)
        except EngineFailed:
            return False
        return True

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled since its start, from its metrics.

        Raises:
            EngineFailed: if it does not answer.
        """
        text = await self._ask("GET", "/metrics", deadline_s=HEALTH_DEADLINE_S)
        lines = [line for line in text.splitlines() if line.startswith((f"{TOKENS_METRIC}{{", f"{TOKENS_METRIC} "))]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))

    async def name_version(self, version: int) -> None:
        """Sets the version of its present weights.

        Raises:
            EngineFailed: if it refuses or does not answer.
        """
        await self._ask("POST", "/update_weight_version", {"new_version": str(version)})

    async def load(self, weights: Weights) -> None:
        """Replaces its weights; new adapters are added.

        Raises:
            EngineFailed: if it refuses or does not answer.
        """
        if weights.folder is not None:
            body = {"method": self._reload_method, "kwargs": {"weights_path": str(weights.folder)}}
            await self._ask("POST", "/collective_rpc", body, deadline_s=LOAD_DEADLINE_S)
        for name, folder in weights.adapters.items():
            await self.load_adapter(folder, name)

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Serves an adapter in peft's format under a model name, replacing the present one.

        Raises:
            EngineFailed: if it refuses or does not answer.
        """
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        await self._ask("POST", "/v1/load_lora_adapter", body, deadline_s=LOAD_DEADLINE_S)

    async def swap(
        self,
        weights: Weights,
        version: int,
        gate: SwapGate,
        *,
        mode: SwapMode,
        drain_limit_s: float,
        recompute_cache: bool,
    ) -> SwapStats:
        """Replaces the weights; no call fails.

        Frozen calls resume with the new weights. The version is promoted before that, so that no
        token of the new weights counts as the old version's, even if the server does not report versions.
        Calls resume after a failure too: an external server must not stay paused.

        Raises:
            EngineFailed: if it refuses or does not answer: its weights are then unknown, and it must be restarted or be
                given weights again.
        """
        began = time.monotonic()
        if mode is SwapMode.DRAIN:
            # The hold expires by itself if this process dies.
            await gate.hold(min(drain_limit_s + HOLD_MARGIN_S, LONGEST_HOLD_S))
        try:
            if mode is SwapMode.DRAIN:
                await gate.idle(drain_limit_s)
            await _to_its_end(self._replace(weights, version, gate, recompute_cache=recompute_cache))
        finally:
            if mode is SwapMode.DRAIN:
                await gate.release()
        return SwapStats(pause_s=time.monotonic() - began, size_bytes=weights.size_bytes)

    async def _replace(self, weights: Weights, version: int, gate: SwapGate, *, recompute_cache: bool) -> None:
        loaded, anew = True, "true" if recompute_cache else "false"
        try:
            # vLLM 0.32 by default drops the computed cache of calls at the pause.
            await self._ask("POST", f"/pause?mode=keep&clear_cache={anew}", deadline_s=LOAD_DEADLINE_S)
            loaded = weights.folder is None
            await self.load(weights)
            loaded = True
            await self._ask("POST", f"/reset_prefix_cache?reset_running_requests={anew}")
            await self.name_version(version)
            await gate.promote()
        except BaseException:  # includes cancellation: it may be paused even if the pause was not answered
            with suppress(EngineFailed):
                if not loaded:
                    await self._put_back()
                await self._ask("POST", "/resume")
            raise
        await self._ask("POST", "/resume")

    async def _put_back(self) -> None:
        """Resumes it after weights that it failed to load.

        After a failure vLLM 0.32 leaves its layers without memory (`model_executor/model_loader/reload`), and would end
        at the next token. Being given no weights at all it puts back what layers had that got none. If it cannot do
        that, it has to stay paused.

        Raises:
            EngineFailed: if it refuses or does not answer.
        """
        await self._ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_iterator": []}})

    async def _ask(self, method: str, path: str, body: object = None, *, deadline_s: float = CALL_DEADLINE_S) -> str:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, self._root + path, json=body) as response,
            ):
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            raise EngineFailed(f"vLLM did not answer {method} {path}.") from error
        if not response.ok:
            raise EngineFailed(f"vLLM answered {response.status} to {method} {path}: {text[:MAX_ANSWER_CHARACTERS]}")
        return text


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work that must not be left in the middle: a server that stays paused. One that is cancelled ends soon."""
    task = asyncio.create_task(work, name="swap")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=CANCELLED_WAIT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # cancelled: its result is ignored
        raise


async def read_whole(policy: PublishedPolicy, *, adapters: bool) -> Weights:
    """Verifies that the weights of a version exist and are complete, and reads them into the page cache.

    It is done before the pause: what vLLM then reads comes from the page cache.

    Args:
        policy: The version.
        adapters: Whether a policy of adapters is served as such; if not, they are merged into the base model.

    Raises:
        EngineFailed: if a file is missing or damaged.
    """
    as_adapters = policy.kind is WeightsKind.LORA and adapters
    try:
        folder = None if as_adapters else await policy.model_folder()
    except RunFailed as error:
        raise EngineFailed(error.message) from error
    folders = adapters_by_name(policy) if as_adapters else {}
    size = 0
    for place in [*([] if folder is None else [folder]), *folders.values()]:
        size += await asyncio.to_thread(_read_folder, place)
    return Weights(folder=folder, adapters=folders, size_bytes=size)


def adapters_by_name(policy: PublishedPolicy) -> dict[str, Path]:
    """Returns the folder of each adapter by the model name under which it is served."""
    return {
        policy.policy if role == DEFAULT_ADAPTER else f"{policy.policy}.{role}": folder
        for role, folder in policy.adapters.items()
    }


def _read_folder(folder: Path) -> int:
    """Reads all safetensors files of a folder; returns their size in bytes."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineFailed(f"There is no safetensors file in {folder}.")
    return sum(_read_file(file) for file in files)


def _read_file(path: Path) -> int:
    """Checks that a file has the length in its header (format: 8 bytes of length, JSON, tensors)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise EngineFailed(f"{path} is not a safetensors file.")
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            size = 8 + length
            while chunk := file.read(READ_CHUNK_BYTES):
                size += len(chunk)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineFailed(f"{path} cannot be read.") from error
    if size != 8 + length + max(ends, default=0):
        raise EngineFailed(f"{path} is truncated.")
    return size
