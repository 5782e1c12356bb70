"""Entry point of the process that holds trainers; torch is imported after it has greeted the service."""

from fulmen_algorithm.cluster.wire import Ticket
from fulmen_algorithm.trainers.calls import Answer
from fulmen_algorithm.trainers.rank import arguments, serve
from fulmen_algorithm.trainers.service_link import ServiceLink


class LateWorker:
    """A `LoopWorker` that is made at the first call."""

    def __init__(self) -> None:
        self._options = arguments()
        self._worker: object = None

    def answer(self, message: bytes) -> Answer:
        """Carries out an encoded call."""
        from fulmen_algorithm.loops.worker import LoopWorker

        if not isinstance(self._worker, LoopWorker):
            self._worker = LoopWorker(self._options)
        return self._worker.answer(message)


def main() -> None:
    """Answers calls until the service closes the connection."""
    serve(ServiceLink(Ticket.from_environment()), LateWorker())


if __name__ == "__main__":
    main()
