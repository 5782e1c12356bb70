"""Load test of the whole system: thousands of runner sessions, a store of two replicas, the proxy, and a canned model.

Method: real processes on one machine (PostgreSQL with fsync and synchronous_commit, two store replicas, one proxy, a backend
that answers at once); the runners are streams of their own connections, many to a process, whose agents think, call the
model once and end. The queue is never empty. After a minute everything that was created has to have ended exactly once, by
the feed. `--runners`, `--think` and `--seconds` set the load; times hold on a quiet machine, CPU per rollout on any.
Then a model of the same deployment, with those CPU times, says what it should have carried; how far it is off is a claim.
Run `python -m benchmarks.scale [--short]`; writes benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import outcome
from benchmarks.proxy import fulmen, processes
from benchmarks.proxy.stores import Store
from benchmarks.scale.fleet import Plan
from benchmarks.scale.model import Costs, Deployment, predicted
from benchmarks.store.stand import Bench, postgres_pids, running_store
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1.rollout_service_pb2_grpc import RolloutServiceStub
from fulmen_service_kit.security.tokens import Role, TokenSigner

GROUP = 8
BATCH_GROUPS = 16
FLEETS = 2
END_LIMIT_S = 180.0
# The feed tells of whole groups: most of what it has not told of yet has ended already, or runs.
AHEAD = 5
INPUT = b'{"question": "What is 17 + 25?", "pad": "' + b"x" * 300 + b'"}'


class Work:
    """Keeps the queue from being empty, and counts what ends."""

    def __init__(self, bench: Bench, *, ahead: int) -> None:
        self._stub = RolloutServiceStub(bench.channel)
        self._ahead = ahead
        self.created: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.ended_rollouts = 0
        self.stopped = asyncio.Event()

    async def create(self) -> None:
        """Creates groups until it is stopped."""
        while not self.stopped.is_set():
            if len(self.created) * GROUP - self.ended_rollouts > self._ahead:
                await asyncio.sleep(0.01)
                continue
            groups = [secrets.token_hex(16) for _ in range(BATCH_GROUPS)]
            rollouts = [
                rollout_pb2.Rollout(input=INPUT, group_id=group, group_size=GROUP)
                for group in groups
                for _ in range(GROUP)
            ]
            await self._stub.BatchCreateRollouts(pb.BatchCreateRolloutsRequest(rollouts=rollouts))
            self.created.update(groups)

    async def watch(self) -> None:
        """Follows the feed of finished groups from its beginning."""
        stream = self._stub.WatchRollouts(pb.WatchRolloutsRequest())
        async for message in stream:
            for group in message.groups:
                self.ended[group.rollouts[0].group_id] += 1
                self.ended_rollouts += len(group.rollouts)

    async def finish(self, tasks: list[asyncio.Task[None]]) -> None:
        """Creates no more, and waits for what there is to end; raises what ended the tasks."""
        self.stopped.set()
        async with asyncio.timeout(END_LIMIT_S):
            while len(self.ended) < len(self.created):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)


class Fleets:
    """The processes of runners."""

    def __init__(self, plans: list[Plan], stack: AsyncExitStack) -> None:
        self._plans = plans
        self._stack = stack
        self.running: list[asyncio.subprocess.Process] = []

    async def open(self, limit_s: float) -> float:
        """Starts them; returns how long it took until every session was open, seconds."""
        started = time.perf_counter()
        for plan in self._plans:
            process = await self._stack.enter_async_context(
                processes.running(sys.executable, "-m", "benchmarks.scale.fleet")
            )
            self.running.append(process)
            self.tell(process, json.dumps(asdict(plan)))
        async with asyncio.timeout(limit_s):
            for process in self.running:
                assert process.stdout is not None
                assert (await process.stdout.readline()).strip() == b"ready"
        return time.perf_counter() - started

    def tell(self, process: asyncio.subprocess.Process, line: str) -> None:
        """Writes a line to a fleet."""
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")

    async def ask(self, what: str) -> int:
        """Says something to all of them; returns the sum of their answers."""
        total = 0
        for process in self.running:
            assert process.stdout is not None
            self.tell(process, what)
            total += int(await process.stdout.readline())
        return total

    async def end(self) -> list[dict[str, Any]]:
        """Stops them; returns what each saw."""
        found = []
        for process in self.running:
            assert process.stdout is not None
            self.tell(process, "stop")
            found.append(json.loads(await process.stdout.read()))
        return found


async def measure(folder: Path, *, runners: int, think_s: float, seconds: float) -> tuple[dict[str, Any], list[Any]]:
    """Runs the load; returns the raw figures and the claims."""
    key = secrets.token_urlsafe(32)
    signer = TokenSigner(key)
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(running_store(folder, short=False, replicas=2, signing_key=key))
        _, port = await stack.enter_async_context(processes.module("backend"))
        store = Store(target=bench.targets[0], signing_key=key, attempts=_no_attempts)
        proxy = await stack.enter_async_context(fulmen.running(store, f"127.0.0.1:{port}"))
        plans = [
            Plan(
                targets=list(bench.targets),
                proxy=proxy.replicas[0].address,
                token=signer.issue(Role.RUNNER, subject="scale", ttl_s=7200),
                runners=runners // FLEETS,
                think_s=think_s,
                seed=number,
            )
            for number in range(FLEETS)
        ]
        before_mb = sum(processes.memory_mb([pid]) for pid in bench.store_pids)
        fleets = Fleets(plans, stack)
        opening_s = await fleets.open(limit_s=120.0)
        sessions_kb = (sum(processes.memory_mb([pid]) for pid in bench.store_pids) - before_mb) * 1000 / runners
        work = Work(bench, ahead=runners * AHEAD)
        tasks = [asyncio.create_task(work.create()), asyncio.create_task(work.watch())]
        await asyncio.sleep(max(5.0, 2 * think_s))
        await fleets.ask("reset")
        parts = {
            "store": list(bench.store_pids),
            "postgres": postgres_pids(bench.postgres_folder),
            "proxy": list(proxy.replicas[0].pids()),
            "fleets": [process.pid for process in fleets.running],
        }
        cpu, started = _cpu(parts), time.perf_counter()
        await asyncio.sleep(seconds)
        spent_s, count = time.perf_counter() - started, await fleets.ask("count")
        used = {name: after - cpu[name] for name, after in _cpu(parts).items()}
        await work.finish(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        seen = await fleets.end()
    raw = {
        "runners": runners,
        "think_s": think_s,
        "seconds": round(spent_s, 1),
        "opening_s": round(opening_s, 1),
        "rollouts_per_s": round(count / spent_s, 1),
        "cpu_ms_per_rollout": {name: round(value / count * 1e3, 3) for name, value in used.items()},
        "cores": {name: round(value / spent_s, 3) for name, value in used.items()},
        "store_kb_per_session": round(sessions_kb, 1),
        "empty_slot_ms": _quantiles(seen, "empty_s"),
        "acknowledged_ms": _quantiles(seen, "acknowledged_s"),
        "model_call_ms": _quantiles(seen, "model_s"),
        "groups_created": len(work.created),
        "groups_lost": len(work.created - work.ended.keys()),
        "groups_twice": sum(times > 1 for times in work.ended.values()),
        "results_not_applied": sum(each["not_applied"] for each in seen),
        "failed_calls": sum(each["failed_calls"] for each in seen),
        "broken_streams": sum(len(each["broken"]) for each in seen),
        "broken_by": dict(Counter(why for each in seen for why in each["broken"])),
    }
    return raw, _claims(raw)


def _claims(raw: dict[str, Any]) -> list[Any]:
    costs = Costs.measured(raw)
    deployment = Deployment(
        runners=raw["runners"], slots=1, think_s=raw["think_s"], calls=1,
        store_replicas=2, proxies=1, cores=os.cpu_count() or 1,
    )  # fmt: skip
    told = predicted(deployment, costs)
    raw["model"] = {"rollouts_per_s": round(told.rollouts_per_s, 1), "bound_by": told.bound_by}
    off = abs(told.rollouts_per_s / raw["rollouts_per_s"] - 1) * 100
    wrong = sum(raw[name] for name in ("groups_lost", "groups_twice", "results_not_applied", "failed_calls"))
    return [
        outcome.claim("runner sessions at once, one machine", raw["runners"], "sessions", goal=2000, better="higher"),
        outcome.claim("groups lost or doubled, results refused, calls failed", wrong, "of all", goal=0, better="lower"),
        outcome.claim("streams that broke", raw["broken_streams"], "streams", goal=0, better="lower"),
        outcome.claim("a slot stays empty, 99 of 100", raw["empty_slot_ms"]["p99"], "ms", goal=1000, better="lower"),
        outcome.claim("memory of a session at the store", raw["store_kb_per_session"], "kB", goal=100, better="lower"),
        outcome.claim("model of the deployment against what it carried", off, "%", goal=15, better="lower"),
    ]


def _cpu(parts: dict[str, list[int]]) -> dict[str, float]:
    return {name: processes.cpu_seconds(pids) for name, pids in parts.items()}


def _quantiles(seen: list[dict[str, Any]], name: str) -> dict[str, float]:
    values = sorted(value for each in seen for value in each[name])
    if not values:
        return {}
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    found = {key: values[min(len(values) - 1, int(share * len(values)))] * 1e3 for key, share in places.items()}
    return {key: round(value, 1) for key, value in found.items()} | {"mean": round(statistics.fmean(values) * 1e3, 1)}


async def _no_attempts(_: int) -> list[str]:
    raise AssertionError("the runners' attempts are the store's own")


def main() -> None:
    """Runs the load test and writes its results."""
    parser = argparse.ArgumentParser(description="Loads the whole system with thousands of runner sessions.")
    parser.add_argument("--runners", type=int, default=3000)
    parser.add_argument("--think", type=float, default=15.0, help="mean seconds that an agent thinks")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--short", action="store_true", default=bool(os.environ.get("SHORT")), help="300 runners, 10 s")
    arguments = parser.parse_args()
    load = {"runners": arguments.runners, "think_s": arguments.think, "seconds": arguments.seconds}
    if arguments.short:
        load = {"runners": 300, "think_s": 2.0, "seconds": 10.0}
    with tempfile.TemporaryDirectory(prefix="fulmen-scale-") as folder:
        Path(folder).chmod(0o755)
        raw, claims = uvloop.run(measure(Path(folder), **load))
    if arguments.short:
        outcome.show(raw, claims)
    else:
        outcome.write("scale", method=__doc__ or "", raw=raw, claims=claims)


if __name__ == "__main__":
    main()
