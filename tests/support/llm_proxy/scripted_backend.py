"""A backend that fails in one named way, and answers questions about its health and load."""

from __future__ import annotations

import asyncio
import json
from typing import Final, Literal

from tests.support.llm_proxy.rogue_backend import (
    CHAT,
    EVENTS,
    STREAM_HEAD,
    WHOLE,
    Act,
    Peer,
    RogueBackend,
    answers,
    chunk,
    hangs_after,
    response,
    serve_well,
    streams,
)

Manner = Literal["answer", "hang", "half", "die", "stall"]

_EVENT: Final = EVENTS[CHAT][1]
_ACTS: Final[dict[Manner, Act]] = {
    "answer": serve_well,
    "hang": hangs_after(),
    "half": answers(response(json.dumps(WHOLE[CHAT]).encode())[:-10]),
    "die": streams(_EVENT, ends=False),
    "stall": hangs_after(STREAM_HEAD, chunk(_EVENT)),
}


class ScriptedBackend(RogueBackend):
    """Acts on each call as `manner` says.

    Manners: `answer` at once; `hang` without a byte; `half` of an answer, then the end of the connection; `die` after the
    first event of a stream; `stall` after it, with the connection open.

    Attributes:
        abandoned: released once for each call whose caller left before its answer was over.
        health: status of its answers to probes.
        metrics: the page of its metrics.
    """

    def __init__(self, manner: Manner = "answer") -> None:
        super().__init__()
        self.manner: Manner = manner
        self.abandoned = asyncio.Semaphore(0)
        self.health = 200
        self.metrics = b""
        self.probed = asyncio.Condition()
        self.act = self._act

    @property
    def calls(self) -> int:
        """Calls so far."""
        return len(self.asked)

    async def next_probe(self) -> None:
        """Returns after the next probe of its health was answered."""
        async with self.probed:
            await self.probed.wait()

    async def question(self, path: str) -> bytes:
        """Answers probes."""
        if path == "/metrics":
            return response(self.metrics)
        async with self.probed:
            self.probed.notify_all()
        return response(b"", status=b"%d X" % self.health)

    async def _act(self, peer: Peer) -> bool:
        stays = await _ACTS[self.manner](peer)
        if self.manner in ("hang", "stall"):
            self.abandoned.release()
        return stays
