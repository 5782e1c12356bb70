"""Benchmark of the exchange over gRPC on the loopback interface: ranks and one server of a shard, each a process.

    python -m benchmarks.exchange.grpc_loopback [--mib 64] [--ranks 2] [--trials 9] [--no-files] [--out FILE]

writes JSON to the file, if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.outcome import Claim, claim, save, show
from fulmen_algorithm.app import GRADIENT_EXCHANGE_SERVICE
from fulmen_exchange.codecs.codec import Round, SegmentCodec
from fulmen_exchange.layout import BUCKET_BYTES, Layout
from fulmen_exchange.links.grpc_link import GrpcLink, GrpcParticipant
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.registry import load_codecs, make_codec
from fulmen_exchange.server.runs import OpenRuns
from fulmen_exchange.server.servicer import GradientExchangeServicer, add_exchange
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, settings_config

METHOD = """Each rank has so many MiB of encoded gradients, in buckets of 25 MiB of float32 as in training, and has them
summed again and again, bucket after bucket; it is timed from when all ranks are ready until the slowest has all sums.
GB/s are the bytes that one rank sends, and as many that it receives, over that time, not those of all ranks or of both ways
together; encoding and decoding are not in it, the sum is. The server keeps sums in files, as it does by default. `none` is float32, which a shard adds, in pieces of 16 MiB, as they may be set for ranks on one machine, and in
those that are the default; `qsgd` has 8 bits, which a shard decodes, adds and encodes again.
`gRPC alone` moves as many bytes, in messages of a MiB, over streams of gRPC for Python, and does nothing with them:
that is what can be reached. `Gloo` is `all_reduce` of torch's process group over as many bytes of float32, which its ranks
sum among themselves. All take turns, so that neighbours of the machine disturb all alike; two turns do not count.
CPU seconds are of server and ranks, for each GB of all ranks and both ways, what the kernel does for them included."""
GOAL = 0.5
GOAL_SHARE = 0.5
WARM_UP = 2
COLUMNS = 1024
LIMIT_S = 900.0
GIGABYTE = 1e9
MESSAGE_BYTES = 2**20
PUMP = "/benchmark/Pump"
GRPC_ALONE = "gRPC alone"
GLOO = "Gloo"
NONE, QSGD = "none", "qsgd"
LARGE = f"{NONE}, pieces of 16 MiB"
DEFAULT_BYTES = GrpcLinkSettings(targets=("",)).piece_bytes
PIECES_BYTES = {NONE: DEFAULT_BYTES, LARGE: 16 * 2**20, QSGD: DEFAULT_BYTES}
"""Of what is exchanged, by its name, which begins with that of its codec."""
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class LoopbackSettings(KeyHolderSettings):
    """Those that every service has."""

    service_name = "exchange-loopback"
    model_config = settings_config("FULMEN_EXCHANGE_LOOPBACK_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        mib: Of each rank's payloads.
        ranks: How many.
        trials: That count.
        folder: Where the server keeps sums; empty for nowhere.
        meeting: File at which the ranks of the process group meet.
    """

    mib: int
    ranks: int
    trials: int
    folder: str = ""
    meeting: str = ""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What processes meet by: a barrier of all ranks, and a queue of what they tell."""

    barrier: Any
    told: Any


@dataclass(slots=True, kw_only=True)
class Work:
    """What a rank does again and again, and what it took.

    Attributes:
        once: Does it.
        moved_bytes: Returns the bytes sent so far, which are as many as those received.
        seconds: Of each trial.
        cpu_s: Of this process, in each trial.
        server_cpu_s: Of the server.
        moved: Bytes of a trial.
    """

    once: Callable[[], None]
    moved_bytes: Callable[[], int]
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    moved: int = 0

    def take(self, barrier: Any, server: psutil.Process) -> None:
        """Does it once, with all other ranks."""
        moved = self.moved_bytes()
        barrier.wait(LIMIT_S)
        cpu_s, server_cpu_s, began = time.process_time(), _cpu_s(server), time.perf_counter()
        self.once()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu_s)
        barrier.wait(LIMIT_S)
        self.server_cpu_s.append(_cpu_s(server) - server_cpu_s)
        self.moved = self.moved_bytes() - moved

    def found(self) -> dict[str, Any]:
        """Returns what counts of it."""
        return {
            "seconds": self.seconds[WARM_UP:],
            "cpu_s": self.cpu_s[WARM_UP:],
            "server_cpu_s": self.server_cpu_s[WARM_UP:],
            "moved_bytes": self.moved,
        }


def main(arguments: list[str]) -> int:
    """Measures; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.exchange.grpc_loopback", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB of each rank's payloads")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=9, help="turns that count")
    parser.add_argument("--no-files", action="store_true", help="the server keeps no sums in files")
    parser.add_argument("--out", type=Path, help="JSON file for what was found")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fulmen-loopback-") as folder:
        plan = Plan(
            mib=given.mib,
            ranks=given.ranks,
            trials=given.trials,
            folder="" if given.no_files else folder,
            meeting=f"{folder}/gloo",
        )
        raw = measured(plan)
    for what, found in raw.items():
        sys.stdout.write(_line(what, found))
    claims = _claims(raw)
    show(None, claims)
    if given.out:
        more = {"mib": given.mib, "ranks": given.ranks, "keeps_sums": not given.no_files}
        save(given.out.stem, method=METHOD, raw=raw, claims=claims, folder=given.out.parent, **more)
    return 0


