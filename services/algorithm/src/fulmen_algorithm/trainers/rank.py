"""One rank of a trainer: the service starts several, and each executes the same calls.

Invariant: a rank never outlives the service: its socket closes with the service, and the process then exits immediately.
"""

import argparse
import os
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec
import structlog

from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.calls import (
    ERRORS,
    OPEN,
    Answer,
    Call,
    Hello,
    decode_arguments,
    encode_result,
    frame,
    known_error,
    public_message,
    read_frame,
    takes_rows,
)
from fulmen_service_kit.standard_streams import never_raise


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket of the service")
    parser.add_argument("--rendezvous", required=True, help="file by which the ranks find each other")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where ranks compute")
    parser.add_argument("--threads", type=int, default=1, help="threads of one torch operation")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="limit of one exchange among the ranks")
    return parser.parse_args()


class Answering(Protocol):
    """Carries out calls."""

    def answer(self, message: bytes) -> Answer:
        """Carries out an encoded call; an error is returned as its answer."""


def main() -> None:
    """Answers calls until the service closes the connection."""
    options = arguments()
    serve(options, Worker(options, int(os.environ["RANK"])))


def serve(options: argparse.Namespace, worker: Answering) -> None:
    """Answers calls with a worker until the service closes the connection; ends the process after an unknown error."""
    # Its standard error is the service's; its standard output is discarded.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(never_raise()))  # type: ignore[arg-type]
    rank = int(os.environ["RANK"])
    service = socket.socket(socket.AF_UNIX)
    service.connect(options.socket)
    service.sendall(frame(msgspec.msgpack.encode(Hello(rank=rank, pid=os.getpid()))))
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(service, calls), name="service", daemon=True).start()
    while True:
        answer = worker.answer(calls.get())
        service.sendall(frame(msgspec.msgpack.encode(answer)))
        if answer.error and answer.error not in ERRORS:
            sys.stderr.flush()
            os._exit(1)


class Worker:
    """Executes calls on this rank's trainer."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._trainer: object = None

    def answer(self, message: bytes) -> Answer:
        """Executes a call; an error is returned as its answer."""
        call = msgspec.msgpack.decode(message, type=Call)
        try:
            given = decode_arguments(call)
            if call.method == OPEN:
                self._trainer = self._open(**given)
                return Answer()
            method = getattr(self._trainer, call.method)
            # The rows of a step may be empty; methods that take rows get them even then.
            result = method(call.rows, **given) if takes_rows(call.method) else method(**given)
            # All ranks have the result; the service needs one.
            return Answer(result=encode_result(call.method, result) if self._rank == 0 else b"")
        except Exception as error:  # noqa: BLE001  (whatever it is, the service is public_message, and the process ends over it)
            name = known_error(error)
            if not isinstance(error, RunFailed):
                # The service gets the message only, so log the traceback here.
                traceback.print_exc()
            return Answer(error=name, text=public_message(error))

    def _open(self, setup: object) -> object:
        # Imports take seconds; the service already has this rank's hello.
        from fulmen_algorithm.trainers.local import open_on_rank

        return open_on_rank(
            setup,  # type: ignore[arg-type]  # decoded by the type of the call
            rendezvous=Path(self._options.rendezvous),
            device=self._options.device,
            threads=self._options.threads,
            deadline_s=self._options.deadline_s,
        )


def _listen(service: socket.socket, calls: "SimpleQueue[bytes]") -> None:
    stream = service.makefile("rb")
    # If the service dies before reading the last answer, the socket is reset instead of closed.
    with suppress(OSError):
        while (message := read_frame(stream)) is not None:
            calls.put(message)
    # Not `sys.exit`: the main thread may be blocked in an exchange with ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
