"""Ends a model of a process at a call of a port."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Crashes:
    """Counts the calls of all ports and ends the process at one of them, or calls `act` there."""

    at_call: int | None = None
    after_effect: bool = False
    calls: int = 0
    act: Callable[[], None] | None = None
    hangs: asyncio.Event | None = None
    """The process stands still there until it is set, and goes on then."""
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def before(self) -> None:
        """Counts a call; ends the process before its effect, if it is its turn."""
        self.calls += 1
        if self.calls == self.at_call and not self.after_effect:
            await self._end()

    async def after(self) -> None:
        """Ends the process after the effect of the call, if it is its turn."""
        if self.calls == self.at_call and self.after_effect:
            await self._end()

    async def _end(self) -> None:
        self.killed.set()
        if self.act is not None:
            self.act()
            return
        if self.hangs is not None:
            await self.hangs.wait()
            return
        await asyncio.Event().wait()  # nothing comes after the end
