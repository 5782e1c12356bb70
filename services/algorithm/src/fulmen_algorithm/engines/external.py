"""A vLLM server that the service does not start or stop; it only gets weights.

It must be in development mode (`VLLM_SERVER_DEV_MODE=1`), and see the folder of models at the same path as this
service. Only addresses configured by the operator are used, so that runs cannot make this service call others.
"""

import asyncio

from fulmen_algorithm.engines.engine import EngineAddress, EngineFailed, EngineKind, EngineOptions, SwapGate
from fulmen_algorithm.engines.vllm_api import VllmApi, read_whole
from fulmen_algorithm.policy.engine_settings import ExternalEngine, SwapMode
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats


class ExternalVllm:
    """One external vLLM."""

    def __init__(self, api: VllmApi, engine: ExternalEngine) -> None:
        """Use `attach`."""
        self._api = api
        self._engine = engine
        self._tokens_before: int | None = None

    @classmethod
    async def attach(
        cls,
        options: EngineOptions,
        policy: PublishedPolicy,
        engine: ExternalEngine,
        notify: Notify,
        gate: SwapGate,
    ) -> "ExternalVllm":
        """Loads the policy's weights into it.

        Calls in flight, from before a restart of this service or a failed swap, resume after `gate.promote`, so that
        no token of the new weights counts as the old version's.

        Raises:
            EngineFailed: if it is not in the service's settings, does not answer, or refuses the weights.
        """
        if engine.base_url not in options.external_keys:
            raise EngineFailed(f"{engine.base_url} is not in the service's setting external_engines.")
        api = VllmApi(engine.base_url.removesuffix("/v1"), options.external_keys[engine.base_url])
        if not await api.healthy():
            raise EngineFailed(f"No vLLM server answers at {engine.base_url}.")
        notify("info", f"The vLLM at {engine.base_url} gets version {policy.version}.")
        attached = cls(api, engine)
        await attached._swap(policy, gate, SwapMode.FREEZE)
        return attached

    @property
    def pid(self) -> int:
        """See `Engine`: not a process of this service."""
        return 0

    @property
    def address(self) -> EngineAddress:
        """Address for the proxy."""
        engine = self._engine
        return EngineAddress(
            base_url=engine.base_url, kind=EngineKind.VLLM, key_name=engine.key_name, model=engine.model
        )

    async def ended(self) -> int:
        """Waits indefinitely: only health checks detect its failure."""
        return await asyncio.get_running_loop().create_future()

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled since the first call, for all callers.

        Tokens sampled before it was attached, possibly again, are not counted.

        Raises:
            EngineFailed: if it does not answer.
        """
        tokens = await self._api.sampled_tokens()
        if self._tokens_before is None:
            self._tokens_before = tokens
        return tokens - self._tokens_before

    async def healthy(self) -> bool:
        """Returns whether it answers."""
        return await self._api.healthy()

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        """Replaces the weights in place.

        Raises:
            EngineFailed: if the weights are damaged, or vLLM refuses or does not answer.
        """
        return await self._swap(policy, gate, self._engine.swap)

    async def stop(self) -> None:
        """Does nothing: the server keeps running."""

    async def _swap(self, policy: PublishedPolicy, gate: SwapGate, mode: SwapMode) -> SwapStats:
        weights = await read_whole(policy, adapters=False)
        return await self._api.swap(
            weights,
            policy.version,
            gate,
            mode=mode,
            drain_limit_s=self._engine.drain_limit_s,
            recompute_cache=self._engine.recompute_cache,
        )
