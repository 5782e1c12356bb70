"""Whether the machines of a group reach each other: ranks that do not only wait, each for as long as a call may take.

The guardians ask each other, one of each machine every other one, and report to the service, which decides (`partings`). Only bytes are
answered that were asked, so strangers learn nothing and change nothing.
"""

import asyncio
from contextlib import suppress

ASKED = b"?"
MAX_ASKERS = 4096
ASKS_PER_LIMIT = 8
LIMIT_PER_SILENCE = 2
"""The service notices a machine that is silent to everybody by itself, sooner."""


class _Answers(asyncio.Protocol):
    """Answers what it is asked with the same bytes."""

    def __init__(self, open_: set[asyncio.Transport]) -> None:
        self._open = open_
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._open) < MAX_ASKERS:
            self._open.add(transport)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        # Who does not read the answers gets none.
        if self._transport is not None and not self._transport.get_write_buffer_size():
            self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._open.discard(self._transport)


class Answering:
    """Answers the other machines.

    Attributes:
        port: Port at which they ask.
    """

    def __init__(self, server: asyncio.Server, open_: set[asyncio.Transport]) -> None:
        self.port: int = server.sockets[0].getsockname()[1]
        self._server = server
        self._open = open_

    @classmethod
    async def at(cls, address: str) -> "Answering":
        """Answers at a free port of an address.

        Raises:
            OSError: if there is none.
        """
        open_: set[asyncio.Transport] = set()
        return cls(await asyncio.get_running_loop().create_server(lambda: _Answers(open_), address, 0), open_)

    def close(self) -> None:
        """Answers no more."""
        self._server.close()
        for transport in self._open:
            transport.abort()


async def until_unreached(address: str, port: int, *, limit_s: float) -> None:
    """Asks a machine again and again; returns when it has not answered for `limit_s`."""
    loop = asyncio.get_running_loop()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s) as limit:
            while True:
                # One that has ended no longer answers; others report that to the service.
                with suppress(OSError, EOFError):
                    reader, writer = await asyncio.open_connection(address, port)
                    try:
                        while True:
                            writer.write(ASKED)
                            await reader.readexactly(len(ASKED))
                            limit.reschedule(loop.time() + limit_s)
                            await asyncio.sleep(limit_s / ASKS_PER_LIMIT)
                    finally:
                        writer.close()
                await asyncio.sleep(limit_s / ASKS_PER_LIMIT)
