"""A trainer in a group of processes on this machine.

Every call is executed by all ranks together; the result is rank 0's. If a rank ends,
fails unexpectedly or misses the deadline, the whole group is ended and the call raises `TrainerLost`.
Invariant: ranks never outlive this process (each watches its socket), and never see the service's settings.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fulmen_algorithm.clients.forked_child import ModuleProcess, ModuleStarter
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.calls import (
    ERRORS,
    LENGTH_BYTES,
    OPEN,
    Answer,
    Hello,
    decode_result,
    encode_call,
    frame_length,
)
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_exchange.kernels.selection import VARIABLE as KERNELS_VARIABLE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODULE = "fulmen_algorithm.trainers.rank"
HIDDEN_PREFIX = "FULMEN_"
START_DEADLINE_S = 300.0
STOP_GRACE_S = 10.0
ERROR_GRACE_S = 30.0
"""Time for the other ranks to answer after one has refused a call, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Settings of a group of ranks that depend on the machine.

    Attributes:
        device: `cpu` or `cuda`, without an index, since each rank has its own GPU.
        torch_threads: Threads of one torch operation in one rank.
        call_deadline_s: Timeout of one call, in seconds.
        modules: Starts the ranks' processes; by default fresh ones.
    """

    device: str = "cpu"
    torch_threads: int = 1
    call_deadline_s: float = 3600.0
    modules: ModuleStarter = field(default_factory=lambda: ModuleStarter(warm=False), repr=False)


class _RankEnded(Exception):
    """A rank has ended or is unusable."""


class _RankRefused(Exception):
    """A rank answered with an error that is passed on to the caller."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """The connection of one rank."""

    hello: Hello
    reader: StreamReader
    writer: StreamWriter

    async def ask(self, call: bytes) -> Answer:
        """Sends a call and waits for its answer.

        Raises:
            _RankEnded: if the rank ends, or fails unexpectedly.
            _RankRefused: if the answer is an error.
        """
        try:
            self.writer.write(call)
            await self.writer.drain()
            answer = msgspec.msgpack.decode(await _read(self.reader), type=Answer)
        except (OSError, EOFError) as error:
            raise _RankEnded(f"Rank {self.hello.rank} of the trainer has ended.") from error
        if answer.error in ERRORS:
            raise _RankRefused(ERRORS[answer.error](answer.text))
        if answer.error:
            reason = f": {answer.text}" if answer.text else f" ({answer.error}); the log of the service says more"
            raise _RankEnded(f"Rank {self.hello.rank} of the trainer failed{reason}.")
        return answer


class RankGroupTrainer:
    """See `policy.trainer.Trainer`."""

    def __init__(self, group: "_Group", links: Sequence[_Link], options: GroupOptions) -> None:
        """Use `open`."""
        self._group = group
        self._links = sorted(links, key=lambda link: link.hello.rank)
        self._options = options
        self._lost = ""
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    async def open(cls, setup: TrainerSetup, options: GroupOptions) -> "RankGroupTrainer":
        """Starts the ranks, which load the model and build a fresh optimiser.

        Raises:
            RunFailed: if the folder holds no model with tokenizer, or the machine has fewer GPUs than ranks.
            TrainerLost: if the ranks do not start.
        """
        group, links = await _start(setup.compute.parallel.ranks, options)
        trainer = cls(group, links, options)
        try:
            await trainer._call(OPEN, setup=setup)
            trainer._tokenizer = await asyncio.to_thread(_load_tokenizer, setup.model_dir)
        except BaseException:
            await trainer.close()
            raise
        return trainer

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        assert self._tokenizer is not None, "the trainer is open"
        return self._tokenizer

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(link.hello.pid for link in self._links)

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step."""
        results: list[StepResult] = await self._call(
            "train", rows, settings=settings, batch=batch, seed=seed, current_version=current_version
        )
        return results

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        result: StepResult = await self._call("train_supervised", rows, settings=settings)
        return result

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the log-probability of each token that trains."""
        found: list[list[float]] = await self._call("logprobs", rows, settings=settings)
        return found

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the frozen reference."""
        found: list[list[float]] = await self._call("reference_logprobs", rows, settings=settings)
        return found

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines."""
        written: WrittenWeights = await self._call("write_weights", folder=folder.resolve(), order=order)
        return written

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        await self._call("write_state", folder=folder.resolve())

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        await self._call("read_state", folder=folder.resolve())

    async def close(self) -> None:
        """Ends the ranks; idempotent."""
        self._lost = self._lost or "The trainer is closed."
        await self._group.end(self._links)

    async def _call(self, method: str, rows: Sequence[Row] = (), **arguments: object) -> Any:
        if self._lost:
            raise TrainerLost(self._lost)
        call = await asyncio.to_thread(encode_call, method, rows, arguments)
        # A cancelled call leaves ranks in the middle of it, so the group cannot be used again.
        self._lost = "A call to the trainer was cancelled."
        try:
            async with asyncio.timeout(self._options.call_deadline_s):
                first = await self._ask_all(call)
        except _RankEnded as error:
            raise await self._lose(str(error)) from error
        except TimeoutError as error:
            text = f"The trainer did not answer within {self._options.call_deadline_s:.0f} s."
            raise await self._lose(text) from error
        self._lost = ""
        return await asyncio.to_thread(decode_result, method, first.result) if first.result else None

    async def _ask_all(self, call: bytes) -> Answer:
        """Asks every rank and returns the answer of the first.

        Raises:
            _RankEnded: if one of them ends; the others may then block forever.
            ValueError, OSError, ...: the error of a rank; all are then ready for the next call.
        """
        tasks = [asyncio.create_task(link.ask(call), name=f"rank-{link.hello.rank}") for link in self._links]
        try:
            _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if waiting and not _ended(tasks):
                await asyncio.wait(waiting, timeout=ERROR_GRACE_S)
            if ended := _ended(tasks):
                raise ended[0]
            if not all(task.done() for task in tasks):
                raise _RankEnded("The ranks of the trainer do not agree on a call that one of them refused.")
            for task in tasks:
                if isinstance(refused := task.exception(), _RankRefused):
                    self._lost = ""
                    raise refused.error
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _lose(self, text: str) -> TrainerLost:
        self._lost = text
        await self._group.end(self._links)
        return TrainerLost(text)


def _ended(tasks: Sequence["asyncio.Task[Answer]"]) -> list[BaseException]:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if error is not None and not isinstance(error, _RankRefused)]


class _Group:
    """The processes of a group, and the folder in which they find the service and each other."""

    def __init__(self) -> None:
        # Only this user can open the folder and thus the socket.
        self.folder = Path(tempfile.mkdtemp(prefix="fulmen-ranks-"))
        self.processes: list[ModuleProcess] = []

    async def end(self, links: Sequence[_Link]) -> None:
        """Closes the sockets, waits for the ranks to end, and kills the rest."""
        for link in links:
            link.writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await asyncio.gather(*(process.wait() for process in self.processes))
        await asyncio.gather(*(process.end(grace_s=STOP_GRACE_S) for process in self.processes))
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


async def _start(ranks: int, options: GroupOptions) -> tuple[_Group, list[_Link]]:
    """Starts the ranks and waits for the hello of each.

    Raises:
        TrainerLost: if one ends before that, or they time out.
    """
    links: list[_Link] = []
    complete = asyncio.Event()

    async def welcome(reader: StreamReader, writer: StreamWriter) -> None:
        hello = msgspec.msgpack.decode(await _read(reader), type=Hello)
        links.append(_Link(hello=hello, reader=reader, writer=writer))
        if len(links) == ranks:
            complete.set()

    group = _Group()
    server: asyncio.Server | None = None
    try:
        server = await asyncio.start_unix_server(welcome, group.folder / "service")
        flags = _flags(options, group.folder)
        async with asyncio.timeout(START_DEADLINE_S):
            for rank in range(ranks):
                environment = _environment(options, rank, ranks)
                started = await options.modules.start(MODULE, flags, environment=environment, quiet=True)
                group.processes.append(started)
            await _until_complete(complete, group.processes)
    except BaseException as error:
        await group.end(links)
        if isinstance(error, OSError | TimeoutError | _RankEnded):
            raise TrainerLost("The ranks of the trainer did not start; see the log of the service.") from error
        raise
    finally:
        if server is not None:
            server.close()
    return group, links


async def _until_complete(complete: asyncio.Event, processes: Sequence[ModuleProcess]) -> None:
    arriving = asyncio.create_task(complete.wait(), name="ranks-arrive")
    ending = [asyncio.create_task(process.wait(), name="rank-ends") for process in processes]
    try:
        await asyncio.wait({arriving, *ending}, return_when=asyncio.FIRST_COMPLETED)
        if not complete.is_set():
            raise _RankEnded("A rank has ended.")
    finally:
        for task in (arriving, *ending):
            task.cancel()


async def _read(reader: StreamReader) -> bytes:
    return await reader.readexactly(frame_length(await reader.readexactly(LENGTH_BYTES)))


def _flags(options: GroupOptions, folder: Path) -> list[str]:
    flags: dict[str, object] = {
        "--socket": folder / "service",
        "--rendezvous": folder / "rendezvous",
        "--device": options.device.partition(":")[0],
        "--threads": options.torch_threads,
        "--deadline-s": options.call_deadline_s,
    }
    return [str(part) for flag in flags.items() for part in flag]


def _environment(options: GroupOptions, rank: int, ranks: int) -> dict[str, str]:
    """Returns the environment of a rank; the variables of its place are those of `torchrun`."""
    inherited = {
        key: value for key, value in os.environ.items() if key == KERNELS_VARIABLE or not key.startswith(HIDDEN_PREFIX)
    }
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    inherited |= {name: str(value) for name, value in place.items()}
    # Modules in the service's working directory must not shadow others.
    inherited |= {"OMP_NUM_THREADS": str(options.torch_threads), "TQDM_DISABLE": "1", "PYTHONSAFEPATH": "1"}
    if sys.platform == "linux":
        # Ranks on one machine need only the loopback interface.
        inherited |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return inherited


def _load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return tokenizer
