"""Servers and ranks that are processes of their own, to be killed and held still.

They are forked from one process that has loaded what all of them need. Whoever starts them ends them.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import load_file

from fulmen_algorithm.app import GRADIENT_EXCHANGE_SERVICE
from fulmen_exchange.codecs.codec import SegmentCodec
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.links.grpc_link import GrpcLink, GrpcParticipant
from fulmen_exchange.links.grpc_server import dial
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.registry import make_codec
from fulmen_exchange.server.runs import OpenRuns
from fulmen_exchange.server.servicer import GradientExchangeServicer, add_exchange
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from tests.support.exchange.line import Line
from tests.support.exchange.world import RESIDUAL_AT_SHARD, RUN, Member, SampleSettings, layout_of, settings_named

ANSWER_LIMIT_S = 120.0
Response = dict[str, Any]
Started = TypeVar("Started", bound="Process | Line")


class RankFailed(Exception):
    """A rank cannot go on; the text is what it says of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a rank has been given, has got and has kept back, summed over its rounds: float64.

    Attributes:
        given: Gradients.
        got: Sums.
        residual: What it has kept back.
    """

    given: np.ndarray[Any, Any]
    got: np.ndarray[Any, Any]
    residual: np.ndarray[Any, Any]


class Process:
    """A process that does what it is told, one order after another."""

    def __init__(self, nursery: Nursery, main: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = nursery.context.Pipe()
        self._process = nursery.context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, what: str, **more: object) -> None:
        """Gives an order, and does not wait."""
        self._pipe.send((what, more))

    def answer(self, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """Waits for the answer to the oldest order.

        Raises:
            RankFailed: if it cannot be carried out.
        """
        assert self._pipe.poll(limit_s), "no answer"
        kind, value = self._pipe.recv()
        if kind == "failed":
            raise RankFailed(value)
        return value

    def ask(self, what: str, **more: object) -> Any:
        """Gives an order and waits for the answer."""
        self.tell(what, **more)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        self._process.kill()
        self._process.join(ANSWER_LIMIT_S)

    def close(self) -> None:
        """Ends it, if it lives."""
        self.kill()
        self._pipe.close()
        self._process.close()


@dataclass(slots=True)
class Nursery:
    """Where processes come from; ends all that are left."""

    context: Any = field(default_factory=lambda: multiprocessing.get_context("forkserver"))
    _started: list[Process | Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context.set_forkserver_preload([__name__])

    def server(self, *, port: int = 0, folder: Path | None = None) -> Server:
        """Starts a server of shards."""
        return self._noted(Server(self, _serve, port, folder))

    def rank(self, rank: int, target: str, *, of: int, seed: int = 0, **more: object) -> Rank:
        """Starts a rank, which joins a server.

        Args:
            rank: Which.
            target: The server.
            of: Ranks with which the first round begins.
            seed: Of its gradients.
            more: See `_Taking.join`.
        """
        started = self._noted(Rank(self, _take_part, rank, seed))
        started.tell("join", target=target, of=of, **more)
        return started

    def line(self, server: Server, *, seed: int = 0) -> Line:
        """Starts a line to a server."""
        return self._noted(Line(server.port, seed=seed))

    def _noted(self, started: Started) -> Started:
        self._started.append(started)
        return started

    def close(self) -> None:
        """Ends all that were started, the newest first: no process calls a line while it ends."""
        for started in reversed(self._started):
            started.close()


class Server(Process):
    """A server of shards."""

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return int(self.ask("port"))

    def status(self) -> Response:
        """How its shards of the run stand, added up."""
        status: Response = self.ask("status")
        return status


class Rank(Process):
    """A rank."""

    def rounds(self, first: int, count: int = 1) -> list[Response]:
        """Takes rounds; tells of each the digests of its sum and of the weights, and what was accepted."""
        answers: list[Response] = self.ask("rounds", first=first, count=count)
        return answers

    def kept(self) -> Kept:
        """Returns what it has been given, has got and has kept back."""
        return Kept(**self.ask("kept"))


def together(ranks: Sequence[Rank], first: int, count: int = 1) -> list[list[Response]]:
    """Has ranks take rounds at the same time."""
    for rank in ranks:
        rank.tell("rounds", first=first, count=count)
    return [rank.answer() for rank in ranks]


def residual_in(folder: Path) -> np.ndarray[Any, Any]:
    """Returns what a shard has kept back, as its file has it."""
    [file] = folder.rglob("bucket-0.safetensors")
    found: np.ndarray[Any, Any] = load_file(file)["state.residual"].astype(np.float64)
    return found


class _Taking:
    """What a process of a rank does."""

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed

    def join(
        self,
        *,
        target: str,
        of: int,
        shards: int = 1,
        codec: str = "topk",
        rows: int = 0,
        version: int = 0,
        link: dict[str, float] | None = None,
        **more: object,
    ) -> int:
        """Joins; returns the round that it takes part in first.

        Args:
            target: The server.
            of: Ranks with which the first round begins.
            shards: How many; all are at that server.
            codec: Its name.
            rows: Of the model, if not as usual.
            version: Of the codec, if not its own.
            link: Settings of it.
            more: Settings of the codec.
        """
        # With a residual of the shard, which a server that is started again must have.
        cut = RESIDUAL_AT_SHARD if codec == "topk" else {}
        settings = settings_named(codec, **{**cut, **more})
        layout = layout_of(settings, shards, **({"rows": rows} if rows else {}))
        made = make_codec(settings)
        assert isinstance(made, SegmentCodec)
        if version:
            type(made).version = version
        who = GrpcParticipant(
            training_run=RUN, rank=self._rank, world_size=of, layout=layout, codec=made, codec_settings=settings
        )
        given = GrpcLinkSettings.model_validate({"targets": [target] * shards, **(link or {})})
        opened = GrpcLink.open(who, given, connect=dial)
        size = layout.size_of(0)
        self._member = Seeded(opened, made, layout, made.new_state(torch.zeros(size)), seed=self._seed)
        self._weights = torch.zeros(size)
        self._given, self._got = np.zeros(size), np.zeros(size)
        return opened.next_round

    def rounds(self, *, first: int, count: int) -> list[Response]:
        """See `Rank.rounds`."""
        return [self._round(number) for number in range(first, first + count)]

    def _round(self, number: int) -> Response:
        self._given += self._member.gradient(number).double().numpy()
        # As a reducer does: numbers first, which need all ranks.
        sum_ = self._member.exchange(number, also=torch.tensor([1.0]))
        self._got += sum_.double().numpy()
        self._weights += sum_
        return {
            "number": number,
            "sum": digest_of(sum_),
            "weights": digest_of(self._weights),
            "accepted": self._member.accepted[-1],
            "ranks": self._member.link.size,
        }

    def weights(self) -> bytes:
        """Returns the weights."""
        return self._weights.numpy().tobytes()

    def take_over(self, *, weights: bytes) -> None:
        """Begins with the weights of another rank, instead of zeros."""
        self._weights = torch.frombuffer(bytearray(weights), dtype=torch.float32)

    def kept(self) -> Response:
        """See `Kept`."""
        residual = self._member.state["residual"].double().numpy()
        return {"given": self._given, "got": self._got, "residual": residual}

    def close(self) -> None:
        """Leaves."""
        self._member.link.close()


@dataclass
class Seeded(Member):
    """A member whose gradients differ from those of other tests."""

    seed: int = 0

    def gradient(self, number: int) -> torch.Tensor:
        return seeded_gradient(self.link.rank, number, self.layout.size_of(0), seed=self.seed)


def seeded_gradient(rank: int, number: int, size: int, *, seed: int) -> torch.Tensor:
    """Returns the gradient of a rank in a round."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1_000_003 * seed + 1000 * number + rank))


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()[:16]


