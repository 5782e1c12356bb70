"""Benchmark of fairness: how much one project's flood slows another's calls down.

Method: one store process over an embedded PostgreSQL, one proxy process over it with a canned backend; a process of project a
floods, 64 calls at a time, each again at once, refused or not. This process works for project b, one call every 10 ms: rollouts
that are created, leased and reported, or model calls over HTTP; first without the flood, then with it. Also the cost of the
limits per rpc. The machine's cores are shared by all of them. Run `python -m benchmarks.tenants [--seconds 10] [--only NAME ...]`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.proxy import answers, fulmen, processes, stores
from fulmen.errors import FulmenError
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import (
    lease_service_pb2,
    project_service_pb2,
    rollout_pb2,
    rollout_service_pb2,
    secret_service_pb2,
    secret_service_pb2_grpc,
)
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_service_kit.security.tokens import Caller, Role, TokenSigner
from tests.support.postgres import PostgresServer
from tests.support.store.process import StoreProcess
from tests.support.store.running import SIGNING_KEY, Stubs, create, report

FLOODER, OTHER = "projects/a", "projects/b"
IN_FLIGHT = 64
EVERY_S = 0.01
COST_CALLS = 200_000
LARGE_BYTES = 2_000_000
FORGED = TokenSigner("another key that has enough bytes")
Call = Callable[[], Awaitable[Any]]


def token(project: str, role: Role = Role.CLIENT, signer: TokenSigner | None = None) -> str:
    """Returns a token of a project."""
    return (signer or TokenSigner(SIGNING_KEY)).issue(role, subject="bench", ttl_s=7200, project=project)


def bearer(value: str) -> dict[str, Any]:
    """Returns a token as an argument of an rpc."""
    return {"metadata": (("authorization", f"Bearer {value}"),)}


@asynccontextmanager
async def rpcs(name: str, address: str) -> AsyncIterator[list[Call]]:
    """Yields the calls of a flood of the store."""
    async with open_channel(address) as channel:
        stubs, pb = Stubs(channel).rollouts, rollout_service_pb2
        secrets = secret_service_pb2_grpc.SecretServiceStub(channel)
        own = bearer(token(FLOODER))
        batch = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=b"x" * 1024) for _ in range(32)])
        wrong = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=b"x" * LARGE_BYTES)])
        calls: dict[str, list[Call]] = {
            "lists": [
                partial(stubs.ListRollouts, pb.ListRolloutsRequest(page_size=200), **own),
                partial(stubs.ListRollouts, pb.ListRolloutsRequest(filter='state = "FAILED"'), **own),
                partial(stubs.GetQueueStats, pb.GetQueueStatsRequest(), **own),
                partial(stubs.BatchCreateRollouts, batch, **own),
            ],
            "bodies": [partial(stubs.BatchCreateRollouts, wrong, **own)],
            "forged": [partial(stubs.ListRollouts, pb.ListRolloutsRequest(), **bearer(token(FLOODER, signer=FORGED)))],
            "denied": [
                partial(
                    secrets.DeleteSecret,
                    secret_service_pb2.DeleteSecretRequest(name="NOT_MINE"),
                    **bearer(token(FLOODER, Role.READER)),
                )
            ],
        }
        yield calls[name]


@asynccontextmanager
async def models(name: str, address: str, project: str = FLOODER) -> AsyncIterator[list[Call]]:
    """Yields a model call over HTTP: small, large, with a forged token, or to a path that is not served."""
    bodies = {"models large": answers.request_body().replace(b"xxx", b"x" * 60_000, 1)}
    body = bodies.get(name, answers.request_body())
    value = token(project, signer=FORGED if name == "models forged" else None)
    path = "/nothing" if name == "models nowhere" else fulmen.PATH
    headers = {"authorization": f"Bearer {value}", "content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def call() -> None:
            async with session.post(f"http://{address}{path}", data=body, headers=headers) as answer:
                await answer.read()
                if answer.status != 200:
                    raise FulmenError(str(answer.status))

        yield [call]


def flood(name: str, address: str, counts: Any, stop: Any) -> None:
    """Floods until stopped; counts served and refused calls."""
    asyncio.run(_flood(name, address, counts, stop))


async def _flood(name: str, address: str, counts: Any, stop: Any) -> None:
    async with (models if name.startswith("models") else rpcs)(name, address) as calls:

        async def work(number: int) -> None:
            while not stop.is_set():
                try:
                    await calls[number % len(calls)]()
                    counts[0] += 1
                except FulmenError:
                    counts[1] += 1

        await asyncio.gather(*(work(number) for number in range(IN_FLIGHT)))


@asynccontextmanager
async def work_of_others(name: str, address: str) -> AsyncIterator[list[Call]]:
    """Yields the calls of project b, to be made in turns."""
    if name.startswith("models"):
        async with models("models", address, OTHER) as calls:
            yield calls
        return
    async with (
        open_channel(address, token=token(OTHER)) as client,
        open_channel(address, token=token(OTHER, Role.RUNNER)) as runner,
    ):
        of_client, of_runner = Stubs(client), Stubs(runner)
        acquire = lease_service_pb2.AcquireLeasesRequest(max_count=1)
        acquire.wait.FromSeconds(10)
        held: list[Any] = []

        async def lease() -> None:
            answer = await of_runner.leases.AcquireLeases(acquire)
            acquire.runner = answer.runner
            held.extend(answer.assignments)

        async def complete() -> None:
            await report(of_runner, held)
            held.clear()

        yield [lambda: create(of_client), lease, complete]


async def measured(calls: list[Call], seconds: float) -> list[float]:
    """Returns the durations of the other project's calls, sorted, seconds."""
    took: list[float] = []
    end_s = time.perf_counter() + seconds
    while (begun_s := time.perf_counter()) < end_s:
        with suppress(FulmenError):  # its deadline; it counts with the time that it took
            await calls[len(took) % len(calls)]()
        took.append(time.perf_counter() - begun_s)
        await asyncio.sleep(max(0.0, EVERY_S - took[-1]))
    return sorted(took)


