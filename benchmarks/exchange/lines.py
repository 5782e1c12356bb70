"""Lines of a rate and a latency between ranks, each in a network namespace of its own; a bridge joins them.

Everything is made inside private namespaces of this process (`enter`), so the kernel takes it away with the last of the
processes in them, however that ends; nothing outside is touched, and names never clash. Shaping is `tc tbf` on both
directions of a rank's line, as a full-duplex port of a switch has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

INSIDE = "FULMEN_BENCH_EXCHANGE_INSIDE"
"""Set by `enter` for the process that it starts."""
UNSHARE = ("unshare", "--net", "--mount")
TOOLS = ("unshare", "mount", "ip", "tc")
BRIDGE = "lines"
QUEUE = "50ms"
"""How long a packet may wait for a line, before it is dropped."""
INTERFACE = "eth0"
LIMIT_S = 30.0


class LinesUnavailable(Exception):
    """This machine, or this user, cannot have shaped lines; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What joins a rank to the others.

    Attributes:
        name: As the command line names it.
        mbit: Each way, in Mbit/s; None for the loopback interface, which nothing shapes.
        latency_ms: By which each packet that a rank sends comes later.
        burst: That may pass at once; a rate needs what passes in one tick of the kernel's clock.
    """

    name: str
    mbit: float | None = None
    latency_ms: float = 0.0
    burst: str = "64kb"

    @property
    def text(self) -> str:
        """Names it for a person."""
        if self.mbit is None:
            return "loopback"
        rate = f"{self.mbit / 1e3:g} Gbit/s" if self.mbit >= 1e3 else f"{self.mbit:g} Mbit/s"
        return rate + (f" + {self.latency_ms:g} ms" if self.latency_ms else "")


LINES = {
    each.name: each
    for each in (
        Line(name="loopback"),
        Line(name="1gbit", mbit=1000.0, burst="512kb"),
        Line(name="100mbit", mbit=100.0),
        Line(name="100mbit-20ms", mbit=100.0, latency_ms=20.0),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Attributes:
        rank: From 0.
        world_size: Ranks.
        meeting: `host:port` at which ranks of a process group meet.
        interface: What it talks through.
        targets: `host:port` of the shards' servers, one beside each rank.
        token: For these.
    """

    rank: int
    world_size: int
    meeting: str
    interface: str
    targets: Sequence[str]
    token: str


