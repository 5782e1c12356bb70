"""Delays what ranks send, where the kernel has no `netem`: carries frames between two interfaces, one way later.

    python -m benchmarks.exchange.delay LATENCY_MS FROM TO [FROM TO ...]

Each FROM is the other end of a rank's line, each TO leads to the switch. Frames go from FROM to TO after the latency, in
order, and back at once. They are handed on as the kernel has them, whole segments of up to 64 KiB with their offloads, so
that one process in Python keeps up with several lines of some 100 Mbit/s. It prints a line when it is ready, and ends when
its input does.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

ALL_PROTOCOLS = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Of <linux/if_packet.h>; the second has frames come and go with what is left to be done to them."""
LARGEST_FRAME = 128 * 1024
BUFFER_BYTES = 4 * 2**20
AT_A_TIME = 64
"""Frames of one interface before the others have their turn."""


@dataclass(slots=True)
class Direction:
    """Frames that go from one interface to another.

    Attributes:
        source: Whence.
        target: Where to.
        delay_s: How much later.
        waiting: When each is due, and the frame.
    """

    source: socket.socket
    target: socket.socket
    delay_s: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """Reads what is there."""
        for _ in range(AT_A_TIME):
            try:
                frame = self.source.recv(LARGEST_FRAME)
            except BlockingIOError:
                return
            if self.delay_s:
                self.waiting.append((time.monotonic() + self.delay_s, frame))
            else:
                self._put(frame)

    def send_due(self) -> float | None:
        """Sends what is due; returns in how many seconds the next one is, or None."""
        while self.waiting:
            left_s = self.waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            self._put(self.waiting.popleft()[1])
        return None

    def _put(self, frame: bytes) -> None:
        try:
            self.target.send(frame)
        except OSError:
            # As of any line that is full, or down: whoever sent it will send it again.
            return


def opened(interface: str) -> socket.socket:
    """Opens an interface for whole frames."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    found.bind((interface, ALL_PROTOCOLS))
    found.setblocking(False)
    return found


def carry(directions: list[Direction]) -> None:
    """Carries frames until standard input ends."""
    by_source = {each.source: each for each in directions}
    while True:
        due = [left_s for each in directions if (left_s := each.send_due()) is not None]
        ready, _, _ = select.select([sys.stdin, *by_source], [], [], min(due, default=None))
        if sys.stdin in ready:
            return
        for source, direction in by_source.items():
            if source in ready:
                direction.take()


def main() -> None:
    """Reads the command line."""
    delay_s = float(sys.argv[1]) / 1e3
    names = sys.argv[2:]
    directions = []
    for near, far in zip(names[::2], names[1::2], strict=True):
        one, other = opened(near), opened(far)
        directions += [Direction(one, other, delay_s), Direction(other, one, 0.0)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(directions)


if __name__ == "__main__":
    main()
