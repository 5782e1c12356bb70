"""Waiting with a limit."""

from __future__ import annotations

import asyncio

__all__ = ["waited"]


async def waited(event: asyncio.Event, limit_s: float) -> bool:
    """Waits for an event; returns False if it was not set within `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
