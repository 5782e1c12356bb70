"""Machines that join a run: the real program `fulmen-rank`, and the real rpc that it calls, over runs that nobody executes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio
from pydantic import SecretStr

from fulmen.algorithm.v1.rank_service_pb2_grpc import add_RankServiceServicer_to_server
from fulmen_algorithm.app import GRADIENT_EXCHANGE_SERVICE, RANK_SERVICE
from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.joined import JoinedCluster, JoinedMachines
from fulmen_algorithm.cluster.joining import RunRanks
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.ranks import RankServicer
from fulmen_algorithm.transport.run_access import CallerRuns
from fulmen_exchange.server.servicer import GradientExchangeServicer, add_exchange
from fulmen_service_kit import launch
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from tests.support.algorithm.new_run import now, training_run
from tests.support.store.running import SIGNING_KEY, run_token

CLUSTER = "machines"
JOIN_DEADLINE_S = 90.0


@dataclass(kw_only=True)
class Door:
    """Where machines join.

    Attributes:
        target: Address of the rpc.
        runs: The runs.
        machines: Those that have joined.
        cluster: The cluster of one run.
        notices: What its plans have said.
        started: The programs that were started.
    """

    target: str
    runs: RunRegistry
    machines: JoinedMachines
    run: TrainingRun
    cluster: JoinedCluster
    notices: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_machine(
        self, node: str, *, ranks: int = 2, within: Sequence[str] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Starts `fulmen-rank` behind some words, with a token of the run."""
        settings = {
            "FULMEN_RANK_ALGORITHM_TARGET": self.target,
            "FULMEN_RANK_TOKEN": run_token(self.run.name, role="rank"),
            "FULMEN_RANK_NODE": node,
            "FULMEN_RANK_RANKS": str(ranks),
        }
        # It ends with the test.
        tied = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "/usr/bin/env"]
        started = subprocess.Popen(
            [*tied, *within, sys.executable, "-m", "fulmen_algorithm.rank_agent", "serve"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings, **variables},
            stdin=subprocess.DEVNULL,
        )
        self.started.append(started)
        return started

    async def until(self, *nodes: str) -> None:
        """Waits until just these machines are there and run nothing."""
        async with asyncio.timeout(JOIN_DEADLINE_S):
            while [each.node.name for each in self.machines.of(self.run.name) if each.is_free] != sorted(nodes):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@asynccontextmanager
async def open_door(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    silence_s: float = 5.0,
    start_deadline_s: float = JOIN_DEADLINE_S,
) -> AsyncIterator[Door]:
    """Serves the rpc for a run that nobody executes; see `door_of`. `folder` is an empty one for it."""
    run = training_run(settings_json=json.dumps({"parallel": {"kind": "ddp", "cluster": CLUSTER}}))
    with RunStorage(folder) as storage:
        runs = RunRegistry(storage, clock=now)
        runs.add(run)
        async with door_of(runs, run, host=host, silence_s=silence_s, start_deadline_s=start_deadline_s) as door:
            yield door


@asynccontextmanager
async def door_of(
    runs: RunRegistry, run: TrainingRun, *, host: str, silence_s: float, start_deadline_s: float
) -> AsyncIterator[Door]:
    """Serves the rpc for a run whose ranks are on machines that join; ends the machines that were started with it.

    Args:
        runs: The runs.
        run: The run.
        host: Address of the service's machine.
        silence_s: When a machine counts as dead, in seconds.
        start_deadline_s: How long a group waits for machines, in seconds.
    """
    gate, machines = Gate(GateOptions(host=host, silence_s=silence_s)), JoinedMachines()
    with TemporaryDirectory() as state:
        ranks = RunRanks(runs, machines, is_joined=CLUSTER.__eq__, silence_s=silence_s)
        servicer = RankServicer(ranks, Forwarding(None, lambda: ""))

        exchange = GradientExchangeServicer(runs=CallerRuns(runs))

        def register(server: grpc.aio.Server) -> None:
            add_RankServiceServicer_to_server(servicer, server)
            add_exchange(exchange, server)

        served = build_server(
            AlgorithmServiceSettings(host=host, port=0, token=SecretStr("unused"), state_dir=Path(state)),
            verifier=TokenVerifier(SIGNING_KEY),
            service_names=(RANK_SERVICE, GRADIENT_EXCHANGE_SERVICE),
            register=register,
        )
        await served.server.start()
        ticking = asyncio.create_task(exchange.run(), name="exchange")
        notices: list[str] = []
        cluster = JoinedCluster(machines, gate, start_deadline_s=start_deadline_s)
        door = Door(
            target=f"{host}:{served.port}",
            runs=runs,
            machines=machines,
            run=run,
            cluster=cluster.of_run(run.name, lambda severity, text: notices.append(text)),
            notices=notices,
        )
        try:
            yield door
        finally:
            for each in door.started:
                each.kill()
                await asyncio.to_thread(each.wait)
            ticking.cancel()
            servicer.drain()
            await served.server.stop(None)
            gate.close()
