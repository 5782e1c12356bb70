"""What a call of the Responses API costs if its response is stored, which is the API's default, beside one with `store: false`.

The backend serves chat completions, so the proxy translates, and stores what is to be stored in a real store before the caller
gets it. Both kinds of calls take turns, 16 at a time, each of a small answer that is captured; CPU is that of the proxy, the
store and PostgreSQL per call, the delivery of captures included. Run `python -m benchmarks.proxy.stored [--rounds N]`; writes
benchmarks/results/proxy_stored.json. CPU holds on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import uvloop

from benchmarks import outcome
from benchmarks.proxy import fulmen, processes, stores
from benchmarks.proxy.cases import CASES
from benchmarks.proxy.client import Job
from benchmarks.store import stand

PATH = "/v1/responses"
CONCURRENCY = 16
CALLS = 1000
CASE = next(case for case in CASES if case.name == "small c16")
KINDS = {"stored": True, "not stored": False}


class Turns:
    """Measures the kinds in turn."""

    def __init__(self, client: processes.Client, proxy: fulmen.Fulmen, bench: stand.Bench) -> None:
        self._client, self._proxy, self._bench = client, proxy, bench
        self.found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    async def turn(self, kind: str, *, is_counted: bool) -> None:
        """Makes the calls of one kind.

        Raises:
            RuntimeError: if one of them fails.
        """
        keys = [key for _, key in await self._proxy.identities(CASE, CONCURRENCY)]
        target = self._proxy.target()
        body = {"model": "canned", "input": "size:small " + "x" * 200, "store": KINDS[kind]}
        job = Job(
            addresses=target.addresses,
            identities=[(PATH, key) for key in keys],
            body=json.dumps(body),
            concurrency=CONCURRENCY,
            calls=CALLS,
            stream=False,
            soft_s=0.0,
            limit_s=60.0,
            ramp_s=0.0,
        )
        before = self._spent()
        made = await self._client.run(job)
        await self._proxy.settle()
        after = self._spent()
        if made.errors:
            raise RuntimeError(f"calls failed: {made.errors} {made.examples}")
        if is_counted:
            costs = {part: (after[part] - before[part]) / made.calls * 1e6 for part in after}
            self.found[kind].append(costs | {"p50_ms": made.p50_ms})

    def _spent(self) -> dict[str, float]:
        bench = self._bench
        return {
            "proxy_us": processes.cpu_seconds(self._proxy.target().pids()),
            "store_us": processes.cpu_seconds(bench.store_pids),
            "postgres_us": stand.postgres_cpu_seconds(bench.postgres_folder),
        }

    def medians(self) -> dict[str, dict[str, dict[str, float]]]:
        """Returns the median, least and most of each figure, by kind."""
        return {
            kind: {
                part: {
                    "median": round(statistics.median(values), 2),
                    "least": round(min(values), 2),
                    "most": round(max(values), 2),
                }
                for part in rows[0]
                if (values := [row[part] for row in rows])
            }
            for kind, rows in self.found.items()
        }


async def measure(rounds: int) -> dict[str, Any]:
    """Runs the turns; returns the raw figures."""
    async with (
        processes.module("backend") as (_, port),
        processes.client() as client,
        stores.real() as store,
        fulmen.running(store, f"127.0.0.1:{port}") as proxy,
    ):
        assert store.bench is not None
        turns = Turns(client, proxy, store.bench)
        for number in range(rounds + 1):
            for kind in list(KINDS) if number % 2 else reversed(KINDS):
                await turns.turn(kind, is_counted=number > 0)
        stored = await _stored(store.bench.dsn)
        return {"rounds": rounds, "calls": CALLS, "responses_stored": stored, "kinds": turns.medians()}


async def _stored(dsn: str) -> int:
    connection = await stand.asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select count(*) from stored_response"))
    finally:
        await connection.close()


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Measures stored responses.")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    started = time.perf_counter()
    raw = uvloop.run(measure(rounds))
    sys.stdout.write(json.dumps(raw, indent=1) + f"\n{time.perf_counter() - started:.0f} s\n")
    outcome.write("proxy_stored", method=__doc__ or "", raw=raw, claims=[])


if __name__ == "__main__":
    main()
