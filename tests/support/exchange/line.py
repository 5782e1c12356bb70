"""A line between ranks and a server that does harm."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

ANSWER_LIMIT_S = 120.0
PIECE_BYTES = 65_536
DAMAGED_FROM = 4096
"""Bytes of what a socket brings at a time, from which on one of them is damaged when that is asked for."""


class Line:
    """What ranks go through to a server: forwards bytes, late, in other pieces, damaged, or up to a point.

    Attributes:
        delay_s: The longest delay of a piece.
        held_after: Bytes to the server after which no more go through; None: all go.
        holds_answers: Whether nothing that comes from the server goes through.
        to_damage: Pieces each way that are still to be damaged.
        carried: Bytes that went to the server.
        loses: Share of the pieces that are lost for good, each with its connection: TCP has no other way to tell of it.
        lost: How many were.
    """

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self.delay_s = 0.0
        self.held_after: int | None = None
        self.holds_answers = False
        self.to_damage = {"up": 0, "down": 0}
        self.carried = 0
        self.loses = 0.0
        self.lost = 0
        self._target = port
        self._chance = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="line", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._carry, "127.0.0.1", 0))

    @property
    def address(self) -> str:
        """Where it begins."""
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def release(self) -> None:
        """Lets go through what was held."""
        self.held_after, self.holds_answers = None, False
        self._loop.call_soon_threadsafe(self._released.set)

    def cut(self) -> None:
        """Ends all connections."""
        self._do(self._cut())

    def close(self) -> None:
        """Ends."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_LIMIT_S)
        self._loop.close()

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ANSWER_LIMIT_S)

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        await self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            with suppress(OSError):
                await writer.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(asyncio.CancelledError):  # the line ends
            try:
                to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
            except OSError:
                writer.transport.abort()
                return
            self._writers.add(to_writer)
            await asyncio.gather(self._pump(reader, to_writer, "up"), self._pump(to_reader, writer, "down"))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with suppress(OSError):
            while data := await reader.read(self._chance.randint(1, PIECE_BYTES) if self.delay_s else PIECE_BYTES):
                await asyncio.sleep(self._chance.uniform(0.0, self.delay_s))
                if self._chance.random() < self.loses:
                    self.lost += 1
                    break
                if way == "up":
                    if self.held_after is not None and self.carried + len(data) > self.held_after:
                        await self._released.wait()
                    self.carried += len(data)
                elif self.holds_answers:
                    await self._released.wait()
                # Not where a chunk says what it is of: that has no checksum but TCP's.
                if len(data) > DAMAGED_FROM and self.to_damage[way] and b"topk" not in data:
                    self.to_damage[way] -= 1
                    place = self._chance.randrange(DAMAGED_FROM // 2, len(data))
                    data = data[:place] + bytes([data[place] ^ 1 << self._chance.randrange(8)]) + data[place + 1 :]
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
