"""One rank of a trainer: the service starts several, and each executes the same calls."""

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import msgspec
import structlog

from fulmen_algorithm.cluster.wire import Ticket
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.calls import (
    ERRORS,
    LEAVE,
    OPEN,
    RANKS_LOST,
    Answer,
    Call,
    decode_arguments,
    encode_result,
    known_error,
    public_message,
    takes_rows,
)
from fulmen_algorithm.trainers.files.carried import CarriedFolders
from fulmen_algorithm.trainers.service_link import ServiceLink
from fulmen_service_kit.standard_streams import never_raise


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
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
    ticket, rank = Ticket.from_environment(), int(os.environ["RANK"])
    link, folders = ServiceLink(ticket), CarriedFolders.from_environment(ticket, rank)
    meet = lambda: (link.rendezvous, link.listener)  # noqa: E731  (the same one for every trainer)
    serve(link, Worker(options, rank, meet=meet, left=link.left, folders=folders))


def serve(link: ServiceLink, worker: Answering) -> None:
    """Answers calls with a worker until the service closes the connection; ends the process after an unknown error."""
    # Its standard error is the service's; its standard output is discarded.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(never_raise()))  # type: ignore[arg-type]
    while True:
        answer = worker.answer(link.next_call())
        link.send(answer)
        if answer.error and answer.error not in (*ERRORS, RANKS_LOST):
            sys.stderr.flush()
            os._exit(1)


class Worker:
    """Executes calls on this rank's trainer."""

    def __init__(
        self,
        options: argparse.Namespace,
        rank: int,
        *,
        meet: Callable[[], tuple[str, socket.socket | None]],
        left: "Future[None]",
        folders: CarriedFolders,
    ) -> None:
        """Opens nothing yet.

        Args:
            options: The command line.
            rank: This rank.
            meet: Returns the address where the ranks meet, and the socket at which this one waits for them, if it is
                the first.
            left: Set when other ranks are lost.
            folders: Folders of calls that this machine does not see.
        """
        self._options = options
        self._rank = rank
        self._meet = meet
        self._left = left
        self._folders = folders
        self._trainer: object = None

    def answer(self, message: bytes) -> Answer:
        """Executes a call; an error is returned as its answer."""
        call = msgspec.msgpack.decode(message, type=Call)
        try:
            with self._folders.there(call.method, decode_arguments(call)) as given:
                if call.method == OPEN:
                    self._trainer = self._open(**given)
                    return Answer()
                method = getattr(self._trainer, call.method)
                # The rows of a step may be empty; methods that take rows get them even then.
                result = method(call.rows, **given) if takes_rows(call.method) else method(**given)
            # All ranks have the result of a call of `Trainer`; the service needs one.
            own = self._rank == 0 or call.method == LEAVE
            return Answer(result=encode_result(call.method, result) if own else b"")
        except Exception as error:  # noqa: BLE001  (whatever it is, the service is public_message, and the process ends over it)
            name = known_error(error)
            if not isinstance(error, RunFailed) and name != RANKS_LOST:
                # The service gets the message only, so log the traceback here.
                traceback.print_exc()
            return Answer(error=name, text=public_message(error))

    def _open(self, setup: object) -> object:
        # Imports take seconds; the service already has this rank's hello.
        from fulmen_algorithm.trainers.local import open_on_rank

        return open_on_rank(
            setup,  # type: ignore[arg-type]  # decoded by the type of the call
            meet=self._meet,
            left=self._left,
            device=self._options.device,
            threads=self._options.threads,
            deadline_s=self._options.deadline_s,
        )


if __name__ == "__main__":
    main()
