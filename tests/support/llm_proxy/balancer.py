"""A balancer of TCP connections between proxies."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Balancer:
    """Hands each connection on to the first of its replicas that takes it, beginning with another one each time."""

    def __init__(self, ports: list[int]) -> None:
        """Sets the ports, a list that may change."""
        self._ports = ports
        self._turn = 0
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens, `host:port`."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def url(self) -> str:
        """The base URL that a client is given."""
        return f"http://{self.address}/v1"

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        for at in range(len(self._ports)):
            with suppress(ConnectionError):
                port = self._ports[(self._turn + at) % len(self._ports)]
                behind, ahead = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pump(reader, ahead), _pump(behind, writer))
                return
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
