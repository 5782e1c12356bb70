"""A rank ends with the service, also where the service dies before it has read the rank's last answer."""

import os
import socket
import subprocess
import sys

import pytest

WAIT_S = 60
RANK = """
import socket, sys
from queue import SimpleQueue
from threading import Thread
from fulmen_algorithm.trainers.rank import _listen

service = socket.socket(fileno=int(sys.argv[1]))
service.sendall(b"an answer")
Thread(target=_listen, args=(service, SimpleQueue()), daemon=True).start()
print("listens", flush=True)
SimpleQueue().get()
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_a_rank_ends_when_its_socket_does(is_read: bool) -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as rank:
        theirs.close()
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"listens\n"
        if is_read:
            assert ours.recv(64) == b"an answer"
        # With something unread in it, a Unix socket does not end but breaks (ECONNRESET).
        ours.close()
        try:
            assert rank.wait(WAIT_S) == 0
        finally:
            rank.kill()
