"""A weight agent that the algorithm service has started on a cluster: it asks the service for its settings, and serves.

Invariant: it ends with its connection to the service.
"""

import asyncio
import os
import signal
import threading
from concurrent.futures import Future
from tempfile import TemporaryDirectory
from typing import Any

from fulmen_algorithm.cluster.gate import PROCESS
from fulmen_algorithm.cluster.wire import Ticket, connect, read_note

PREFIX = "FULMEN_WEIGHT_AGENT_"
SETTINGS_DEADLINE_S = 1900.0
"""Time for the service to send the settings, an outage of the store included, in seconds."""


class ServiceConnection:
    """The connection to the service, in a thread of its own."""

    def __init__(self, ticket: Ticket) -> None:
        """Connects, in the background."""
        self.told: Future[tuple[str, dict[str, Any]]] = Future()
        """Address of this machine on the way to the service, and what the service has said."""
        threading.Thread(target=self._run, args=(ticket,), name="service", daemon=True).start()

    def _run(self, ticket: Ticket) -> None:
        try:
            asyncio.run(self._listen(ticket))
        except Exception as error:  # noqa: BLE001  (whatever it is, the main thread ends over it)
            if not self.told.done():
                self.told.set_exception(error)
        # The agent then ends its engine.
        os.kill(os.getpid(), signal.SIGTERM)

    async def _listen(self, ticket: Ticket) -> None:
        reader, writer = await connect(ticket, PROCESS)
        address = "127.0.0.1" if ticket.is_local else str(writer.get_extra_info("sockname")[0])
        self.told.set_result((address, await read_note(reader)))
        await reader.read()


def main() -> None:
    """Serves until the connection ends."""
    connection = ServiceConnection(Ticket.from_environment())
    address, note = connection.told.result(SETTINGS_DEADLINE_S)
    with TemporaryDirectory(prefix="fulmen-engine-") as folder:
        own = {
            "STATE_DIR": folder,
            "ENGINE_HOST": address,
            "ENGINE_ADVERTISE_HOST": address,
            "ENGINE_PORT": "0",
        }
        if not note["settings"]["TLS_CA_FILE"]:
            # Other agents fetch from this one. Where connections are TLS it has no certificate to show them.
            own["HOST"] = address
        os.environ.update({PREFIX + name: str(value) for name, value in {**note["settings"], **own}.items()})
        # Imports take seconds; the service already knows that this process runs.
        from fulmen_algorithm.weight_agent.__main__ import main as agent

        agent(["serve"])


if __name__ == "__main__":
    main()
