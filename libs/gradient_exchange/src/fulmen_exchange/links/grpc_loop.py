"""The event loop on which the streams and heartbeats of all links of this process live."""

from __future__ import annotations

import asyncio
import threading


class _LinkLoop:
    """One loop, in a thread of its own, from when it is first asked for.

    It is never closed: gRPC hands events from one loop of a process to another, and fails if that one is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> asyncio.AbstractEventLoop:
        """Returns it; several links may be opened at once, in threads of their own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="exchange-links", daemon=True).start()
            return self._loop


link_loop = _LinkLoop()
