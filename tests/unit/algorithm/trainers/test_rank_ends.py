"""A rank ends with the service, even if that dies before it has read the last answer; how a rank reports errors."""

import argparse
import os
import socket
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from msgspec.msgpack import encode

from fulmen_algorithm.cluster.wire import VARIABLE, Ticket
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.calls import Answer, Call
from fulmen_algorithm.trainers.files.carried import CarriedFolders
from fulmen_algorithm.trainers.rank import Worker

WAIT_S = 60
RANK = """
from fulmen_algorithm.cluster.wire import Ticket
from fulmen_algorithm.trainers.service_link import ServiceLink

ServiceLink(Ticket.from_environment()).next_call()
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_a_rank_ends_when_its_connection_does(is_read, tmp_path):
    ticket = Ticket(service=f"unix:{tmp_path / 'service'}")
    variables = {VARIABLE: ticket.text(), "RANK": "0", "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "service"))
        listening.listen()
        with subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, **variables}) as rank:
            listening.settimeout(WAIT_S)
            service, _ = listening.accept()
            assert service.recv(1)
            if is_read:
                assert service.recv(4096)
            # With something unread in it, a Unix socket does not end but breaks (ECONNRESET).
            service.close()
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
    folders = CarriedFolders(Ticket(service="unix:unused"), 0, (), Path("unused"))
    worker = Worker(argparse.Namespace(), 0, meet=lambda: ("", None), left=Future(), folders=folders)
    worker._trainer = Failing(error)
    assert worker.answer(encode(Call(method="write_state", arguments=b'{"folder": "/anywhere"}'))) == answer
    logged = capsys.readouterr().err
    assert ("raise self.error" in logged) == where_is_logged
    assert (str(error) in logged) == where_is_logged