def _take_part(pipe: Connection, rank: int, seed: int) -> None:
    torch.set_num_threads(1)
    taking = _Taking(rank, seed)
    with suppress(EOFError):
        while True:
            what, more = pipe.recv()
            try:
                pipe.send(("done", getattr(taking, what)(**more)))
            except ExchangeFailed as error:
                pipe.send(("failed", str(error)))


def _serve(pipe: Connection, port: int, folder: Path | None) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serving(pipe, port, folder))


async def _serving(pipe: Connection, port: int, folder: Path | None) -> None:
    servicer = GradientExchangeServicer(runs=OpenRuns(), folder=folder)
    made = build_server(
        SampleSettings(port=port, dev_mode=True, log_level="warning"),
        verifier=TokenVerifier(""),
        service_names=[GRADIENT_EXCHANGE_SERVICE],
        register=lambda server: add_exchange(servicer, server),
    )
    await made.server.start()
    passing = asyncio.create_task(servicer.run(), name="time")
    with suppress(EOFError):
        while not passing.done():
            what, _ = await asyncio.to_thread(pipe.recv)
            pipe.send(("done", made.port if what == "port" else _status(servicer)))


def _status(servicer: GradientExchangeServicer) -> Response:
    shards = [shard for _, shard in servicer.held()]
    return {
        "members": [shard.machine.members.ranks for shard in shards],
        "epochs": [shard.machine.members.epoch for shard in shards],
        "lost_residuals": sum(shard.lost_residuals for shard in shards),
        "removed": sum(shard.machine.removed for shard in shards),
        "sums": sum(shard.machine.totals.sums for shard in shards),
        "partial_sums": sum(shard.machine.totals.partial_sums for shard in shards),
        "bad_checksums": sum(shard.machine.totals.bad_checksums for shard in shards),
        "positions": {member.rank: member.position for shard in shards for member in shard.machine.members.all()},
    }
