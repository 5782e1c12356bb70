"""Renews a runner's leases while its event loop is blocked, and logs what blocks it.

An async agent that blocks (`time.sleep`, a long computation) also blocks the lease stream, and would cost every attempt
of the runner its lease. A thread watches the event loop and renews the session with its own rpc while the loop is
blocked.

Invariants: the guard renews only while the loop is blocked, no longer than the limit, and never a session that the
store has ended. Time in which the whole process was stopped (SIGSTOP, a suspended machine) does not count as blocked.
Code that holds the interpreter lock blocks the guard as well.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
import structlog

from fulmen.errors import SessionEnded
from fulmen.rpc.credentials import channel_credentials
from fulmen.rpc.status import decode
from fulmen.rpc.tls import TlsFiles, TlsWatch
from fulmen.store.v1 import lease_service_pb2, lease_service_pb2_grpc
from fulmen_runner.leases.stream import LeaseStream
from fulmen_runner.stacks import thread_lines
from fulmen_service_kit.heartbeat import heartbeat

BEAT_S: Final = 0.25
"""Interval of the loop's heartbeat and of the thread's checks."""

LOG_AFTER_S: Final = 1.0
RENEW_AFTER_TTLS: Final = 1 / 6
RENEW_EVERY_TTLS: Final = 1 / 3
RENEW_TIMEOUT_TTLS: Final = 1 / 6
EXIT_STATUS: Final = 70
"""EX_SOFTWARE; the process supervisor may restart the runner."""

_log = structlog.get_logger()


class LeaseGuard:
    """Background role: watches the event loop from a thread."""

    def __init__(
        self,
        stream: LeaseStream,
        *,
        dial: Callable[[], grpc.Channel],
        token: Callable[[], str],
        limit_s: float,
    ) -> None:
        """Initializes the guard.

        Args:
            stream: Has the session to renew.
            dial: Opens a channel to the store; called in the thread.
            token: Returns the runner's token. Secret.
            limit_s: Blocked time after which the process exits, in seconds; 0 for no limit.
        """
        self._dial = dial
        self._token = token
        self._stream = stream
        self._limit_s = limit_s
        self._beat = 0
        self._stopped = threading.Event()
        self._ended_runner = ""
        self.blocked_s_total = 0.0

    async def run(self) -> None:
        """Watches until cancelled."""
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, ident), name="lease guard", daemon=True).start()
        try:
            while True:
                self._beat += 1
                await asyncio.sleep(BEAT_S)
        finally:
            self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        seen, looked_s = -1, time.monotonic()
        block: _Block | None = None
        while not self._stopped.wait(BEAT_S):
            beat, now_s = self._beat, time.monotonic()
            # Time in which this thread did not run either contains no information about the loop.
            passed_s, looked_s = min(now_s - looked_s, 2 * BEAT_S), now_s
            if beat != seen or block is None:
                if block is not None and block.logged:
                    _log.warning("event_loop_free", blocked_s=round(block.length_s, 1))
                seen, block = beat, _Block()
                continue
            block.length_s += passed_s
            if "/attempts/" in _task_name(loop):
                # An agent's code, which has `limit_s`. Whatever else blocks the loop is a fault, which ends the runner.
                heartbeat().beat()
            if block.length_s >= LOG_AFTER_S:
                self.blocked_s_total += passed_s
                self._act(block, lambda: {"task": _task_name(loop), "stack": thread_lines(ident)})

    def _act(self, block: "_Block", who: Callable[[], dict[str, str]]) -> None:
        if not block.logged:
            block.logged = True
            _log.warning("event_loop_blocked", **who())
        if self._limit_s and block.length_s >= self._limit_s:
            _log.error(
                "event_loop_blocked_for_good", blocked_s=round(block.length_s, 1), limit_s=self._limit_s, **who()
            )
            # Blocking code cannot be stopped. The guardian kills the commands.
            os._exit(EXIT_STATUS)
        if block.length_s >= block.renew_at_ttls * self._stream.ttl_s and self._renew():
            block.renew_at_ttls = block.length_s / self._stream.ttl_s + RENEW_EVERY_TTLS

    def _renew(self) -> bool:
        """Renews the session; returns False if that is to be retried soon."""
        runner = self._stream.runner
        if not runner or runner == self._ended_runner:
            return False
        # One connection per renewal: they are rare.
        with self._dial() as channel:
            request = lease_service_pb2.RenewLeasesRequest(runner=runner)
            stub = lease_service_pb2_grpc.LeaseServiceStub(channel)
            metadata = (("authorization", f"Bearer {self._token()}"),)
            try:
                stub.RenewLeases(request, timeout=RENEW_TIMEOUT_TTLS * self._stream.ttl_s, metadata=metadata)
            except grpc.RpcError as refused:
                error = decode(refused)
                _log.warning("session_not_renewed", error=str(error))
                if isinstance(error, SessionEnded):
                    self._ended_runner = runner
                return False
        return True


@dataclass(slots=True)
class _Block:
    """A period without a heartbeat."""

    length_s: float = 0.0
    logged: bool = False
    renew_at_ttls: float = RENEW_AFTER_TTLS


def store_dialler(target: str, tls: TlsFiles | None) -> Callable[[], grpc.Channel]:
    """Returns a function that opens a synchronous channel to the store, for threads without an event loop.

    Raises:
        OSError: If a file of `tls` cannot be read.
    """
    if tls is None:
        return lambda: grpc.insecure_channel(target)
    watch = TlsWatch(tls)
    return lambda: grpc.secure_channel(target, channel_credentials(watch.material()), options=tls.options())


def _task_name(loop: asyncio.AbstractEventLoop) -> str:
    """Returns the name of the running task, which for agents is their attempt's; empty if none runs."""
    task = asyncio.current_task(loop)
    return "" if task is None else task.get_name()