def check() -> None:
    """Sees to it that this machine and user can have shaped lines.

    Raises:
        LinesUnavailable: if not.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        raise LinesUnavailable(f"needs Linux with {', '.join(TOOLS)}; not found: {', '.join(missing) or 'Linux'}")
    trial = (
        "mount -t tmpfs tmpfs /run && ip link set lo up && ip netns add trial"
        " && ip netns exec trial tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms"
    )
    words = [*private(), "sh", "-c", trial]
    tried = subprocess.run(words, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    if tried.returncode:
        why = " ".join(tried.stderr.split())
        raise LinesUnavailable(f"needs root, or user namespaces, and the kernel's `tbf`: {why}")


def enter(module: str, arguments: Sequence[str]) -> None:
    """Goes on as the same module in private namespaces; returns if it is in them already.

    Raises:
        LinesUnavailable: if there can be none.
    """
    if os.environ.get(INSIDE):
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        _run("ip", "link", "set", "lo", "up")
        return
    check()
    os.environ[INSIDE] = "1"
    words = [*private(), sys.executable, "-m", module, *arguments]
    os.execvp(words[0], words)


def private() -> tuple[str, ...]:
    """Returns the words before a command that is to have namespaces of its own.

    Who is not root may be so in a user namespace, where the kernel is set up to allow that.
    """
    return UNSHARE if os.geteuid() == 0 else (*UNSHARE, "--map-root-user")


def has_netem() -> bool:
    """True if the kernel itself can delay packets."""
    words = ("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    found = subprocess.run(words, check=False, capture_output=True, timeout=LIMIT_S).returncode == 0
    if found:
        _run("tc", "qdisc", "del", "dev", "lo", "root")
    return found


class Lines:
    """The lines of some ranks, to be used as a context manager; not shaped at first, but for the latency."""

    def __init__(self, line: Line, ranks: int) -> None:
        self._line = line
        self._ranks = range(ranks)
        self._delay: subprocess.Popen[str] | None = None

    @property
    def interface(self) -> str:
        """What ranks talk through."""
        return "lo" if self._line.mbit is None else INTERFACE

    def address(self, rank: int) -> str:
        """Returns the address of a rank."""
        return "127.0.0.1" if self._line.mbit is None else f"10.77.0.{rank + 1}"

    def within(self, rank: int) -> list[str]:
        """Returns the words before a command that is to run where a rank does."""
        return [] if self._line.mbit is None else ["ip", "netns", "exec", _place(rank)]

    def __enter__(self) -> Self:
        if self._line.mbit is None:
            return self
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def shape(self) -> None:
        """Gives the lines their rate."""
        for rank in self._ranks if self._line.mbit is not None else ():
            rate = ("root", "tbf", "rate", f"{self._line.mbit:g}mbit", "burst", self._line.burst, "latency", QUEUE)
            _run(*self.within(rank), "tc", "qdisc", "replace", "dev", INTERFACE, *rate)
            _run("tc", "qdisc", "replace", "dev", _port(rank), *rate)

    def unshape(self) -> None:
        """Takes it away."""
        for rank in self._ranks if self._line.mbit is not None else ():
            _run(*self.within(rank), "tc", "qdisc", "del", "dev", INTERFACE, "root", may_fail=True)
            _run("tc", "qdisc", "del", "dev", _port(rank), "root", may_fail=True)

    def close(self) -> None:
        """Takes everything away; the processes of the ranks have ended before."""
        if self._delay is not None:
            self._delay.kill()
            self._delay.wait()
        for rank in self._ranks if self._line.mbit is not None else ():
            # With a namespace its interfaces go, and with those their other ends, but only some time after.
            _run("ip", "link", "del", _near(rank, delayed=bool(self._line.latency_ms)), may_fail=True)
            _run("ip", "netns", "del", _place(rank), may_fail=True)
            _run("ip", "link", "del", _port(rank), may_fail=True)
        for name in (BRIDGE, *(f"between{rank}" for rank in self._ranks)):
            _run("ip", "link", "del", name, may_fail=True)

    def _make(self) -> None:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        delayed, netem = bool(self._line.latency_ms), has_netem()
        for rank in self._ranks:
            place, near = _place(rank), _near(rank, delayed=delayed)
            _run("ip", "netns", "add", place)
            _run("ip", "link", "add", INTERFACE, "netns", place, "type", "veth", "peer", "name", near)
            _run("ip", "link", "set", near, "up")
            if delayed:
                self._make_detour(rank, near, netem=netem)
            _run("ip", "link", "set", _port(rank), "master", BRIDGE)
            for words in (("link", "set", "lo", "up"), ("link", "set", INTERFACE, "up")):
                _run("ip", "-n", place, *words)
            _run("ip", "-n", place, "addr", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
        if delayed and not netem:
            self._start_delay()

    def _make_detour(self, rank: int, near: str, *, netem: bool) -> None:
        """Puts between a rank and the bridge what delays: `netem` between two bridges, or our own process."""
        far = f"far{rank}"
        _run("ip", "link", "add", far, "type", "veth", "peer", "name", _port(rank))
        for name in (far, _port(rank)):
            _run("ip", "link", "set", name, "up")
        if netem:
            between = f"between{rank}"
            _run("ip", "link", "add", between, "type", "bridge")
            _run("ip", "link", "set", between, "up")
            for name in (near, far):
                _run("ip", "link", "set", name, "master", between)
            delay = f"{self._line.latency_ms:g}ms"
            _run("tc", "qdisc", "add", "dev", far, "root", "netem", "delay", delay, "limit", "100000")

    def _start_delay(self) -> None:
        names = [name for rank in self._ranks for name in (_near(rank, delayed=True), f"far{rank}")]
        words = [sys.executable, "-m", "benchmarks.exchange.delay", f"{self._line.latency_ms:g}", *names]
        self._delay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not _pipe(self._delay.stdout).readline():
            raise LinesUnavailable("the process that delays packets ended before it began")


def _place(rank: int) -> str:
    return f"rank{rank}"


def _port(rank: int) -> str:
    return f"port{rank}"


def _near(rank: int, *, delayed: bool) -> str:
    """Names the other end of a rank's own interface."""
    return f"near{rank}" if delayed else _port(rank)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def shown(*words: str) -> str:
    """Runs a command; returns what it prints.

    Raises:
        LinesUnavailable: if it ends badly.
    """
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise LinesUnavailable(f"{' '.join(words)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _run(*words: str, may_fail: bool = False) -> None:
    try:
        shown(*words)
    except LinesUnavailable:
        if not may_fail:
            raise
