"""A rank's connection to the service that started it, in a thread of its own.

Invariant: a rank never outlives the service: its connection ends with the service, and the process then exits
immediately.
"""

import asyncio
import os
import socket
import threading
import traceback
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec

from fulmen_algorithm.cluster.gate import PROCESS
from fulmen_algorithm.cluster.wire import Ticket, connect, interface_of, read_message
from fulmen_algorithm.trainers.calls import (
    LEAVE,
    LENGTH_BYTES,
    LONGEST_FRAME_BYTES,
    Answer,
    Hello,
    Welcome,
    build,
    encode_call,
    frame,
)


class ServiceLink:
    """The connection."""

    def __init__(self, ticket: Ticket, environment: Mapping[str, str] = os.environ) -> None:
        """Connects, in the background."""
        self._ticket = ticket
        self._rank = int(environment["RANK"])
        self._loop = asyncio.new_event_loop()
        self._calls: SimpleQueue[bytes] = SimpleQueue()
        self._writer: StreamWriter | None = None
        self._rendezvous: Future[str] = Future()
        self.listener: socket.socket | None = None
        """Where this rank waits for the others, if they meet here."""
        self.left: Future[None] = Future()
        """Set when the service reports that other ranks are lost; this one may be in a collective with them."""
        threading.Thread(target=self._run, name="service", daemon=True).start()

    @property
    def rendezvous(self) -> str:
        """URL at which the ranks meet; waits until all are connected. If one does not connect, the service ends this
        process."""
        return self._rendezvous.result()

    def next_call(self) -> bytes:
        """Waits for the next call."""
        return self._calls.get()

    def send(self, answer: Answer) -> None:
        """Sends an answer."""
        asyncio.run_coroutine_threadsafe(self._send(frame(msgspec.msgpack.encode(answer))), self._loop).result()

    async def _send(self, message: bytes) -> None:
        assert self._writer is not None, "a call has come"
        self._writer.write(message)
        await self._writer.drain()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except (OSError, EOFError):
            # If the service dies before it reads the last answer, the connection breaks instead of ending.
            pass
        except BaseException:  # noqa: BLE001  (whatever it is, no one can reach this process any more)
            traceback.print_exc()
            os._exit(1)
        # Not `sys.exit`: the main thread may be blocked in an exchange with lost ranks.
        os._exit(0)

    async def _listen(self) -> None:
        reader, self._writer = await connect(self._ticket, PROCESS)
        self._writer.write(frame(msgspec.msgpack.encode(self._hello(self._writer))))
        welcome = msgspec.msgpack.decode(await read_message(reader), type=Welcome)
        self._rendezvous.set_result(welcome.rendezvous or self._ticket.rendezvous)
        await self._take_calls(reader)

    async def _take_calls(self, reader: StreamReader) -> None:
        leave = encode_call(LEAVE, (), {})[LENGTH_BYTES:]
        while True:
            call = await read_message(reader, LONGEST_FRAME_BYTES)
            if call == leave and not self.left.done():
                self.left.set_result(None)
            self._calls.put(call)

    def _hello(self, writer: StreamWriter) -> Hello:
        if self._ticket.is_local:
            return Hello(rank=self._rank, pid=os.getpid())
        # Ranks reach each other on the way by which they reach the service.
        address = writer.get_extra_info("sockname")[0]
        if interface := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        meeting = ""
        if self._rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self.listener = socket.create_server((address, 0), family=family)
            host = f"[{address}]" if ":" in address else address
            meeting = f"tcp://{host}:{self.listener.getsockname()[1]}"
        return Hello(rank=self._rank, pid=os.getpid(), meeting=meeting, build=build())