async def case(name: str, address: str, seconds: float) -> None:
    """Measures without a flood and with one; prints a line."""
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("q", 2), context.Event()
    flooder = context.Process(target=flood, args=(name, address, counts, stop))
    async with work_of_others(name, address) as calls:
        await measured(calls, 1.0)
        alone = await measured(calls, seconds)
        flooder.start()
        while not sum(counts[:]):  # state of another process
            if not flooder.is_alive():
                raise RuntimeError("the flood ended")
            await asyncio.sleep(0.05)
        before = counts[:]
        flooded = await measured(calls, seconds)
    served, refused = ((now - then) / seconds for now, then in zip(counts[:], before, strict=True))
    stop.set()
    await asyncio.to_thread(flooder.join)
    parts = []
    for took in (alone, flooded):
        p50, p99 = (took[int(len(took) * share)] * 1e3 for share in (0.5, 0.99))
        parts.append((p50, p99, len(took) / seconds))
    shown = " -> ".join(f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {rate:.0f}/s" for p50, p99, rate in parts)
    median, slowest, rate = (after / before for before, after in zip(*parts, strict=True))
    times = f"x{median:.1f}, x{slowest:.1f}, {rate:.0%}"
    print(f"{name:13} ({served:.0f} served, {refused:.0f} refused/s): {shown} ({times})", flush=True)


async def cost() -> None:
    """Prints what the limits cost an rpc: counting the call, its bytes and its end."""
    limits = ProjectLimits(calls_per_s=1e9, burst=1e9, max_calls=512, max_streams=512)
    for what, project in (("of a project", OTHER), ("for all projects", "projects/*")):
        caller, runs = Caller(role=Role.CLIENT, project=project), []
        for _ in range(5):
            begun_s = time.process_time()
            for _ in range(COST_CALLS):
                share = await limits.admit(caller)
                share.charge(100)
                share.charge(100)
                share.end()
            runs.append((time.process_time() - begun_s) / COST_CALLS * 1e6)
        print(f"cost of the limits for a token {what}: {min(runs):.2f} µs of CPU per rpc")


async def no_attempts(count: int) -> list[str]:
    """Makes no attempts: the model calls are those of clients."""
    return []


async def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    wanted = [name for name in CASES if not arguments.only or name in arguments.only]
    await cost()
    postgres = PostgresServer(embedded=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dsn = await asyncio.to_thread(postgres.fresh_database)
            store = StoreProcess(
                dsn, Path(folder), FULMEN_STORE_AUDIT_FILE=f"{folder}/audit.log", FULMEN_STORE_LOG_LEVEL="error"
            )
            try:
                await _run(wanted, f"127.0.0.1:{await store.port()}", arguments.seconds)
            finally:
                store.end()
    finally:
        postgres.stop()


async def _run(wanted: list[str], address: str, seconds: float) -> None:
    admin = TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="bench", ttl_s=7200)
    async with open_channel(address, token=admin) as channel:
        for project in (FLOODER, OTHER):
            made = project_service_pb2.Project(name=project)
            await Stubs(channel).projects.CreateProject(project_service_pb2.CreateProjectRequest(project=made))
    for name in wanted:
        if not name.startswith("models"):
            await case(name, address, seconds)
    if not any(name.startswith("models") for name in wanted):
        return
    reached = stores.Store(target=address, signing_key=SIGNING_KEY, attempts=no_attempts)
    async with processes.module("backend") as (_, port), fulmen.running(reached, f"127.0.0.1:{port}") as proxy:
        for name in wanted:
            if name.startswith("models"):
                await case(name, proxy.replicas[0].address, seconds)


CASES = ("lists", "bodies", "forged", "denied", "models", "models large", "models forged", "models nowhere")

if __name__ == "__main__":
    asyncio.run(main())
