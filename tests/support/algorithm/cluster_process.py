"""A process of a group: calls back, tells its place, and does what it is told. `python -m` it with a ticket."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from fulmen_algorithm.cluster.gate import PROCESS
from fulmen_algorithm.cluster.wire import Ticket, connect, read_note, write_note

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


async def live() -> None:
    reader, writer = await connect(Ticket.from_environment(), PROCESS)
    place = {name: int(os.environ[name]) for name in PLACE}
    hidden = [name for name in os.environ if name.startswith("FULMEN_")]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    write_note(writer, {**place, "devices": devices, "pid": os.getpid(), "fulmen": hidden, "flags": sys.argv[1:]})
    while True:
        try:
            note = await read_note(reader)
        except (EOFError, OSError):
            # One that is stubborn is ended all the same.
            await asyncio.sleep(3600 if "--stubborn" in sys.argv else 0)
            return
        if "exit" in note:
            os._exit(note["exit"])


if __name__ == "__main__":
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(live())