def measured(plan: Plan) -> dict[str, Any]:
    """Starts a server and ranks, and returns what they found."""
    context = multiprocessing.get_context("spawn")
    meeting = Meeting(context.Barrier(plan.ranks), context.Queue())
    processes: list[BaseProcess] = []
    try:
        processes.append(context.Process(target=serve, args=(plan, meeting), daemon=True))
        processes[0].start()
        target = meeting.told.get(timeout=LIMIT_S)
        for rank in range(plan.ranks):
            who = (plan, rank, target, processes[0].pid, meeting)
            processes.append(context.Process(target=take_part, args=who, daemon=True))
            processes[-1].start()
        ranks = [meeting.told.get(timeout=LIMIT_S) for _ in range(plan.ranks)]
    finally:
        for process in processes:
            process.kill()
    return {what: _summed_up([rank[what] for rank in ranks]) for what in ranks[0]}


def _summed_up(ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    moved = sum(rank["moved_bytes"] for rank in ranks) / GIGABYTE
    each_way = moved / len(ranks) / 2
    rates = [each_way / max(trial) for trial in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    quartiles = statistics.quantiles(rates, n=4)
    rank_cpu_s = [sum(trial) for trial in zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    return {
        "gb_each_way": round(each_way, 4),
        "gb_per_s": [round(rate, 3) for rate in rates],
        "median": round(statistics.median(rates), 3),
        "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "server_cpu_s_per_gb": round(statistics.median(ranks[0]["server_cpu_s"]) / moved, 3),
        "ranks_cpu_s_per_gb": round(statistics.median(rank_cpu_s) / moved, 3),
    }


def _line(what: str, found: Mapping[str, Any]) -> str:
    low, high = found["quartiles"]
    return (
        f"{what}: {found['median']} GB/s of a rank, each way (quartiles {low} to {high}); CPU seconds per GB: server"
        f" {found['server_cpu_s_per_gb']}, ranks {found['ranks_cpu_s_per_gb']}\n"
    )


def _claims(raw: Mapping[str, Any]) -> list[Claim]:
    alone, gloo = raw[GRPC_ALONE]["median"], raw[GLOO]["median"]
    claims = []
    for what in (NONE, QSGD):
        rate = raw[what]["median"]
        unit = "GB/s of a rank, each way"
        claims.append(claim(f"{what} over gRPC on loopback", rate, unit, goal=GOAL, better="higher"))
        share = claim(f"{what}, of what gRPC alone moves", rate / alone, "", goal=GOAL_SHARE, better="higher")
        claims.append(share)
    share = claim(
        f"{NONE} over gRPC, of what Gloo sums", raw[NONE]["median"] / gloo, "", goal=GOAL_SHARE, better="higher"
    )
    claims.append(share)
    return claims


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def serve(plan: Plan, meeting: Meeting) -> None:
    """Serves a shard, and a pump, until it is killed."""
    asyncio.run(_serve(plan, meeting))


async def _serve(plan: Plan, meeting: Meeting) -> None:
    torch.set_num_threads(1)
    servicer = GradientExchangeServicer(runs=OpenRuns(), folder=Path(plan.folder) if plan.folder else None)
    made = build_server(
        LoopbackSettings(port=0, dev_mode=True, log_level="warning"),
        verifier=TokenVerifier(""),
        service_names=[GRADIENT_EXCHANGE_SERVICE],
        register=lambda server: add_exchange(servicer, server),
    )
    await made.server.start()
    alone = grpc.aio.server(options=UNLIMITED)
    _, service, method = PUMP.split("/")
    handler = grpc.stream_stream_rpc_method_handler(_pumping(plan.mib * 2**20 // MESSAGE_BYTES))
    alone.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = alone.add_insecure_port("127.0.0.1:0")
    await alone.start()
    meeting.told.put({"shard": f"127.0.0.1:{made.port}", "pump": f"127.0.0.1:{port}"})
    await servicer.run()


def _pumping(count: int) -> Callable[..., Any]:
    """Returns what takes so many messages, and then sends as many."""
    message = bytes(MESSAGE_BYTES)

    async def pump(requests: Any, context: grpc.aio.ServicerContext) -> None:
        number = 0
        async for _ in requests:
            number += 1
            if not number % count:
                for _ in range(count):
                    await context.write(message)

    return pump


def take_part(plan: Plan, rank: int, targets: Mapping[str, str], server: int, meeting: Meeting) -> None:
    """Is a rank; tells what it found."""
    torch.set_num_threads(1)
    works = {GRPC_ALONE: pumping(plan, targets["pump"]), GLOO: summing(plan, rank)}
    works |= {what: exchanging(plan, rank, what, targets["shard"]) for what in PIECES_BYTES}
    for _ in range(WARM_UP + plan.trials):
        for work in works.values():
            work.take(meeting.barrier, psutil.Process(server))
    meeting.told.put({what: work.found() for what, work in works.items()})
    meeting.told.close()
    meeting.told.join_thread()
    os._exit(0)  # links of a process that is measured end with it


def exchanging(plan: Plan, rank: int, what: str, target: str) -> Work:
    """Opens a link, and encodes what is sent."""
    name = what.partition(",")[0]
    settings = load_codecs()[name].settings.model_validate({"codec": name})
    codec = make_codec(settings)
    width = 1 if isinstance(codec, SegmentCodec) else 4
    rows, most = plan.mib * 2**20 // width // COLUMNS, BUCKET_BYTES // 4 // COLUMNS
    sizes = [min(most, rows - begin) for begin in range(0, rows, most)]
    parameters = [(str(number), nn.Parameter(torch.zeros(size, COLUMNS))) for number, size in enumerate(sizes)]
    layout = Layout.of(parameters, settings, shards=1)
    who = GrpcParticipant(
        training_run=f"projects/default/trainingRuns/{name}-{PIECES_BYTES[what]}",
        rank=rank,
        world_size=plan.ranks,
        layout=layout,
        codec=codec,
        codec_settings=settings,
    )
    link = GrpcLink.open(who, GrpcLinkSettings(targets=(target,), piece_bytes=PIECES_BYTES[what]))
    round_ = Round(number=1, world_size=plan.ranks, rank=rank)
    flats = [torch.randn(layout.size_of(bucket)) for bucket in range(len(sizes))]
    payloads = [
        codec.encode(flat.clone(), codec.new_state(flat), [0, flat.numel()], round_)
        for flat in flats
        if isinstance(codec, SegmentCodec)
    ]

    def once() -> None:
        link.begin()
        if payloads:
            link.exchange(dict(enumerate(payloads)), round_)
            return
        for flat in flats:
            link.all_reduce(flat)

    return Work(once=once, moved_bytes=lambda: link.sent_bytes + link.received_bytes)


def summing(plan: Plan, rank: int) -> Work:
    """Has torch's process group sum as many bytes of float32."""
    dist.init_process_group("gloo", init_method=f"file://{plan.meeting}", rank=rank, world_size=plan.ranks)
    tensor, moved = torch.zeros(plan.mib * 2**20 // 4), [0]

    def once() -> None:
        for part in tensor.split(BUCKET_BYTES // 4):
            dist.all_reduce(part)
        moved[0] += 2 * plan.mib * 2**20

    return Work(once=once, moved_bytes=lambda: moved[0])


def pumping(plan: Plan, target: str) -> Work:
    """Opens a stream that carries bytes and nothing else."""
    loop = asyncio.new_event_loop()
    count, message, moved = plan.mib * 2**20 // MESSAGE_BYTES, bytes(MESSAGE_BYTES), [0]

    async def opened() -> Any:
        return grpc.aio.insecure_channel(target, options=UNLIMITED).stream_stream(PUMP)()

    async def pump(stream: Any) -> None:
        for _ in range(count):
            await stream.write(message)
        for _ in range(count):
            moved[0] += MESSAGE_BYTES + len(await stream.read())

    stream = loop.run_until_complete(opened())
    return Work(once=lambda: loop.run_until_complete(pump(stream)), moved_bytes=lambda: moved[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
