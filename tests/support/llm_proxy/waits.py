"""How long tests of the proxy wait, and for what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.llm_proxy.harness import RunningProxy

DEADLINE_S = 30
POLL_S = 0.05
EARLY_S = 2.0
"""A flush that is answered without the store arrives well before this; one that waits for the store, later."""


async def until_refused(proxy: RunningProxy, key: str) -> tuple[int, dict[str, Any]]:
    """Calls until a call is refused."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await proxy.chat(key))[0] == 200:
            pass
        return answer


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits until a condition of the proxy or the store holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110  # another process is watched
            await asyncio.sleep(POLL_S)
