"""Holds calls in the proxy while an engine gets new weights; waits out outages of the proxy."""

import asyncio
from collections.abc import Awaitable, Callable

from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.engines.proxy_admin import ProxyAdmin
from fulmen_algorithm.runs.ports import PublishedPolicy

ASK_AGAIN_S = 0.05


class ProxyGate:
    """The gate of one swap; see `clients.engine.SwapGate`."""

    def __init__(
        self,
        proxy: ProxyAdmin,
        policy: PublishedPolicy,
        patience: Patience,
        *,
        promote: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`promote` names the new version at the proxy, where its routes may be missing; else they are there."""
        self._proxy = proxy
        self._policy = policy
        self._patience = patience
        self._promote = promote

    async def hold(self, ttl_s: float) -> None:
        """Lets new calls wait in the proxy, so long at most."""
        await self._patience.call(lambda: self._proxy.hold(ttl_s))

    async def idle(self, limit_s: float) -> bool:
        """Waits until the proxy has no call at the engine; false if there still is one after so long."""
        try:
            async with asyncio.timeout(limit_s):
                while await self._patience.call(self._proxy.in_flight_count):  # noqa: ASYNC110 - no event to wait for
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            return False
        return True

    async def promote(self) -> None:
        """Attributes tokens to the new version from now on."""
        if self._promote is not None:
            await self._promote()
            return
        policy = self._policy
        await self._patience.call(lambda: self._proxy.promote(policy.policy, policy.version))

    async def release(self) -> None:
        """Releases held calls to the engine."""
        await self._patience.call(self._proxy.release)
