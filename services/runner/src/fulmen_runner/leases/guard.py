"""Keeps a runner's leases while its event loop is blocked, and says who blocks it.

An async agent that blocks (`time.sleep`, a long computation) holds up the lease stream, too: without help one such agent
would cost every other attempt of the runner its lease. A thread watches the loop; while nothing moves it renews the
session by an rpc of its own.

Invariants: it renews only while the loop is blocked, never longer than the limit, and never what the store has ended. A
process that was stopped as a whole (SIGSTOP, a suspended machine) counts as blocked for no longer than the thread itself
has looked on. Code that blocks without letting go of the interpreter's lock holds up the thread as well.
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
from fulmen.store.v1 import lease_service_pb2, lease_service_pb2_grpc
from fulmen.tls import TlsFiles, TlsWatch
from fulmen_runner.stacks import thread_lines

LOOK_S: Final = 0.25
"""How often the loop gives a sign of life, and the thread looks for one."""

TELL_AFTER_S: Final = 1.0
RENEW_AFTER_TTLS: Final = 1 / 6
RENEW_EVERY_TTLS: Final = 1 / 3
RENEW_TIMEOUT_TTLS: Final = 1 / 6
EXIT_STATUS: Final = 70
"""EX_SOFTWARE: what runs the runner may start it again."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedLease:
    """The session to keep: empty while there is none; `ttl_s` is how long it lives."""

    runner: str
    ttl_s: float


class LeaseGuard:
    """The background role."""

    def __init__(
        self,
        *,
        dial: Callable[[], grpc.Channel],
        token: Callable[[], str],
        lease: Callable[[], GuardedLease],
        limit_s: float,
        end: Callable[[int], object],
    ) -> None:
        """Takes what to renew and how long.

        Args:
            dial: Opens a connection to the store; called in the thread.
            token: Returns the runner's token. Secret.
            lease: Returns the session; called in the thread.
            limit_s: A loop that is blocked for longer ends the process, so that its attempts run elsewhere. 0: never.
            end: Ends the process with a status, whatever it is doing; `os._exit`.
        """
        self._dial = dial
        self._token = token
        self._lease = lease
        self._limit_s = limit_s
        self._end = end
        self._beat = 0
        self._stopped = threading.Event()
        self._ended_runner = ""
        self.blocked_s_total = 0.0

    async def run(self) -> None:
        """Watches until it is cancelled."""
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, ident), name="lease guard", daemon=True).start()
        try:
            while True:
                self._beat += 1
                await asyncio.sleep(LOOK_S)
        finally:
            self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        seen, looked_s = -1, time.monotonic()
        block: _Block | None = None
        while not self._stopped.wait(LOOK_S):
            beat, now_s = self._beat, time.monotonic()
            # What the thread itself slept through, the loop may have, too: it is no sign that something blocks.
            passed_s, looked_s = min(now_s - looked_s, 2 * LOOK_S), now_s
            if beat != seen or block is None:
                if block is not None and block.told:
                    _log.warning("event_loop_free", blocked_s=round(block.length_s, 1))
                seen, block = beat, _Block()
                continue
            block.length_s += passed_s
            if block.length_s >= TELL_AFTER_S:
                self.blocked_s_total += passed_s
                self._act(block, lambda: {"task": _task_name(loop), "stack": thread_lines(ident)})

    def _act(self, block: "_Block", who: Callable[[], dict[str, str]]) -> None:
        if not block.told:
            block.told = True
            _log.warning("event_loop_blocked", **who())
        if self._limit_s and block.length_s >= self._limit_s:
            _log.error(
                "event_loop_blocked_for_good", blocked_s=round(block.length_s, 1), limit_s=self._limit_s, **who()
            )
            self._end(EXIT_STATUS)
        lease = self._lease()
        if block.length_s >= block.renew_at_ttls * lease.ttl_s and self._renew(lease):
            block.renew_at_ttls = block.length_s / lease.ttl_s + RENEW_EVERY_TTLS

    def _renew(self, lease: GuardedLease) -> bool:
        """Returns False if it is to be tried again soon."""
        if not lease.runner or lease.runner == self._ended_runner:
            return False
        # A connection for each: they are few, and nothing of it stays behind.
        with self._dial() as channel:
            request = lease_service_pb2.RenewLeasesRequest(runner=lease.runner)
            stub = lease_service_pb2_grpc.LeaseServiceStub(channel)
            metadata = (("authorization", f"Bearer {self._token()}"),)
            try:
                stub.RenewLeases(request, timeout=RENEW_TIMEOUT_TTLS * lease.ttl_s, metadata=metadata)
            except grpc.RpcError as refused:
                error = decode(refused)
                _log.warning("session_not_renewed", error=str(error))
                if isinstance(error, SessionEnded):
                    self._ended_runner = lease.runner
                return False
        return True


@dataclass(slots=True)
class _Block:
    """A time in which the loop gave no sign of life."""

    length_s: float = 0.0
    told: bool = False
    renew_at_ttls: float = RENEW_AFTER_TTLS


def store_dialler(target: str, tls: TlsFiles | None) -> Callable[[], grpc.Channel]:
    """Returns what opens connections to the store, in threads that have no event loop.

    Raises:
        OSError: if a file of `tls` cannot be read.
    """
    if tls is None:
        return lambda: grpc.insecure_channel(target)
    watch = TlsWatch(tls)
    return lambda: grpc.secure_channel(target, channel_credentials(watch.material()), options=tls.options())


def end_process(status: int) -> None:
    """Ends the process at once: what blocks cannot be stopped, and its guardian ends what it started."""
    os._exit(status)


def _task_name(loop: asyncio.AbstractEventLoop) -> str:
    """Returns the name of the task that runs now, which for agents is their attempt's; empty if none does."""
    task = asyncio.current_task(loop)
    return "" if task is None else task.get_name()
