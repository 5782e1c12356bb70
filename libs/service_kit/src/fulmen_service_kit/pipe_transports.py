"""Pipes in the event loop.

Invariant: a pipe's descriptor is closed once. uvloop's transports close the descriptor and then the file object, which
closes whatever another thread has opened under that number in between.
"""

import asyncio
import os
from collections.abc import Callable
from io import FileIO

import uvloop


async def read_pipe(protocol: Callable[[], asyncio.Protocol], pipe: FileIO) -> asyncio.ReadTransport:
    """Reads a pipe through a protocol. The transport owns the pipe: `pipe` is closed."""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(protocol, _owned_by_transport(pipe))
    return transport


async def write_pipe(pipe: FileIO) -> asyncio.WriteTransport:
    """Returns the transport that writes to a pipe. It owns the pipe: `pipe` is closed."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, _owned_by_transport(pipe))
    return transport


def _owned_by_transport(pipe: FileIO) -> FileIO:
    closed_by_descriptor = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    owned = FileIO(os.dup(pipe.fileno()), pipe.mode, closefd=not closed_by_descriptor)
    pipe.close()
    return owned
