"""Does harm: begins a fault on victims, holds it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.reliability.memory import MemoryLimit
from benchmarks.reliability.plan import HELD, Cell, Fault, Victim
from benchmarks.reliability.stand import DISKS, Stand, StandFailed, is_alive, send

__all__ = ["Harm", "missing_for"]

HOLD_S = 20.0
FIND_LIMIT_S = 60.0
AGAIN_LIMIT_S = 60.0
POLL_INTERVAL_S = 0.05
RESETS, RESET_INTERVAL_S = 20, 0.5
AGAIN_AFTER_S = 0.3
"""Between the start of the process that replaces a victim, and its death: it recovers then."""
HOUR_S = 3600
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
FILTER = """
add table inet matrix
add set inet matrix ports {{ type inet_service; }}
add chain inet matrix out {{ type filter hook output priority 0; }}
flush table inet matrix
add rule inet matrix out tcp dport @ports drop
add rule inet matrix out tcp sport @ports drop
"""
DISK_OF = {Victim.POSTMASTER: ".", Victim.ALGORITHM: "algorithm", Victim.PROXY: "llm_proxy"}


def missing_for(fault: Fault) -> str:
    """Returns why a fault cannot be made on this machine; empty if it can."""
    if fault in {Fault.DROP, Fault.RESET, Fault.DISK} and os.geteuid() != 0:
        return "needs root"
    if fault is Fault.DROP and shutil.which("nft") is None:
        return "needs nft (Debian: nftables)"
    if fault is Fault.RESET and shutil.which("ss") is None:
        return "needs ss (Debian: iproute2)"
    if fault in {Fault.CLOCK_AHEAD, Fault.CLOCK_BEHIND} and not FAKETIME.exists():
        return "needs libfaketime (Debian: libfaketime)"
    return ""


@dataclass(slots=True)
class Harm:
    """One fault on the victims of a cell.

    Attributes:
        stand: The stack.
        cell: Victims and fault.
        pids: The processes that were harmed, by victim.
        notes: What happened besides, in words.
    """

    stand: Stand
    cell: Cell
    pids: dict[Victim, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _limit: MemoryLimit | None = None
    _filled: list[Path] = field(default_factory=list)

    async def find(self) -> None:
        """Finds the processes of the victims.

        Raises:
            StandFailed: if one has none.
        """
        for victim in self.cell.victims:
            deadline = time.monotonic() + FIND_LIMIT_S
            while (pid := await self.stand.pid(victim)) is None:
                if time.monotonic() > deadline:
                    raise StandFailed(f"No process of {victim} was found.")
                await asyncio.sleep(POLL_INTERVAL_S)
            self.pids[victim] = pid

    async def inflict(self) -> None:
        """Begins the fault, holds it for as long as it lasts, and ends it."""
        match self.cell.fault:
            case Fault.NONE:
                return
            case Fault.KILL:
                self._signal(signal.SIGKILL)
            case Fault.TERM:
                self._signal(signal.SIGTERM)
                await self._until_ended()
            case Fault.TWICE:
                await self._kill_twice()
            case Fault.RESET:
                await self._reset()
            case _:
                await self._hold()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids.values():
            send(pid, number)

    async def _until_ended(self) -> None:
        """Waits until what was asked to end has ended; what drains still works."""
        deadline = time.monotonic() + AGAIN_LIMIT_S
        while any(is_alive(pid) for pid in self.pids.values()):
            if time.monotonic() > deadline:
                self.notes.append(f"had not ended {AGAIN_LIMIT_S:.0f} s after SIGTERM")
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _kill_twice(self) -> None:
        self._signal(signal.SIGKILL)
        if Victim.SUPERVISOR in self.pids:
            return  # A person starts it again: `operator` in cell.py kills it while it starts.
        for victim, first in list(self.pids.items()):
            deadline = time.monotonic() + AGAIN_LIMIT_S
            while (again := await self.stand.pid(victim)) in (None, first):
                if time.monotonic() > deadline:
                    self.notes.append(f"{victim} was not started again within {AGAIN_LIMIT_S:.0f} s")
                    return
                await asyncio.sleep(POLL_INTERVAL_S)
            await asyncio.sleep(AGAIN_AFTER_S)
            send(again, signal.SIGKILL)
            self.pids[victim] = again

    async def _reset(self) -> None:
        """Resets all connections of the victims again and again, for 10 s."""
        for _ in range(RESETS):
            if ports := self._ports():
                terms = " or ".join(f"sport = :{port} or dport = :{port}" for port in sorted(ports))
                await asyncio.to_thread(
                    subprocess.run, ["ss", "-K", "-t", "-H", f"( {terms} )"], capture_output=True, check=False
                )
            await asyncio.sleep(RESET_INTERVAL_S)

    async def _hold(self) -> None:
        """Holds a fault for 20 s, or until all that it is done to have been replaced."""
        with self._held():
            deadline = time.monotonic() + HOLD_S
            while time.monotonic() < deadline:
                if self.cell.fault is Fault.DROP:
                    await asyncio.to_thread(self._drop)
                elif self.cell.fault in HELD and not any(is_alive(pid) for pid in self.pids.values()):
                    self.notes.append("replaced before the fault ended")
                    return
                await asyncio.sleep(POLL_INTERVAL_S)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        try:
            match self.cell.fault:
                case Fault.STOP:
                    self._signal(signal.SIGSTOP)
                case Fault.DROP:
                    subprocess.run(["nft", "-f", "-"], input=FILTER.format().encode(), check=True)
                case Fault.CLOCK_AHEAD:
                    self._set_clocks(HOUR_S)
                case Fault.CLOCK_BEHIND:
                    self._set_clocks(-HOUR_S)
                case Fault.MEMORY:
                    self._limit = MemoryLimit(list(self.pids.values()))
                case Fault.DISK:
                    self._fill_disks()
            yield
        finally:
            self._release()

    def _release(self) -> None:
        match self.cell.fault:
            case Fault.STOP:
                self._signal(signal.SIGCONT)
            case Fault.DROP:
                subprocess.run(["nft", "delete", "table", "inet", "matrix"], check=False)
            case Fault.CLOCK_AHEAD | Fault.CLOCK_BEHIND:
                self._set_clocks(0)
            case Fault.MEMORY if self._limit is not None:
                self.notes.append(f"limited by {self._limit.by}")
                self._limit.lift()
            case Fault.DISK:
                for file in self._filled:
                    file.unlink(missing_ok=True)

    def _ports(self) -> set[int]:
        """Returns the local ports of the victims' sockets, those to others included."""
        found: set[int] = set()
        for pid in self.pids.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        found |= {line.laddr.port for line in each.net_connections(kind="tcp") if line.laddr}
        return found

    def _drop(self) -> None:
        """Has the kernel drop every packet from and to the sockets that the victims have by now."""
        if ports := self._ports():
            elements = ", ".join(map(str, sorted(ports)))
            subprocess.run(
                ["nft", "add", "element", "inet", "matrix", "ports", f"{{ {elements} }}"],
                check=False, capture_output=True,
            )  # fmt: skip

    def _set_clocks(self, offset_s: int) -> None:
        for name in self._clock_names():
            file = self.stand.clocks / name
            if offset_s == 0:
                file.write_text("+0")
            else:
                file.write_text(f"{offset_s:+d}")

    def _clock_names(self) -> Sequence[str]:
        record = self.stand.record()
        names = []
        for victim in self.cell.victims:
            if victim is Victim.RUNNER and record is not None:
                names.append(f"runner-{record.service(victim.value).ports[victim.value]}")
            else:
                names.append(victim.value)
        return names

    def _fill_disks(self) -> None:
        for victim in self.cell.victims:
            file = self.stand.state.path / DISK_OF[victim] / "filling"
            self._filled.append(file)
            block = bytes(2**16)
            with file.open("wb", buffering=0) as filling, contextlib.suppress(OSError):
                for _ in range(DISKS[DISK_OF[victim]] * 16 + 1):
                    filling.write(block)
                filling.write(block)
            with file.open("ab", buffering=0) as filling, contextlib.suppress(OSError):
                while filling.write(bytes(512)):
                    pass
