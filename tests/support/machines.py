"""Machines in network namespaces, joined by a bridge. Needs Linux, root and `ip`; nothing outside is touched.

The calling thread moves into a namespace of its own for as long as the machines exist: it is the service's machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Self

CLONE_NEWNET = 0x40000000  # linux/sched.h
LIMIT_S = 30.0
SERVICE = "10.78.0.254"
OWN_NETWORK = "/proc/thread-self/ns/net"
AVAILABLE = sys.platform == "linux" and os.geteuid() == 0 and all(map(which, ("ip", "nsenter", "unshare")))
_HOME = os.open(OWN_NETWORK, os.O_RDONLY) if AVAILABLE else -1


@contextmanager
def at_home() -> Iterator[None]:
    """Has the calling thread in the network that all tests begin in, whatever machines there are."""
    if not AVAILABLE or Path(OWN_NETWORK).readlink() == Path(f"/proc/self/fd/{_HOME}").readlink():
        yield
        return
    away = os.open(OWN_NETWORK, os.O_RDONLY)
    _enter(_HOME)
    try:
        yield
    finally:
        _enter(away)
        os.close(away)


class Machines:
    """Some machines, to be used as a context manager."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._holders: list[subprocess.Popen[bytes]] = []
        self._home = -1

    def within(self, machine: int) -> list[str]:
        """Returns the words before a command that is to run on a machine."""
        return ["nsenter", f"--net=/proc/{self._holders[machine].pid}/ns/net"]

    def address(self, machine: int) -> str:
        """Returns a machine's address."""
        return f"10.78.0.{machine + 1}"

    def cut_off(self, machine: int) -> None:
        """Cuts a machine off: no packet comes or goes, and no connection ends."""
        _run("ip", "link", "set", f"port{machine}", "down")

    def reconnect(self, machine: int) -> None:
        """Ends a cut."""
        _run("ip", "link", "set", f"port{machine}", "up")

    def silence(self, machine: int, port: int) -> None:
        """Has nothing come back from a port of a machine; connections to it do not end."""
        _run(*self.within(machine), "ip", "rule", "add", "pref", "1", "ipproto", "tcp", "sport", str(port), "blackhole")

    def slow_down(self, machine: int, mbit: float, *, both_ways: bool = True) -> None:
        """Gives what a machine receives a rate, and what it sends. Needs `tc`."""
        rate = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "16kb", "latency", "500ms")
        _run("tc", "qdisc", "replace", "dev", f"port{machine}", *rate)
        if both_ways:
            _run(*self.within(machine), "tc", "qdisc", "replace", "dev", "eth0", *rate)

    def part(self, *machines: int) -> None:
        """Parts machines from each other: each reaches the service and the others, as before."""
        self._isolate(machines, "on")

    def join(self, *machines: int) -> None:
        """Ends what `part` did."""
        self._isolate(machines, "off")

    def _isolate(self, machines: Sequence[int], how: str) -> None:
        for machine in machines:
            _run("ip", "link", "set", f"port{machine}", "type", "bridge_slave", "isolated", how)

    def kill(self, machine: int) -> None:
        """Kills every process of a machine at once."""
        for pid in self.processes(machine):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, machine: int) -> list[int]:
        """Returns the processes that run on a machine."""
        holder = self._holders[machine].pid
        place, found = Path(f"/proc/{holder}/ns/net").readlink(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "ns/net").readlink() == place and int(entry.name) != holder:
                    found.append(int(entry.name))
        return found

    def __enter__(self) -> Self:
        self._home = os.open(OWN_NETWORK, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare failed")
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", "machines", "type", "bridge")
            _run("ip", "link", "set", "machines", "up")
            _run("ip", "addr", "add", f"{SERVICE}/24", "dev", "machines")
            for machine in range(self._count):
                self._add(machine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in range(len(self._holders)):
            self.kill(machine)
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        _enter(self._home)
        os.close(self._home)

    def _add(self, machine: int) -> None:
        # It ends with this process, and with it the namespace.
        words = ["unshare", "--net", "sh", "-c", "echo && exec cat"]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None
        holder.stdout.readline()
        port, inside = f"port{machine}", self.within(machine)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", port, "master", "machines", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        _run(*inside, "ip", "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")


def _enter(network: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)
