"""A rank ends with the service, even if that dies before it has read the last answer; how a rank reports errors."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.msgpack import encode

from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.calls import Answer, Call
from fulmen_algorithm.trainers.rank import Worker

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
def test_a_rank_ends_when_its_socket_does(is_read):
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


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def write_state(self, folder: Path) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "answer", "where_is_logged"),
    [
        (RunFailed("It has no tokenizer."), Answer(error="RunFailed", text="It has no tokenizer."), False),
        (ValueError("A row is too long."), Answer(error="ValueError", text="A row is too long."), True),
        (RuntimeError("CUDA error at /root/x.cu"), Answer(error="RuntimeError"), True),
    ],
)
def test_an_unexpected_error_is_logged_with_its_traceback(error, answer, where_is_logged, capsys):
    worker = Worker(argparse.Namespace(), 0)
    worker._trainer = Failing(error)
    assert worker.answer(encode(Call(method="write_state", arguments=b'{"folder": "/anywhere"}'))) == answer
    logged = capsys.readouterr().err
    assert ("raise self.error" in logged) == where_is_logged
    assert (str(error) in logged) == where_is_logged
